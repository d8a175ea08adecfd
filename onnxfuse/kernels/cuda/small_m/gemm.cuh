// One block computes out[16, BLOCK_N] = epilogue(acc_0 .. acc_{PARTS-1}) with acc_p = lhs[16, k] * rhs_p[k, BLOCK_N]
// for small M, as in decoding: the time is that of reading rhs once, so rhs goes straight from memory into the
// registers that mma.sync wants, 16 bytes a lane and a load, and no warp waits for another until k is done. For 16-bit
// types and for fp32, in TF32 or exact, on sm_80 and later.
//
//   global      rhs, BLOCK_K of all columns     lhs, BLOCK_K of 16 rows     each warp every WARPS_K-th block of k
//                  |  past L1                      |  through L1
//   registers   [stage 0] .. [stage STAGES-1]                               loaded again as soon as they are multiplied
//                  |  mma.sync
//   registers   acc[fragment][4]                                            all columns, this warp's share of k
//                  |
//   shared      sums[warp][16][all parts side by side]                      the only barrier
//                  |  added warp after warp: the same input gives the same bits
//   shared      shares[block][16][all parts side by side]                   with SPLITS: of the other blocks of a cluster,
//                  |  added block after block                               whose warps have shares of k too (sm_90 and later)
//   registers   acc of all parts of one output element in the same thread -> Epilogue -> global
//
// The order of k inside of a product is free, and so is the order of columns. Both are chosen such that what a lane has
// loaded is what it multiplies, without a shuffle. Lane 4g + t multiplies column g of a fragment and four k of sixteen:
//
//   lhs[m, k]   lane 4g + t loads k 8t .. 8t+7 of rows g and g + 8: four k for a first mma and four for a second
//   rhs[n, k]   lane 4g + t loads k 8t .. 8t+7 of column g: the same four and four, once for every fragment
//   rhs[k, n]   lane 4g + t loads columns 8g .. 8g+7 of rows 8t .. 8t+7: column g of fragment j is column 8g + j;
//               in narrow tiles columns 4g .. 4g+3, and so on
//
// So it is for 16-bit types. Of fp32, 16 bytes are four elements instead of eight: k 4t .. 4t+3, two for each mma, and
// columns 4g .. 4g+3. Rows of lhs that begin anywhere come in copies of LHS_WIDTH elements: lhs is small, and in L1.
//
// Where n is small, a block for each tile leaves most multiprocessors without work, and reads what it needs no faster
// than one of them can. So a tile may have a cluster of SPLITS blocks, the first of which gets the sums of the others by
// st.async through distributed shared memory, and does all that follows.
//
// Launch and arguments: as the portable kernel's; with SPLITS a grid of (as many clusters as there are tiles of all
// batches, or fewer, 1, 1). Contract: pointers, strides and the extent of rhs along its contiguous axis are multiples of
// 16 bytes, those of lhs of LHS_WIDTH elements; loads and outputs are read and written element by element.
//
// The generated text before this file defines Element, MATH, RHS_K_CONTIGUOUS, LHS_WIDTH, PARTS, the BLOCK_ constants,
// WARPS_K, SPLITS, STAGES, RESIDENT_BLOCKS, SUMS_PITCH, SHARED_BYTES, the tables Load<I> and Out<I>, and the struct
// Epilogue.
#pragma once
#include "common/arguments.cuh"
#include "portable/split_fp32.cuh"
#include "common/cluster_ptx.cuh"
#include "common/addressing.cuh"
#include "common/epilogue_element.cuh"

namespace onnxfuse {

constexpr int WARP_SIZE = 32;
constexpr int CHUNK = 16 / sizeof(Element);  // elements of one load
constexpr int WORD_ELEMENTS = 4 / sizeof(Element);
constexpr int MULTIPLICATIONS = 2;  // mma that a chunk of each lane feeds
constexpr int STEP_K = 4 * CHUNK;   // a row's four lanes, a chunk of lhs each
constexpr int STEPS = BLOCK_K / STEP_K;
constexpr int FRAGMENT_COLUMNS = 8;
constexpr int LANE_GROUPS = 8;  // lanes that differ in g

// All parts lie side by side: of rhs[n, k] in fragments, of rhs[k, n] in groups of eight lanes' columns. Columns that
// the last group has too many repeat the last ones. Narrow tiles take 8-byte loads, which make narrow groups.
constexpr int WIDTH = PARTS * BLOCK_N;
constexpr int LANE_COLUMNS = WIDTH > LANE_GROUPS * CHUNK / 2 ? CHUNK : CHUNK / 2;
constexpr int GROUPS = (WIDTH - 1) / (LANE_GROUPS * LANE_COLUMNS) + 1;
constexpr int FRAGMENTS = RHS_K_CONTIGUOUS ? WIDTH / FRAGMENT_COLUMNS : GROUPS * LANE_COLUMNS;
constexpr int SETS = RHS_K_CONTIGUOUS ? FRAGMENTS : GROUPS;  // loads that are multiplied, and done again, together
constexpr int SET_LOADS = RHS_K_CONTIGUOUS ? 1 : CHUNK;
constexpr int SET_FRAGMENTS = FRAGMENTS / SETS;
constexpr int WARP_SUMS = BLOCK_M * SUMS_PITCH;

// Of a cluster, in the first block's shared memory: a share of each other block, and a barrier that counts their bytes.
constexpr int SHARES = SPLITS - 1;
constexpr int SHARE_SUMS = BLOCK_M * WIDTH;
constexpr int SHARES_OFFSET = WARPS_K * WARP_SUMS * static_cast<int>(sizeof(float));
constexpr int BARRIER_OFFSET = SHARES_OFFSET + SHARES * SHARE_SUMS * static_cast<int>(sizeof(float));
constexpr int BARRIER_BYTES = SPLITS > 1 ? 8 : 0;

static_assert(BLOCK_M == 16, "the rows of one mma");
static_assert(BLOCK_N % FRAGMENT_COLUMNS == 0 && BLOCK_K % STEP_K == 0, "whole fragments and chunks");
static_assert(MATH != Math::fp32, "exact fp32 is computed on the tensor cores");
constexpr bool IS_SPLIT = MATH == Math::split_fp32;
static_assert(SUMS_PITCH >= FRAGMENTS * FRAGMENT_COLUMNS && SUMS_PITCH % 2 == 0, "footprint and kernel agree");
static_assert(SHARED_BYTES == BARRIER_OFFSET + BARRIER_BYTES, "footprint and kernel agree");

// Neighbours of one tensor, as the registers that they are.
template <int ELEMENTS>
struct alignas(ELEMENTS * sizeof(Element)) Chunk {
  using Type = Element;
  unsigned words[ELEMENTS / WORD_ELEMENTS];
};
using RhsChunk = Chunk<RHS_K_CONTIGUOUS ? CHUNK : LANE_COLUMNS>;

// A lane's chunk of lhs, as it comes: in copies of so many elements. Single ones of 16 bits have a register each until
// they are multiplied: joined at once, they would be waited for.
template <int COPY>
struct LhsChunk {
  static constexpr bool IN_HALVES = COPY < WORD_ELEMENTS;
  unsigned parts[IN_HALVES ? CHUNK : CHUNK / WORD_ELEMENTS];

  // The elements from a k on that exist in so much depth, and zeros behind them.
  __device__ __forceinline__ void load(const Element* first, int k, int depth) {
#pragma unroll
    for (int i = 0; i < CHUNK; i += COPY) {
      if constexpr (IN_HALVES) {
        parts[i] = load_small<sizeof(Element)>(first + i, k + i < depth);
      } else {
        constexpr int WORDS = COPY / WORD_ELEMENTS;
        const auto* from = reinterpret_cast<const unsigned*>(first + i);
        const auto words = load_cached<Packed<unsigned, WORDS>>(from, k + i < depth);
#pragma unroll
        for (int j = 0; j < WORDS; ++j) parts[i / WORD_ELEMENTS + j] = words.values[j];
      }
    }
  }
  __device__ __forceinline__ unsigned word(int i) const {
    if constexpr (IN_HALVES) {
      return parts[2 * i] | parts[2 * i + 1] << 16;
    } else {
      return parts[i];
    }
  }
};

__device__ __forceinline__ int lane_group() { return threadIdx.x % WARP_SIZE / 4; }  // g
__device__ __forceinline__ int lane_depth() { return threadIdx.x % 4 * CHUNK; }      // 8t, or 4t

// Rows and columns beyond the tensor repeat its last ones: their results are never stored.
struct LhsStream {
  const Element* rows[2];

  __device__ __forceinline__ LhsStream(const OnnxfuseArguments& args, int batch, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int inside = min(row + lane_group() + half * 8, args.m - 1);
      rows[half] = factor_pointer<Element, LHS_OUTER_BATCH>(args.lhs, args.lhs_outer, batch, inside, lane_depth());
    }
  }
  __device__ __forceinline__ const Element* chunk(int half, int k) const { return rows[half] + k; }
};

template <bool K_CONTIGUOUS>
struct RhsStream {  // rhs[n, k]: a set is a fragment
  const Element* columns[SETS];

  __device__ __forceinline__ RhsStream(const OnnxfuseArguments& args, int batch, int column) {
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
      const int at = set * FRAGMENT_COLUMNS;
      const int inside = min(column + at % BLOCK_N + lane_group(), args.n - 1);
      const OnnxfuseTensor& tensor = args.rhs[at / BLOCK_N];
      columns[set] = factor_pointer<Element, RHS_OUTER_BATCH>(tensor, args.rhs_outer, batch, lane_depth(), inside);
    }
  }
  __device__ __forceinline__ const Element* chunk(int set, int, int k) const { return columns[set] + k; }

  static __device__ __forceinline__ void fragment(unsigned (&words)[2], const RhsChunk (&chunks)[SET_LOADS], int,
                                                  int half) {
    words[0] = chunks[0].words[2 * half];
    words[1] = chunks[0].words[2 * half + 1];
  }
  static __device__ __forceinline__ void store(float* row, const float (&acc)[FRAGMENTS][4], int half) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
      store_pair(row + f * FRAGMENT_COLUMNS + threadIdx.x % 4 * 2, acc[f][2 * half], acc[f][2 * half + 1]);
    }
  }
};

template <>
struct RhsStream<false> {  // rhs[k, n]: a set is a group, and its loads are rows
  const Element* columns[SETS];
  long long row_stride[SETS];

  __device__ __forceinline__ RhsStream(const OnnxfuseArguments& args, int batch, int column) {
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
      const int at = min((set * LANE_GROUPS + lane_group()) * LANE_COLUMNS, WIDTH - LANE_COLUMNS);
      const OnnxfuseTensor& tensor = args.rhs[at / BLOCK_N];
      const int inside = min(column + at % BLOCK_N, args.n - LANE_COLUMNS);
      columns[set] = factor_pointer<Element, RHS_OUTER_BATCH>(tensor, args.rhs_outer, batch, lane_depth(), inside);
      row_stride[set] = tensor.row_stride;
    }
  }
  __device__ __forceinline__ const Element* chunk(int set, int row, int k) const {
    return columns[set] + k * row_stride[set] + row * row_stride[set];
  }

  // Element j of the chunks that make a word, neighbours along k: of one in fp32, of two in 16 bits, side by side.
  static __device__ __forceinline__ unsigned word(const RhsChunk* rows, int j) {
    if constexpr (WORD_ELEMENTS == 1) {
      return rows[0].words[j];
    } else {
      const unsigned low = rows[0].words[j / 2], high = rows[1].words[j / 2];
      return j % 2 == 0 ? (low & 0xffff) | high << 16 : low >> 16 | (high & 0xffff0000);
    }
  }
  static __device__ __forceinline__ void fragment(unsigned (&words)[2], const RhsChunk (&rows)[SET_LOADS], int j,
                                                  int half) {
    words[0] = word(rows + 2 * half * WORD_ELEMENTS, j);
    words[1] = word(rows + (2 * half + 1) * WORD_ELEMENTS, j);
  }
  static __device__ __forceinline__ void store(float* row, const float (&acc)[FRAGMENTS][4], int half) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f += 2) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int lane = f / LANE_COLUMNS * LANE_GROUPS + threadIdx.x % 4 * 2 + side;
        store_pair(row + lane * LANE_COLUMNS + f % LANE_COLUMNS, acc[f][2 * half + side], acc[f + 1][2 * half + side]);
      }
    }
  }
};
using Rhs = RhsStream<RHS_K_CONTIGUOUS>;

// To TF32.
template <int WORDS>
__device__ __forceinline__ void round_each(unsigned (&words)[WORDS]) {
  if constexpr (MATH == Math::tf32) {
#pragma unroll
    for (unsigned& word : words) round_to_tf32(word);
  }
}

// Words of exact fp32 become big, as split_fp32.cuh calls it; elsewhere nothing is small.
template <int WORDS>
struct Small {
  unsigned words[WORDS];

  __device__ __forceinline__ Small(unsigned (&values)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = IS_SPLIT ? split(values[i]) : 0;
  }
};

__device__ __forceinline__ void add_product(float (&acc)[4], const unsigned (&rows)[4], const Small<4>& small_rows,
                                            unsigned (&columns)[2]) {
  if constexpr (IS_SPLIT) {
    const Small<2> small_columns(columns);
    float step[4] = {};
    multiply_fragment(Element(), step, small_rows.words, columns);
    multiply_fragment(Element(), step, rows, small_columns.words);
    multiply_fragment(Element(), step, rows, columns);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] += step[e];
  } else {
    round_each(columns);
    multiply_fragment(Element(), acc, rows, columns);
  }
}

// BLOCK_K of both operands in one lane's registers.
struct Stage {
  LhsChunk<LHS_WIDTH> lhs[STEPS][2];
  RhsChunk rhs[SETS][STEPS][SET_LOADS];

  __device__ __forceinline__ void load_lhs(const LhsStream& stream, int k, int depth) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = k + step * STEP_K;
        lhs[step][half].load(stream.chunk(half, at), at + lane_depth(), depth);
      }
    }
  }

  __device__ __forceinline__ void load_rhs(const Rhs& stream, int set, int k, int depth) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int load = 0; load < SET_LOADS; ++load) {
        const int at = k + step * STEP_K, row = LHS_WIDTH < CHUNK ? load : 0;  // depth may end in a chunk
        rhs[set][step][load] = load_streamed<RhsChunk>(stream.chunk(set, load, at), at + lane_depth() + row < depth);
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[FRAGMENTS][4], int set) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (set == 0) {  // the other sets find it rounded
        round_each(lhs[step][0].parts);
        round_each(lhs[step][1].parts);
      }
#pragma unroll
      for (int half = 0; half < MULTIPLICATIONS; ++half) {
        const auto& first = lhs[step][0];
        const auto& second = lhs[step][1];
        unsigned rows[4] = {first.word(2 * half), second.word(2 * half), first.word(2 * half + 1),
                            second.word(2 * half + 1)};
        const Small<4> small_rows(rows);
#pragma unroll
        for (int j = 0; j < SET_FRAGMENTS; ++j) {
          unsigned columns[2];
          Rhs::fragment(columns, rhs[set][step], j, half);
          add_product(acc[set * SET_FRAGMENTS + j], rows, small_rows, columns);
        }
      }
    }
  }
};

__device__ __forceinline__ int block_of_cluster() {
  if constexpr (SPLITS > 1) return cluster_rank();
  return 0;
}

// What the main loop loads of rhs at first, on its way into L2 beside the end of the kernel before: where that kernel
// makes rhs, nothing old stays there. A line for each thread and turn.
__device__ __forceinline__ void prefetch_first(const OnnxfuseArguments& args, int batch, int column) {
  constexpr int LINE = 128 / sizeof(Element), DEPTH = STAGES * WARPS_K * BLOCK_K;
  constexpr int ALONG = RHS_K_CONTIGUOUS ? DEPTH : BLOCK_N, ACROSS = RHS_K_CONTIGUOUS ? BLOCK_N : DEPTH;
  constexpr int LINES = (ALONG - 1) / LINE + 1;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < PARTS * ACROSS * LINES; i += THREADS) {
    const int across = i / LINES % ACROSS, along = i % LINES * LINE;
    const int k = RHS_K_CONTIGUOUS ? along : across, n = column + (RHS_K_CONTIGUOUS ? across : along);
    if (k >= args.k || n >= args.n) continue;
    const OnnxfuseTensor& tensor = args.rhs[i / (ACROSS * LINES)];
    prefetch_into_l2(factor_pointer<Element, RHS_OUTER_BATCH>(tensor, args.rhs_outer, batch, k, n));
  }
}

// acc += lhs * rhs over this warp's blocks of k; what lies beyond k is zero. Registers are loaded again as soon as they
// have been multiplied, so nearly all of them are on their way at any time.
__device__ __forceinline__ void run_main_loop(float (&acc)[FRAGMENTS][4], const LhsStream& lhs, const Rhs& rhs,
                                              int depth) {
  constexpr int STRIDE = SPLITS * WARPS_K * BLOCK_K;
  constexpr int AHEAD = STAGES * STRIDE;
  Stage stages[STAGES];
  int k = (block_of_cluster() * WARPS_K + static_cast<int>(threadIdx.x) / WARP_SIZE) * BLOCK_K;
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
#pragma unroll
    for (int set = 0; set < SETS; ++set) stages[i].load_rhs(rhs, set, k + i * STRIDE, depth);
    stages[i].load_lhs(lhs, k + i * STRIDE, depth);
  }
#pragma unroll 1
  while (k < depth) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
#pragma unroll
      for (int set = 0; set < SETS; ++set) {
        stages[i].multiply(acc, set);
        stages[i].load_rhs(rhs, set, k + AHEAD, depth);
      }
      stages[i].load_lhs(lhs, k + AHEAD, depth);
      k += STRIDE;
    }
  }
}

// One element of a product by FFMA, straight from memory: slow, for the rare tile with a sum that is not finite. It
// sums pieces of k, and then the pieces, for the accuracy of the portable kernel.
__device__ __forceinline__ float product_by_ffma(const OnnxfuseArguments& args, int part, int batch, int row,
                                                 int column) {
  constexpr int PIECE = 32;
  float sum = 0.0f;
#pragma unroll 1
  for (int begin = 0; begin < args.k; begin += PIECE) {
    float piece = 0.0f;
#pragma unroll 1
    for (int k = begin; k < min(begin + PIECE, args.k); ++k) {
      const Element* first = factor_pointer<Element, LHS_OUTER_BATCH>(args.lhs, args.lhs_outer, batch, row, k);
      const Element* second =
          factor_pointer<Element, RHS_OUTER_BATCH>(args.rhs[part], args.rhs_outer, batch, k, column);
      piece = fmaf(read_element(first), read_element(second), piece);
    }
    sum += piece;
  }
  return sum;
}

__device__ __forceinline__ bool are_far_from_infinity(const float (&acc)[FRAGMENTS][4]) {
  bool far = true;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
    for (float sum : acc[f]) far = far && is_far_from_infinity(sum);
  }
  return far;
}

// The sums of all warps of one element of WIDTH columns and of its neighbour, always added in the same order.
__device__ __forceinline__ float2 add_warps(const float* sums, int row, int column) {
  float2 total = {};
#pragma unroll
  for (int warp = 0; warp < WARPS_K; ++warp) {
    const float2 pair = *reinterpret_cast<const float2*>(sums + warp * WARP_SUMS + row * SUMS_PITCH + column);
    total.x += pair.x;
    total.y += pair.y;
  }
  return total;
}

// The sums of this block -> its share in the first one's shared memory. One that is not valid must not become so by
// what it is added to.
__device__ __forceinline__ void send_share(const float* sums, bool valid, int rows, unsigned shared) {
  constexpr int PAIRS = WIDTH / 2;
  const unsigned own = SHARES_OFFSET + (cluster_rank() - 1) * SHARE_SUMS * static_cast<int>(sizeof(float));
  const unsigned share = peer_address(shared + own, 0), full = peer_address(shared + BARRIER_OFFSET, 0);
#pragma unroll 1
  for (int pair = threadIdx.x; pair < rows * PAIRS; pair += THREADS) {
    float2 total = add_warps(sums, pair / PAIRS, pair % PAIRS * 2);
    if (!valid) total.x = total.y = __int_as_float(0x7fffffff);  // NaN
    store_peer(share + pair * static_cast<int>(sizeof(float2)), total, full);
  }
}

// Until the other blocks' sums of so many rows are there.
__device__ __forceinline__ void await_shares(int rows, unsigned shared, int tiles_before) {
  const unsigned full = shared + BARRIER_OFFSET;
  if (threadIdx.x == 0) barrier_arrive_expect(full, SHARES * rows * WIDTH * static_cast<int>(sizeof(float)));
  barrier_wait(full, tiles_before % 2);
}

// Adds the sums of all warps, and those of the cluster's other blocks, always in the same order, and stores what the
// epilogue makes of them. Unless they are `valid`, they are computed again.
__device__ __forceinline__ void finish(const float* sums, bool valid, const OnnxfuseArguments& args, int batch,
                                       int first_row, int first_column) {
  const float* shares = sums + SHARES_OFFSET / sizeof(float);
  const int rows = min(args.m - first_row, BLOCK_M);
#pragma unroll 1
  for (int element = threadIdx.x; element < rows * BLOCK_N; element += THREADS) {
    const int row = element / BLOCK_N, column = element % BLOCK_N;
    if (first_column + column >= args.n) continue;
    float acc[PARTS] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS_K; ++warp) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        acc[part] += sums[warp * WARP_SUMS + row * SUMS_PITCH + part * BLOCK_N + column];
      }
    }
#pragma unroll
    for (int share = 0; share < SHARES; ++share) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        acc[part] += shares[share * SHARE_SUMS + row * WIDTH + part * BLOCK_N + column];
      }
    }
    if constexpr (IS_SPLIT) {
#pragma unroll 1
      for (int part = 0; part < PARTS; ++part) {
        if (valid && (SPLITS == 1 || is_far_from_infinity(acc[part]))) continue;
        acc[part] = product_by_ffma(args, part, batch, first_row + row, first_column + column);
      }
    }
    const Operands operands(args, batch, first_row + row, first_column + column);
    store_outputs(acc, operands, args, batch, first_row + row, first_column + column);
  }
}

// This block's sums of a tile, each warp's apart; whether the tensor cores could compute them.
__device__ __forceinline__ bool multiply_tile(const OnnxfuseArguments& args, int batch, int row, int column,
                                              float* sums) {
  float acc[FRAGMENTS][4] = {};
  run_main_loop(acc, LhsStream(args, batch, row), Rhs(args, batch, column), args.k);

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own_row = lane_group() + half * 8;
    float* target = sums + threadIdx.x / WARP_SIZE * WARP_SUMS + own_row * SUMS_PITCH;
    if (row + own_row < args.m) Rhs::store(target, acc, half);
  }
  if constexpr (IS_SPLIT) return !__syncthreads_or(!are_far_from_infinity(acc));
  __syncthreads();
  return true;
}

__device__ __forceinline__ int tiles_down(const OnnxfuseArguments& args) { return (args.m - 1) / BLOCK_M + 1; }

// Tiles of the same columns are neighbours: all but the first find rhs in L2.
__device__ __forceinline__ void compute_tiles_alone(const OnnxfuseArguments& args, float* sums) {
  const int row = static_cast<int>(blockIdx.x) % tiles_down(args) * BLOCK_M;
  const int column = static_cast<int>(blockIdx.x) / tiles_down(args) * BLOCK_N;
  prefetch_first(args, static_cast<int>(blockIdx.z), column);
  wait_for_kernel_before();
  let_kernel_behind_start();
  for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) {
    finish(sums, multiply_tile(args, batch, row, column, sums), args, batch, row, column);
    __syncthreads();  // the next product's sums overwrite what the epilogue still reads
  }
}

// The blocks of a cluster meet behind each main loop: the first one has read what it was sent of the tile before.
__device__ __forceinline__ void compute_tiles_together(const OnnxfuseArguments& args, float* sums) {
  const unsigned shared = shared_address(sums);
  const int tiles_m = tiles_down(args), tiles = tiles_m * ((args.n - 1) / BLOCK_N + 1);
  const int clusters = static_cast<int>(gridDim.x) / SPLITS, first = static_cast<int>(blockIdx.x) / SPLITS;
  if (threadIdx.x == 0) {
    barrier_init(shared + BARRIER_OFFSET, 1);
    barrier_init_fence();
  }
  __syncwarp();
  cluster_arrive();
  wait_for_kernel_before();
#pragma unroll 1
  for (int tile = first, before = 0; tile < tiles * args.batch; tile += clusters, ++before) {
    const int batch = tile / tiles, own = tile - batch * tiles;
    const int row = own % tiles_m * BLOCK_M, column = own / tiles_m * BLOCK_N;
    const bool valid = multiply_tile(args, batch, row, column, sums);
    let_kernel_behind_start();
    cluster_wait();
    const int rows = min(args.m - row, BLOCK_M);
    if (cluster_rank() > 0) {
      send_share(sums, valid, rows, shared);
    } else {
      await_shares(rows, shared, before);
      finish(sums, valid, args, batch, row, column);
    }
    if (tile + clusters >= tiles * args.batch) break;
    __syncthreads();  // the next product's sums overwrite what is still read
    cluster_arrive();
  }
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, onnxfuse::RESIDENT_BLOCKS) ONNXFUSE_CLUSTER
onnxfuse_gemm(const __grid_constant__ OnnxfuseArguments args) {
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  if constexpr (onnxfuse::SPLITS > 1) {
    onnxfuse::compute_tiles_together(args, reinterpret_cast<float*>(onnxfuse_shared));
  } else {
    onnxfuse::compute_tiles_alone(args, reinterpret_cast<float*>(onnxfuse_shared));
  }
}
