// One block computes BLOCK_M rows of one head of out[m, o] = result(softmax_n(score(q[m, k] * keys[k, n])) *
// values[n, o]) with mma.sync (sm_80 and later; fp16, bf16, fp32 rounded to TF32); no score leaves the registers.
//
//   shared memory    [q][keys 0][values 0][keys 1][values 1]    rows are padded, so that a fragment's reads meet no bank
//                       |  cp.async, of 16 bytes or of an element, from the last block of keys to the first; while a
//                       |  block is multiplied the next one is on its way
//   a warp, 16 rows  scores = q * keys         fragments by ldmatrix
//                    score(), maximum, exp2, row sums                       common/online_softmax.cuh
//                    sums += probabilities * values                         the probabilities' registers are an operand
//   few rows         with SPLITS all warps have the same 16 rows, and each a ring of its own with every SPLITS-th block of
//                    keys, which no other warp waits for; at last the first one adds what all have found. They may be
//                    those of a CLUSTER of blocks (sm_90 and later), of which the first one's adds what the others' have
//
// A fragment of TF32 probabilities wants neighbouring threads' columns. Their order along the sum is free, so element t
// of four is column 2t of eight, and t + 4 is 2t + 1, and the values are read in that order.
//
// Launch: THREADS threads, SHARED_BYTES of dynamic shared memory, a grid of (tiles of rows, 1, heads of all batches or
// fewer); with clusters of (as many for each tile of rows of each head or fewer, 1, 1). Arguments as those of
// hopper/attention.cuh. Where rows of q, keys and values do not begin at whole vectors (not WIDE), or lie transposed,
// they are read element by element, wherever their strides say.
//
// The generated text before this file defines Element, Stored, the constants, the table Load<I>, and the functors Score
// and Result.
#pragma once
#include "common/online_softmax.cuh"
#include "common/cluster_shares.cuh"
#include "common/narrow_copy.cuh"

namespace onnxfuse {

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int STAGES = 2;  // of a block, or of each of its warps
constexpr int BLOCK_M = SPLITS > 1 ? WARP_ROWS : WARPS * WARP_ROWS;
constexpr int CHUNK = 16 / sizeof(Element);  // of one address of ldmatrix
constexpr int STEP = 2 * CHUNK;              // depth of one mma
constexpr int DEPTH = (HEAD + STEP - 1) / STEP * STEP;
constexpr int VALUE_COLUMNS = (VALUE_HEAD + 15) / 16 * 16;  // two fragments are loaded at once
constexpr bool IS_TF32 = sizeof(Element) == 4;

// Elements from row to row. An odd number of chunks: eight rows lie in different banks. TF32 values: rows 2t, with t of
// four, and eight columns.
constexpr int PITCH = DEPTH + CHUNK;
constexpr int VALUE_PITCH = IS_TF32 ? VALUE_HEAD + (20 - VALUE_HEAD % 16) % 16 : VALUE_COLUMNS + CHUNK;

constexpr int QUERY_BYTES = BLOCK_M * PITCH * sizeof(Element);
constexpr int KEY_BYTES = BLOCK_N * PITCH * sizeof(Element);
constexpr int VALUE_BYTES = BLOCK_N * VALUE_PITCH * sizeof(Element);
constexpr int STAGE_BYTES = KEY_BYTES + VALUE_BYTES;

constexpr int RING_BYTES = (SPLITS > 1 ? WARPS : 1) * STAGES * STAGE_BYTES;
constexpr int SHARES_OFFSET = QUERY_BYTES + RING_BYTES;  // of the other blocks of the cluster
using Shares = ClusterShares<CLUSTER, SHARES_OFFSET, SHARES_OFFSET + (CLUSTER - 1) * SHARE_BYTES>;

static_assert(SHARED_BYTES == SHARES_OFFSET + (CLUSTER > 1 ? Shares::BYTES + Shares::BARRIER_BYTES : 0),
              "footprint and kernel agree");
static_assert(BLOCK_N % 16 == 0 && HEAD % 8 == 0 && VALUE_HEAD % 8 == 0, "whole fragments");
static_assert(SPLITS == 1 ? CLUSTER == 1 : SPLITS == WARPS * CLUSTER && !LOOKS_AGAIN, "all warps share");
static_assert(SPLITS == 1 || (WARPS - 1) * SHARE_BYTES <= RING_BYTES, "shares lie where stages were");
// What one warp alone copies and reads is rounded as it is read.
constexpr bool ROUNDS_FRAGMENTS = IS_TF32 && SPLITS > 1;

struct Place {
  int row, head, batch;
};

// ---- shared memory: rows as they come

// body(row, column) for every vector, or element, that this thread copies: one of the block's, or of its warp's.
template <int ROWS, int COLUMNS, int COPIERS, typename Body>
__device__ __forceinline__ void for_own_copies(bool down, const Body& body) {
  constexpr int WIDTH = WIDE ? CHUNK : 1;
  constexpr int COUNT = COLUMNS / WIDTH;
  for (int i = threadIdx.x % COPIERS; i < ROWS * COUNT; i += COPIERS) {
    if (!WIDE && down) {
      body(i % ROWS, i / ROWS);
    } else {
      body(i / COUNT, i % COUNT * WIDTH);
    }
  }
}

// A matrix whose first element is `first`; rows from `rows` on, and columns beyond its own, are zeros.
struct Matrix {
  const Element* first;
  long long row_stride, column_stride;
};

// Where a thread's vectors lie below each other: a pointer goes down the rows.
template <int ROWS, int COLUMNS, int COLUMN_VECTORS, int ROW_PITCH, int COPIERS>
__device__ __forceinline__ void copy_down(unsigned target, const Matrix& matrix, int rows) {
  constexpr int DOWN = COPIERS / COLUMN_VECTORS;
  const int own = static_cast<int>(threadIdx.x) % COPIERS;
  const int row = own / COLUMN_VECTORS, column = own % COLUMN_VECTORS * CHUNK;
  const int left = column < COLUMNS ? rows - row : 0;
  const unsigned place = target + (row * ROW_PITCH + column) * static_cast<int>(sizeof(Element));
  const Element* source = matrix.first + row * matrix.row_stride + column;
#pragma unroll
  for (int i = 0; i < ROWS; i += DOWN, source += DOWN * matrix.row_stride) {
    copy_async<16>(place + i * ROW_PITCH * static_cast<int>(sizeof(Element)), source, i < left);
  }
}

// Elements of 16 bits from row `first_row` on pass through registers, several at once, so that a thread waits for memory once
// for all of them. Where rows are neighbours in memory, neighbouring threads read them.
template <int ROWS, int COLUMNS, int PADDED, int ROW_PITCH, int COPIERS>
__device__ __forceinline__ void copy_elements(unsigned target, const Matrix& matrix, int rows, int first_row) {
  const bool down = matrix.row_stride == 1;
  copy_small<2, (ROWS * PADDED + COPIERS - 1) / COPIERS>([&](int number) {
    const int i = threadIdx.x % COPIERS + number * COPIERS;
    const int row = down ? i % ROWS : i / PADDED, column = down ? i / ROWS : i % PADDED;
    const bool wanted = i < ROWS * PADDED && row >= first_row, inside = wanted && row < rows && column < COLUMNS;
    const Element* source = matrix.first + (inside ? row * matrix.row_stride + column * matrix.column_stride : 0);
    return SmallCopy{target + (row * ROW_PITCH + column) * static_cast<int>(sizeof(Element)), source, inside, wanted};
  });
}

// Of rows that are neighbours in memory vectors of CHUNK, which are turned as they are stored: neighbouring threads have
// neighbouring columns, whose stores meet in no bank. What is left of the rows goes element by element.
template <int ROWS, int COLUMNS, int PADDED, int ROW_PITCH, int COPIERS>
__device__ __forceinline__ void copy_turned(unsigned target, const Matrix& matrix, int rows) {
  using Vector = Packed<unsigned short, CHUNK>;
  constexpr int AT_ONCE = 4;
  const auto* source = reinterpret_cast<const unsigned short*>(matrix.first);
  const int whole = max(min(rows, ROWS), 0) / CHUNK * CHUNK, count = whole / CHUNK * PADDED;
#pragma unroll 1
  for (int first = threadIdx.x % COPIERS; first < count; first += AT_ONCE * COPIERS) {
    Vector vectors[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int vector = first + i * COPIERS, row = vector / PADDED * CHUNK, column = vector % PADDED;
      const bool inside = vector < count && column < COLUMNS;
      vectors[i] = load_cached<Vector>(source + (inside ? row + column * matrix.column_stride : 0), inside);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int vector = first + i * COPIERS, row = vector / PADDED * CHUNK, column = vector % PADDED;
      if (vector >= count) break;
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) {
        const int offset = (row + j) * ROW_PITCH + column;
        store_small<2>(target + offset * static_cast<int>(sizeof(Element)), vectors[i].values[j]);
      }
    }
  }
  if (whole < ROWS) copy_elements<ROWS, COLUMNS, PADDED, ROW_PITCH, COPIERS>(target, matrix, rows, whole);
}

template <int ROWS, int COLUMNS, int PADDED, int ROW_PITCH, int COPIERS = THREADS>
__device__ __forceinline__ void copy_rows(unsigned target, const Matrix& matrix, int rows) {
  constexpr int VECTORS = PADDED / CHUNK;
  if constexpr (!WIDE && !IS_TF32) {
    const auto pitch = matrix.column_stride * static_cast<long long>(sizeof(Element));
    const bool turns = matrix.row_stride == 1 && ((reinterpret_cast<unsigned long long>(matrix.first) | pitch) & 15) == 0;
    if (turns) return copy_turned<ROWS, COLUMNS, PADDED, ROW_PITCH, COPIERS>(target, matrix, rows);
    return copy_elements<ROWS, COLUMNS, PADDED, ROW_PITCH, COPIERS>(target, matrix, rows, 0);
  }
  if constexpr (WIDE && SPLITS > 1 && COPIERS % VECTORS == 0 && ROWS * VECTORS % COPIERS == 0) {
    copy_down<ROWS, COLUMNS, VECTORS, ROW_PITCH, COPIERS>(target, matrix, rows);
    return;
  }
  for_own_copies<ROWS, PADDED, COPIERS>(matrix.row_stride == 1, [&](int row, int column) {
    const bool inside = row < rows && column < COLUMNS;
    const unsigned place = target + (row * ROW_PITCH + column) * static_cast<int>(sizeof(Element));
    const Element* source = matrix.first + (inside ? row * matrix.row_stride + column * matrix.column_stride : 0);
    copy_async<WIDE ? 16 : 4>(place, source, inside);
  });
}

// What this thread has copied is rounded where it lies: every warp reads it.
template <int ROWS, int PADDED, int ROW_PITCH>
__device__ __forceinline__ void round_rows(unsigned char* memory, bool down) {
  if constexpr (IS_TF32) {
    for_own_copies<ROWS, PADDED, THREADS>(down, [&](int row, int column) {
      unsigned* words = reinterpret_cast<unsigned*>(memory) + row * ROW_PITCH + column;
#pragma unroll
      for (int i = 0; i < (WIDE ? CHUNK : 1); ++i) round_to_tf32(words[i]);
    });
  }
}

// ---- products

__device__ __forceinline__ void multiply(float* acc, const unsigned (&lhs)[4], const unsigned (&rhs)[2]) {
  multiply_fragment(Element(), reinterpret_cast<float(&)[4]>(*acc), lhs, rhs);
}

template <int COUNT>
__device__ __forceinline__ void round_fragment(unsigned (&words)[COUNT]) {
  if constexpr (ROUNDS_FRAGMENTS) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) round_to_tf32(words[i]);
  }
}

__device__ __forceinline__ void multiply_query(float (&scores)[SCORES], unsigned query, unsigned keys) {
#pragma unroll
  for (int i = 0; i < SCORES; ++i) scores[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < DEPTH; step += STEP) {
    unsigned lhs[4];
    load_matrices(lhs, query + (lane() % 16 * PITCH + step + lane() / 16 * CHUNK) * static_cast<int>(sizeof(Element)));
#pragma unroll
    for (int column = 0; column < BLOCK_N; column += 16) {
      const int row = column + lane() % 8 + lane() / 16 * 8;
      unsigned rhs[4];
      load_matrices(rhs, keys + (row * PITCH + step + lane() / 8 % 2 * CHUNK) * static_cast<int>(sizeof(Element)));
      round_fragment(rhs);
      multiply(scores + column / 2, lhs, {rhs[0], rhs[1]});
      multiply(scores + column / 2 + 4, lhs, {rhs[2], rhs[3]});
    }
  }
}

// 16-bit values: of 16 keys, two fragments of columns at once.
__device__ __forceinline__ void multiply_halves(float (&sums)[SUMS], const unsigned (&lhs)[4], unsigned values) {
#pragma unroll
  for (int column = 0; column < VALUE_HEAD; column += 16) {
    unsigned rhs[4];
    load_matrices_transposed(rhs, values + (lane() % 16 * VALUE_PITCH + column + lane() / 16 * 8) * 2);
    multiply(sums + column / 2, lhs, {rhs[0], rhs[1]});
    if (column + 8 < VALUE_HEAD) multiply(sums + column / 2 + 4, lhs, {rhs[2], rhs[3]});
  }
}

// TF32 values, of 8 keys.
__device__ __forceinline__ void multiply_words(float (&sums)[SUMS], const unsigned (&lhs)[4], unsigned values) {
#pragma unroll
  for (int column = 0; column < VALUE_HEAD; column += 8) {
    const unsigned first = values + (lane() % 4 * 2 * VALUE_PITCH + column + lane() / 4) * 4;
    unsigned rhs[2] = {load_shared_word(first), load_shared_word(first + VALUE_PITCH * 4)};
    round_fragment(rhs);
    multiply(sums + column / 2, lhs, rhs);
  }
}

__device__ __forceinline__ void multiply_probabilities(float (&sums)[SUMS], const float (&scores)[SCORES],
                                                       unsigned values) {
  if constexpr (IS_TF32) {
#pragma unroll
    for (int key = 0; key < BLOCK_N; key += 8) {
      unsigned lhs[4];
      round_probabilities(lhs, scores + key / 2);
      multiply_words(sums, lhs, values + key * VALUE_PITCH * 4);
    }
  } else {
    unsigned words[WORDS];
    pack(words, scores);
#pragma unroll
    for (int key = 0; key < BLOCK_N; key += 16) {
      const unsigned lhs[4] = {words[key / 4], words[key / 4 + 1], words[key / 4 + 2], words[key / 4 + 3]};
      multiply_halves(sums, lhs, values + key * VALUE_PITCH * 2);
    }
  }
}

// ---- a tile of rows

struct Block {
  const OnnxfuseArguments& args;
  unsigned char* memory;
  unsigned shared;
  Place place;
  Matrix keys, values;

  // With SPLITS a block lies in the ring of the warp that it belongs to: neighbours are of different multiprocessors.
  __device__ __forceinline__ int stage(int block) const {
    if constexpr (SPLITS == 1) return QUERY_BYTES + block % STAGES * STAGE_BYTES;
    return QUERY_BYTES + (block % SPLITS / CLUSTER * STAGES + block / SPLITS % STAGES) * STAGE_BYTES;
  }

  __device__ __forceinline__ void copy(int block) const {
    constexpr int COPIERS = SPLITS > 1 ? WARP_SIZE : THREADS;
    const int key = block * BLOCK_N;
    const Matrix own_keys = {keys.first + key * keys.row_stride, keys.row_stride, keys.column_stride};
    const Matrix own_values = {values.first + key * values.row_stride, values.row_stride, values.column_stride};
    copy_rows<BLOCK_N, HEAD, DEPTH, PITCH, COPIERS>(shared + stage(block), own_keys, args.n - key);
    copy_rows<BLOCK_N, VALUE_HEAD, VALUE_HEAD, VALUE_PITCH, COPIERS>(shared + stage(block) + KEY_BYTES, own_values,
                                                                     args.n - key);
  }

  __device__ __forceinline__ void round(int block) const {
    round_rows<BLOCK_N, DEPTH, PITCH>(memory + stage(block), keys.row_stride == 1);
    round_rows<BLOCK_N, VALUE_HEAD, VALUE_PITCH>(memory + stage(block) + KEY_BYTES, values.row_stride == 1);
  }
};

template <bool LAST>
__device__ __forceinline__ void attend_block(const Block& own, int block, int warp_row, float (&sums)[SUMS],
                                             Softmax& softmax) {
  const Operands at = {0, nullptr, warp_row, block * BLOCK_N + lane() % 4 * 2, own.args.n};
  float scores[SCORES], rescale[2];
  multiply_query(scores, own.shared + warp_row * PITCH * static_cast<int>(sizeof(Element)),
                 own.shared + own.stage(block));
  apply_score<LAST>(scores, own.args, own.place, at);
  exponentiate(scores, softmax, rescale);
  scale_sums(sums, rescale);
  multiply_probabilities(sums, scores, own.shared + own.stage(block) + KEY_BYTES);
}

// All warps' shares -> the first one's. Whether this is that one.
__device__ __forceinline__ bool gather_shares(float (&sums)[SUMS], Softmax& softmax, unsigned char* memory) {
  const int warp = threadIdx.x / WARP_SIZE;
  __syncthreads();  // the stages are read
  if (warp > 0) write_share(sums, softmax, memory + (warp - 1) * SHARE_BYTES);
  __syncthreads();
  if (warp > 0) return false;
#pragma unroll 1
  for (int share = 0; share < WARPS - 1; ++share) add_share(sums, softmax, memory + share * SHARE_BYTES);
  return true;
}

// This warp's blocks of keys, from the last one to the first.
__device__ __forceinline__ void attend_share(const Block& own, const Matrix& query, const Blocks& blocks,
                                             float (&sums)[SUMS], Softmax& softmax) {
  const int warp = static_cast<int>(threadIdx.x) / WARP_SIZE;
  const int number = CLUSTER > 1 ? warp * CLUSTER + cluster_rank() : warp;
  const int last = blocks.end - 1 - (blocks.end - 1 - number + SPLITS) % SPLITS;  // may lie before the first
  copy_rows<BLOCK_M, HEAD, DEPTH, PITCH>(own.shared, query, own.args.m - own.place.row);
  copy_async_commit();
  const auto copy = [&](int block) {
    if (block >= blocks.first) own.copy(block);
    copy_async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) copy(last - stage * SPLITS);
  copy_async_wait<STAGES>();
  round_rows<BLOCK_M, DEPTH, PITCH>(own.memory, query.row_stride == 1);
  __syncthreads();
#pragma unroll 1
  for (int block = last; block >= blocks.first; block -= SPLITS) {
    copy_async_wait<STAGES - 1>();
    __syncwarp();  // all lanes' copies have landed
    attend_block<true>(own, block, 0, sums, softmax);
    __syncwarp();  // all have read what is copied over
    copy(block - STAGES * SPLITS);
  }
}

__device__ __forceinline__ void attend_together(const Block& own, const Matrix& query, Shares& shares) {
  float sums[SUMS] = {};
  Softmax softmax;
  attend_share(own, query, blocks_in_sight(own.args, own.place.row, BLOCK_M), sums, softmax);
  if constexpr (CLUSTER > 1) shares.meet();
  if (!gather_shares(sums, softmax, own.memory + QUERY_BYTES)) return;
  if constexpr (CLUSTER > 1) {
    if (!shares.gather(sums, softmax)) return;
  }
  finish(sums, softmax, own.args, own.place, 0);
}

// Whether any warp of the block has rows of nothing but low scores; all stages are free then.
__device__ __forceinline__ bool is_low_anywhere(const Block& own, const Softmax& softmax, int warp_row) {
  __syncthreads();
  int* found = reinterpret_cast<int*>(own.memory + QUERY_BYTES);
  if (threadIdx.x == 0) *found = 0;
  __syncthreads();
  if (is_low(softmax, own.place.row + warp_row, own.args.m) && lane() == 0) *found = 1;
  __syncthreads();
  const bool low = *found != 0;
  __syncthreads();
  return low;
}

// The blocks of keys out of sight, for rows that look at them too.
__device__ __forceinline__ void attend_others(const Block& own, const Blocks& seen, int warp_row, float (&sums)[SUMS],
                                              Softmax& softmax) {
#pragma unroll 1
  for (int block = 0; block < blocks_of_keys(own.args); ++block) {
    if (block >= seen.first && block < seen.end) continue;
    own.copy(block);
    copy_async_commit();
    copy_async_wait<0>();
    own.round(block);
    __syncthreads();
    attend_block<true>(own, block, warp_row, sums, softmax);
    __syncthreads();
  }
}

__device__ __forceinline__ void attend(const Block& own, const Matrix& query) {
  const int warp_row = threadIdx.x / WARP_SIZE * WARP_ROWS;
  const Blocks blocks = blocks_in_sight(own.args, own.place.row, BLOCK_M);
  const int last = blocks.end - 1;
  float sums[SUMS] = {};
  Softmax softmax;
  copy_rows<BLOCK_M, HEAD, DEPTH, PITCH>(own.shared, query, own.args.m - own.place.row);
  own.copy(last);
  copy_async_commit();
#pragma unroll 1
  for (int block = last; block >= blocks.first; --block) {
    copy_async_wait<0>();
    if (block == last) round_rows<BLOCK_M, DEPTH, PITCH>(own.memory, query.row_stride == 1);
    own.round(block);
    __syncthreads();
    if (block > blocks.first) own.copy(block - 1);
    copy_async_commit();
    if (block == last) {
      attend_block<true>(own, block, warp_row, sums, softmax);
    } else {
      attend_block<false>(own, block, warp_row, sums, softmax);
    }
  }
  if constexpr (LOOKS_AGAIN) {
    if (!are_all(own.args, blocks) && is_low_anywhere(own, softmax, warp_row)) {
      attend_others(own, blocks, warp_row, sums, softmax);
    }
  }
  finish(sums, softmax, own.args, own.place, warp_row);
}

// Which head of the keys, or of the values, serves one of the query: as many as share it follow each other.
__device__ __forceinline__ const Element* first_of(const OnnxfuseArguments& args, const OnnxfuseTensor& part,
                                                   const OnnxfuseOuter& outer, const Place& place) {
  const int head = part.batch_stride ? place.head / (args.lhs_outer.batches / outer.batches) : 0;
  return static_cast<const Element*>(part.pointer) + head * part.batch_stride + place.batch * outer.batch_stride;
}

// The rows of one head, or of one number of all batches' heads.
__device__ __forceinline__ void attend_head(const OnnxfuseArguments& args, unsigned char* memory, int row, int number,
                                            Shares& shares) {
  const int batch = number / args.lhs_outer.batches;
  const Place place = {row, number - batch * args.lhs_outer.batches, batch};
  const OnnxfuseTensor &q = args.lhs, &k = args.rhs[0], &v = args.rhs[1];
  const Element* first = static_cast<const Element*>(q.pointer) + place.head * q.batch_stride +
                         place.batch * args.lhs_outer.batch_stride + place.row * q.row_stride;
  const Block block = {args, memory, shared_address(memory), place,
                       {first_of(args, k, args.rhs_outer, place), k.column_stride, k.row_stride},
                       {first_of(args, v, args.values_outer, place), v.row_stride, v.column_stride}};
  const Matrix query = {first, q.row_stride, q.column_stride};
  if constexpr (SPLITS > 1) {
    attend_together(block, query, shares);
  } else {
    attend(block, query);
  }
}

// A block for each tile of rows, and of as many heads as it takes.
__device__ __forceinline__ void attend_heads(const OnnxfuseArguments& args, unsigned char* memory, Shares& shares) {
  const int row = static_cast<int>(blockIdx.x) * BLOCK_M;
  if (row >= args.m) return;
#pragma unroll 1
  for (int number = blockIdx.z; number < args.batch; number += gridDim.z) {
    attend_head(args, memory, row, number, shares);
    __syncthreads();
  }
}

// A cluster for each tile of rows of each head, or of as many as it takes.
__device__ __forceinline__ void attend_tiles(const OnnxfuseArguments& args, unsigned char* memory, Shares& shares) {
  const int tiles_m = (args.m - 1) / BLOCK_M + 1, clusters = static_cast<int>(gridDim.x) / CLUSTER;
  if (threadIdx.x == 0) {
    Shares::init_barriers(shares.shared);
    barrier_init_fence();
  }
  __syncwarp();
  cluster_arrive();
  wait_for_kernel_before();
  let_kernel_behind_start();
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x) / CLUSTER; tile < tiles_m * args.batch; tile += clusters) {
    const int number = tile / tiles_m;
    attend_head(args, memory, (tile - number * tiles_m) * BLOCK_M, number, shares);
    __syncthreads();
  }
  shares.meet();
  if (threadIdx.x < WARP_SIZE) shares.await_read();
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, onnxfuse::RESIDENTS) ONNXFUSE_CLUSTER
onnxfuse_attention(const __grid_constant__ OnnxfuseArguments args) {
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  onnxfuse::Shares shares = {onnxfuse_shared, onnxfuse::shared_address(onnxfuse_shared)};
  if constexpr (onnxfuse::CLUSTER > 1) {
    onnxfuse::attend_tiles(args, onnxfuse_shared, shares);
  } else {
    onnxfuse::wait_for_kernel_before();
    onnxfuse::let_kernel_behind_start();
    onnxfuse::attend_heads(args, onnxfuse_shared, shares);
  }
}
