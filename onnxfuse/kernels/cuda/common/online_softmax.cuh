// What a warp does with 16 rows of scores, whichever instruction made them: the functor over its operands, the online
// softmax, and the rows of the result. A thread holds two rows, and of these two neighbours in every eight columns.
//
// The online softmax: with a greater maximum, sums and row sums so far are scaled down. Where a whole row is -inf, its
// sum is 0 and the result NaN, as the nodes make it; or 0, if the model looks for NaN (GUARDED).
#pragma once
#include "common/arguments.cuh"
#include "common/addressing.cuh"
#include "common/ptx.cuh"

namespace onnxfuse {

constexpr int WARP_SIZE = 32;
constexpr int WARP_ROWS = 16;
constexpr int SCORES = BLOCK_N / 2;  // of one thread: of two rows, two neighbours in every eight columns
constexpr int SUMS = VALUE_HEAD / 2;
constexpr int WORDS = SCORES * sizeof(Element) / 4;  // its probabilities, one in each or two

__device__ __forceinline__ int lane() { return threadIdx.x % WARP_SIZE; }

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

template <typename T>
__device__ __forceinline__ unsigned packed_word(float first, float second) {
  Packed<T, 2> pair;
  store_pair(pair.values, first, second);
  return reinterpret_cast<const unsigned&>(pair);
}

// Whether TMA brings a load; else threads read the elements that they need.
template <int INDEX>
constexpr bool IS_MAPPED = Load<INDEX>::KIND == Kind::tile && (Load<INDEX>::WIDTH > 1) && BY_TMA;

// ---- which keys: behind the diagonal of a causal mask, and before a window, there is nothing to look at

__device__ __forceinline__ int blocks_of_keys(const OnnxfuseArguments& args) { return (args.n - 1) / BLOCK_N + 1; }

// Blocks of keys, from the first to before the end.
struct Blocks {
  int first, end;
};

__device__ __forceinline__ Blocks every_block(const OnnxfuseArguments& args) { return {0, blocks_of_keys(args)}; }

// Those that some rows look at, at least one. A row whose every score there is LOW_SCORE or less looks at the others as
// well: where a mask has finite numbers they weigh as much (LOOKS_AGAIN).
__device__ __forceinline__ Blocks blocks_in_sight(const OnnxfuseArguments& args, int first_row, int rows) {
  Blocks blocks = every_block(args);
  const long long row = static_cast<long long>(first_row) + (FROM_END ? args.n - args.m : 0);
  if constexpr (DIAGONAL) {
    const long long last_key = row + rows - 1 + DIAGONAL_OFFSET;
    blocks.end = min(blocks.end, last_key < 0 ? 1 : static_cast<int>(last_key / BLOCK_N) + 1);
  }
  if constexpr (WINDOW) {
    const long long first_key = row + WINDOW_OFFSET;
    blocks.first = min(blocks.end - 1, first_key < 0 ? 0 : static_cast<int>(first_key / BLOCK_N));
  }
  return blocks;
}

__device__ __forceinline__ bool are_all(const OnnxfuseArguments& args, const Blocks& blocks) {
  return blocks.first == 0 && blocks.end == blocks_of_keys(args);
}

// ---- scores: the functor over its operands

// Where a thread finds its operands of a block of keys.
struct Operands {
  unsigned masks;              // shared memory: row `row` of the tile operands
  const unsigned char* memory;  // the same
  int warp_row;                // of the tile: the warp's first
  int key;                     // this thread's first column
  int keys;                    // of the tensor
};

// The eight elements of a thread in 16 columns from `column` of the block on, in the order of its scores, of an operand
// that lies beside the keys in shared memory.
template <typename Access>
__device__ __forceinline__ void read_tile(float (&values)[8], const Operands& at, int column);

// The same of an operand that all rows share.
template <typename Access, bool LAST>
__device__ __forceinline__ void read_row(float (&values)[8], const OnnxfuseTensor& tensor, long long first,
                                         const Operands& at, int column) {
  using T = typename Access::Type;
  const T* source = static_cast<const T*>(tensor.pointer) + first;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = at.key + column + half * 8;
    float pair[2] = {};
    if constexpr (Access::WIDTH > 1) {
      if (!LAST || key < at.keys) {
        const auto packed = load_global<Packed<T, 2>>(source + key);
        pair[0] = to_float(packed.values[0]), pair[1] = to_float(packed.values[1]);
      }
    } else {
      if (!LAST || key < at.keys) pair[0] = to_float(source[key * tensor.column_stride]);
      if (!LAST || key + 1 < at.keys) pair[1] = to_float(source[(key + 1) * tensor.column_stride]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[half * 4 + i] = pair[i % 2];
  }
}

// The same of an operand whose rows begin at whole vectors: two neighbours at a time.
template <typename Access, bool LAST>
__device__ __forceinline__ void read_pairs(float (&values)[8], const OnnxfuseArguments& args,
                                           const OnnxfuseTensor& tensor, long long first, int row, const Operands& at,
                                           int column) {
  using T = typename Access::Type;
  const T* source = static_cast<const T*>(tensor.pointer) + first;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = at.key + column + i / 2 * 8;
    const int own = min(row + at.warp_row + lane() / 4 + i % 2 * 8, args.m - 1);
    Packed<T, 2> pair = {};
    if (!LAST || key < at.keys) pair = load_global<Packed<T, 2>>(source + own * tensor.row_stride + key);
    values[2 * i] = to_float(pair.values[0]);
    values[2 * i + 1] = to_float(pair.values[1]);
  }
}

// The same of an operand that lies anyhow: one element at a time.
template <typename Access, bool LAST>
__device__ __forceinline__ void read_anyhow(float (&values)[8], const OnnxfuseArguments& args,
                                            const OnnxfuseTensor& tensor, long long first, int row,
                                            const Operands& at, int column) {
  using T = typename Access::Type;
  const T* source = static_cast<const T*>(tensor.pointer) + first;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int key = at.key + column + i / 4 * 8 + i % 2;
    const int own = min(row + at.warp_row + lane() / 4 + i / 2 % 2 * 8, args.m - 1);
    values[i] = 0.0f;
    if (!LAST || key < at.keys) values[i] = to_float(source[own * tensor.row_stride + key * tensor.column_stride]);
  }
}

// What the functor reads of 16 columns from `column` of the block on, eight elements of each load.
template <bool LAST, typename Place>
__device__ __forceinline__ void read_operands(float (&operands)[LOADS + 1][8], const OnnxfuseArguments& args,
                                              const Place& place, const Operands& at, int column) {
  static_for<0, LOADS>([&](auto index) {
    constexpr int INDEX = decltype(index)::value;
    using Access = Load<INDEX>;
    const OnnxfuseTensor& tensor = args.loads[INDEX];
    const long long first = place.head * tensor.batch_stride + place.batch * args.loads_outer[INDEX].batch_stride;
    if constexpr (IS_MAPPED<INDEX>) {
      read_tile<Access>(operands[INDEX], at, column);
    } else if constexpr (Access::KIND == Kind::tile && (Access::WIDTH > 1)) {
      read_pairs<Access, LAST>(operands[INDEX], args, tensor, first, place.row, at, column);
    } else if constexpr (Access::KIND == Kind::tile) {
      read_anyhow<Access, LAST>(operands[INDEX], args, tensor, first, place.row, at, column);
    } else if constexpr (Access::KIND == Kind::row) {
      read_row<Access, LAST>(operands[INDEX], tensor, first, at, column);
    } else {
      const float value = to_float(static_cast<const typename Access::Type*>(tensor.pointer)[first]);
#pragma unroll
      for (int i = 0; i < 8; ++i) operands[INDEX][i] = value;
    }
  });
}

// What is to be exponentiated. LAST: behind the end of the keys it is -inf.
template <bool LAST, typename Place>
__device__ __forceinline__ void apply_score(float (&scores)[SCORES], const OnnxfuseArguments& args, const Place& place,
                                            const Operands& at) {
#pragma unroll
  for (int column = 0; column < (SCORE_STEPS > 0 ? BLOCK_N : 0); column += 16) {
    float operands[LOADS + 1][8];
    read_operands<LAST>(operands, args, place, at, column);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float own[LOADS + 1], acc[1] = {scores[column / 2 + i]}, result[1];
#pragma unroll
      for (int load = 0; load < LOADS; ++load) own[load] = operands[load][i];
      Score::apply(acc, own, result);
      scores[column / 2 + i] = result[0];
    }
  }
  if constexpr (LAST) {
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
      if (at.key + i / 4 * 8 + i % 2 >= at.keys) scores[i] = minus_infinity();
    }
  }
}

// ---- the online softmax of a thread's two rows

struct Softmax {
  float maximum[2] = {minus_infinity(), minus_infinity()};
  float sum[2] = {};  // of this thread's columns alone
};

// The greatest scores of both rows so far; the ones before where the sums need not be scaled down yet.
__device__ __forceinline__ void find_maxima(float (&maximum)[2], const float (&scores)[SCORES],
                                            const Softmax& softmax) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float greatest = softmax.maximum[row];
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
      greatest = fmaxf(greatest, fmaxf(scores[i + 2 * row], scores[i + 2 * row + 1]));
    }
    greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 1));
    maximum[row] = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 2));
  }
  if constexpr (RESCALE_ABOVE > 0) {  // probabilities may then be as great as 2 to that power
    const bool grows = (maximum[0] - softmax.maximum[0]) * SCALE > RESCALE_ABOVE ||
                       (maximum[1] - softmax.maximum[1]) * SCALE > RESCALE_ABOVE;
    if (!__any_sync(0xffffffff, grows)) maximum[0] = softmax.maximum[0], maximum[1] = softmax.maximum[1];
  }
}

// Products with the scale would overflow: beside a maximum of that magnitude all other scores vanish.
__device__ __forceinline__ void clear_huge(float (&scores)[SCORES], int row, float& greatest) {
  if (greatest < -1e38f) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float& score = scores[i + 2 * row + column];
        score = score == greatest ? 0.0f : minus_infinity();
      }
    }
    greatest = 0.0f;
  }
}

// Scores become probabilities times their row's sum; `rescale` is what earlier sums are multiplied by.
__device__ __forceinline__ void exponentiate(float (&scores)[SCORES], Softmax& softmax, float (&rescale)[2]) {
  float maximum[2];
  find_maxima(maximum, scores, softmax);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float greatest = maximum[row] == minus_infinity() ? 0.0f : maximum[row];
    rescale[row] = fast_exp2((softmax.maximum[row] - greatest) * SCALE);
    softmax.maximum[row] = maximum[row];
    if constexpr (HUGE_SCORES) clear_huge(scores, row, greatest);
    const float offset = greatest * SCALE;
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float& score = scores[i + 2 * row + column];
        score = fast_exp2(fmaf(score, SCALE, -offset));
        sums[column] += score;
      }
    }
    softmax.sum[row] = softmax.sum[row] * rescale[row] + (sums[0] + sums[1]);
  }
}

// The fragment of TF32 that a thread's four probabilities of two rows are: both rows' first columns, then the second ones.
// Tensor cores cut the last 13 bits off, so half of what is left rounds to nearest. cvt.rna takes three instructions, as
// it keeps NaN and infinity; no probability is infinite, and what is NaN is so in the row's sum as well.
__device__ __forceinline__ void round_probabilities(unsigned* words, const float* own) {
  constexpr unsigned HALF = 1u << 12;
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(own[i % 2 * 2 + i / 2]) + HALF;
}

__device__ __forceinline__ void pack(unsigned (&probabilities)[WORDS], const float (&scores)[SCORES]) {
  if constexpr (sizeof(Element) == 4) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 4) round_probabilities(probabilities + i, scores + i);
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) probabilities[i] = packed_word<Element>(scores[2 * i], scores[2 * i + 1]);
  }
}

// Whether a row of this warp that is one of the tensor's has no score but low ones.
__device__ __forceinline__ bool is_low(const Softmax& softmax, int first_row, int rows) {
  const int row = first_row + lane() / 4;
  return __any_sync(0xffffffff, (softmax.maximum[0] < LOW_SCORE && row < rows) ||
                                    (softmax.maximum[1] < LOW_SCORE && row + 8 < rows)) != 0;
}

// ---- results

// Word i of lane t of a quad -> word t of lane i.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4]) {
  const bool odd = lane() % 2, upper = lane() % 4 / 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned other = __shfl_xor_sync(0xffffffff, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned other = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + 2], 2);
    (upper ? words[i] : words[i + 2]) = other;
  }
}

__device__ __forceinline__ void store_row(const float (&values)[SUMS / 2], Stored* out, bool inside,
                                          long long column_stride) {
  constexpr int WIDE = OUT_WIDTH * sizeof(Stored) == 16 && sizeof(Stored) == 2 ? VALUE_HEAD / 32 * 4 : 0;  // eights of columns
#pragma unroll
  for (int eight = 0; eight < WIDE; eight += 4) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = packed_word<Stored>(values[(eight + i) * 2], values[(eight + i) * 2 + 1]);
    }
    transpose_quad(words);
    const Packed<unsigned, 4> packed = {{words[0], words[1], words[2], words[3]}};
    if (inside) store_global(reinterpret_cast<unsigned*>(out + (eight + lane() % 4) * 8), packed);
  }
#pragma unroll
  for (int eight = WIDE; eight < VALUE_HEAD / 8; ++eight) {
    Packed<Stored, 2> pair;
    store_pair(pair.values, values[eight * 2], values[eight * 2 + 1]);
    const int column = eight * 8 + lane() % 4 * 2;
    if constexpr (OUT_WIDTH > 1) {
      if (inside) store_global(out + column, pair);
    } else if (inside) {
      out[column * column_stride] = pair.values[0];
      out[(column + 1) * column_stride] = pair.values[1];
    }
  }
}

template <typename Place>
__device__ __forceinline__ void finish(const float (&sums)[SUMS], const Softmax& softmax,
                                       const OnnxfuseArguments& args, const Place& place, int warp_row) {
  const OnnxfuseTensor& out = args.outs[0];
  Stored* first = static_cast<Stored*>(out.pointer) + place.head * out.batch_stride +
                   place.batch * args.outs_outer[0].batch_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = softmax.sum[half];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    const float inverse = 1.0f / sum;
    const bool is_number = sum > 0.0f;
    float values[SUMS / 2];
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i) {
      const float mean = sums[i / 2 * 4 + half * 2 + i % 2] * inverse;
      const float acc[1] = {GUARDED && !is_number ? 0.0f : mean}, none[1] = {};
      float result[1];
      Result::apply(acc, none, result);
      values[i] = result[0];
    }
    const int row = place.row + warp_row + lane() / 4 + half * 8;
    store_row(values, first + row * out.row_stride, row < args.m, out.column_stride);
  }
}

// ---- shares: what another warp found with other keys of the same rows

// Four numbers of all lanes side by side, and then the next four. First the maxima and row sums of a thread's two rows.
constexpr int SHARE_PITCH = WARP_SIZE * 4 * int(sizeof(float));
constexpr int SHARE_BYTES = (1 + SUMS / 4) * SHARE_PITCH;

// body(number, four) for what this thread has of a share.
template <typename Body>
__device__ __forceinline__ void for_each_four_of_share(const float (&sums)[SUMS], const Softmax& softmax,
                                                       const Body& body) {
  body(0, Packed<float, 4>{{softmax.maximum[0], softmax.maximum[1], softmax.sum[0], softmax.sum[1]}});
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) body(1 + i / 4, Packed<float, 4>{{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]}});
}

__device__ __forceinline__ void write_share(const float (&sums)[SUMS], const Softmax& softmax, unsigned char* share) {
  for_each_four_of_share(sums, softmax, [&](int number, const Packed<float, 4>& four) {
    reinterpret_cast<Packed<float, 4>*>(share + number * SHARE_PITCH)[lane()] = four;
  });
}

// The factors of what is found so far and of a share, whose maxima become one.
__device__ __forceinline__ void merge_maxima(Softmax& softmax, const float (&maximum)[2], float (&own)[2],
                                             float (&others)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float greatest = fmaxf(softmax.maximum[row], maximum[row]);
    const float offset = greatest == minus_infinity() ? 0.0f : greatest;
    own[row] = fast_exp2((softmax.maximum[row] - offset) * SCALE);
    others[row] = fast_exp2((maximum[row] - offset) * SCALE);
    softmax.maximum[row] = greatest;
  }
}

__device__ __forceinline__ void add_share(float (&sums)[SUMS], Softmax& softmax, const unsigned char* share) {
  const auto four_at = [&](int number) {
    return load_packed<Packed<float, 4>>(reinterpret_cast<const float*>(share + number * SHARE_PITCH) + lane() * 4);
  };
  const Packed<float, 4> found = four_at(0);
  const float maximum[2] = {found.values[0], found.values[1]};
  float own[2], others[2];
  merge_maxima(softmax, maximum, own, others);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    softmax.sum[row] = softmax.sum[row] * own[row] + found.values[2 + row] * others[row];
  }
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    const Packed<float, 4> four = four_at(1 + i / 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i + j] = sums[i + j] * own[j / 2] + four.values[j] * others[j / 2];
  }
}

__device__ __forceinline__ void scale_sums(float (&sums)[SUMS], const float (&rescale)[2]) {
  if (RESCALE_ABOVE == 0 || rescale[0] != 1.0f || rescale[1] != 1.0f) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] *= rescale[i % 4 / 2];
  }
}

}  // namespace onnxfuse
