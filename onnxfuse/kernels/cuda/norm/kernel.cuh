// A normalisation of rows: outs[row, column] = epilogue((x - mean) / (sqrt(variance + EPSILON) + ADDED), loads[...] ...),
// where mean and variance are those of the row's columns, and no variance counts for less than LEAST; of RMSNorm the mean
// is 0 (not CENTRED). A row has PARTS of n columns each, which are normalised together, and the epilogue gets one element
// of each part: rotary embeddings turn two halves.
//
// Memory bounds it: a row is read once and stays in the registers of its ROW_THREADS threads, each of which has SPANS
// spans of SPAN neighbours. So the variance is that of numbers less their mean (the squares of all numbers less the
// square of the mean would cancel), and adding up takes two short reductions, by shuffles within a warp and through
// shared memory between the warps of a long row.
//
//            SPAN   x ROW_THREADS   | again, SPANS times
//          +-----------------------------------------+
//   row 0  | t0 | t1 | t2 | ...     | t0 | t1 | ...   |    BLOCK_M rows of one block
//   row 1  | t8 | t9 | ...          | t8 | ...        |
//          +-----------------------------------------+      so of each part
//
// Where rows lie beside each other in memory and the columns of one apart, as pixels and their channels (ACROSS), a warp
// reads a column of several rows, and all threads of a row add up through shared memory:
//
//   column 0 | t0 | t1 | t2 | ... | t31 |     the rows of a block, each with thread 0 of its threads
//   column 8 | t32| t33| t34| ... | t63 |     and with thread 1, whose SPAN columns come next
#pragma once
#include "common/operands.cuh"
#include "common/results.cuh"
#include "common/warp_sum.cuh"

namespace onnxfuse {

constexpr int WARP_LANES = 32;
constexpr int LANES = ROW_THREADS < WARP_LANES ? ROW_THREADS : WARP_LANES;  // of a warp that share a row
constexpr int WARPS = (ROW_THREADS + WARP_LANES - 1) / WARP_LANES;          // that share it
constexpr int SUMS = ACROSS ? ROW_THREADS : WARPS;                          // of a row, that meet in shared memory
static_assert(ROW_THREADS * BLOCK_M == THREADS && ROW_THREADS % LANES == 0, "threads tile the block");

using Row = Span<Load<0>>[PARTS][SPANS];  // the first loads are the parts of one tensor

__device__ __forceinline__ int first_column(int thread, int span) { return (span * ROW_THREADS + thread) * SPAN; }

// Where a sum of a row lies that others add up: rows of a warp's lanes beside each other.
__device__ __forceinline__ int place_of(int row, int sum) { return ACROSS ? sum * BLOCK_M + row : row * SUMS + sum; }

// The sum of a row's threads, in all of them and in the same order. Those of its warps, or of its threads where they are
// of different warps, lie in `sums`.
__device__ __forceinline__ float sum_of_row(float sum, float* sums, int row, int thread) {
  if constexpr (!ACROSS) sum = sum_of_lanes<LANES>(sum);
  if constexpr (SUMS > 1) {
    __syncthreads();  // the sums before these are read
    if (ACROSS || thread % WARP_LANES == 0) sums[place_of(row, ACROSS ? thread : thread / WARP_LANES)] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum += sums[place_of(row, i)];
  }
  return sum;
}

__device__ __forceinline__ void read_row(Row& x, const OnnxfuseArguments& args, int batch, int row, int thread) {
  const auto& tensor = args.loads[0];
  if constexpr (IN_TURNS<Load<0>>) {
    if (is_legal_in_turns<Load<0>>(tensor)) {
#pragma unroll
      for (int span = 0; span < SPANS; ++span) {
        const int column = first_column(thread, span);
        read_in_turns<Load<0>>(tensor, args.loads_outer[0], batch, row, column, args.n - column,
                               [&](auto part, int element, auto value) { x[part.value][span].at(element) = value; });
      }
      return;
    }
  }
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
      const int column = first_column(thread, span);
      read_span<Load<0>>(x[part][span], args.loads[part], args.loads_outer[part], batch, row, column, args.n - column);
    }
  }
}

// The sum of body(x) over a thread's columns that exist.
template <typename Body>
__device__ __forceinline__ float sum_over(const Row& x, int n, int thread, const Body& body) {
  float sum = 0.0f;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
      const int left = n - first_column(thread, span);
#pragma unroll
      for (int i = 0; i < SPAN; ++i) {
        if (i < left) sum += body(to_float(x[part][span].at(i)));
      }
    }
  }
  return sum;
}

using Beside = Operands<PARTS, LOADS>;  // what the epilogue reads beside x

__device__ __forceinline__ void read_beside(Beside& operands, const OnnxfuseArguments& args, int batch, int row,
                                            int column) {
  static_for<PARTS, LOADS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    read_operand<I>(operands, args, batch, varies_along_rows(Load<I>::KIND) ? row : 0, column);
  });
}

__device__ __forceinline__ void compute_element(Results<OUTS>& results, const float (&normals)[PARTS], Beside& read,
                                                int element) {
  float operands[LOADS + 1], values[OUTS];
  static_for<PARTS, LOADS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    operands[I] = to_float(own_span<I>(read).at(varies_along_columns(Load<I>::KIND) ? element : 0));
  });
  Epilogue::apply(normals, operands, values);
  round_results(results, element, values);
}

__device__ __forceinline__ void write_row(const Row& x, float mean, float scale, const OnnxfuseArguments& args, int batch,
                                          int row, int thread) {
#pragma unroll
  for (int span = 0; span < SPANS; ++span) {
    const int column = first_column(thread, span);
    if (column >= args.n) break;
    Beside operands;
    read_beside(operands, args, batch, row, column);
    Results<OUTS> results;
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      float normals[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; ++part) normals[part] = (to_float(x[part][span].at(i)) - mean) * scale;
      compute_element(results, normals, operands, i);
    }
    store_results(results, args, batch, row, column);
  }
}

// A sum over a count. Division as such is a function of its own, around whose call registers would be spilled; the product
// with the reciprocal, less its own error, is as near. A mean that is a unit off would show where rows lie far from zero.
__device__ __forceinline__ float quotient_of(float sum, float count) {
  const float reciprocal = __fdividef(1.0f, count), quotient = sum * reciprocal;
  return isfinite(quotient) ? fmaf(fmaf(-quotient, count, sum), reciprocal, quotient) : quotient;
}

// What is not a number stays so, as it would not through fmaxf().
__device__ __forceinline__ float bounded(float variance) {
  return LEAST > 0.0f && variance < LEAST ? LEAST : variance;
}

// One over the deviation. A quotient by more than 2^126 would be 0, and no root is as large. All of a row is off by what
// this is, so the reciprocal root is less its own error where that is a number.
__device__ __forceinline__ float scale_of(float variance) {
  const float bound = bounded(variance) + EPSILON;
  if constexpr (ADDED > 0.0f) return __fdividef(1.0f, sqrtf(bound) + ADDED);
  const float root = rsqrtf(bound), refined = fmaf(0.5f * root, fmaf(-bound * root, root, 1.0f), root);
  return isfinite(refined) ? refined : root;
}

// Every thread of the block takes part in the sums, also one whose row does not exist.
__device__ __forceinline__ void normalise(const OnnxfuseArguments& args, int batch, float* sums) {
  const int index = static_cast<int>(threadIdx.x);
  const int own = ACROSS ? index % BLOCK_M : index / ROW_THREADS, thread = ACROSS ? index / BLOCK_M : index % ROW_THREADS;
  const int left = args.m - static_cast<int>(blockIdx.x) * BLOCK_M;
  const int row = static_cast<int>(blockIdx.x) * BLOCK_M + own;
  const bool exists = own < left;
  Row x;
  if (exists) read_row(x, args, batch, row, thread);
  const int columns = exists ? args.n : 0;
  const float n = args.n * PARTS;
  float mean = 0.0f;
  if constexpr (CENTRED) {
    mean = quotient_of(sum_of_row(sum_over(x, columns, thread, [](float value) { return value; }), sums, own, thread), n);
  }
  const auto squared = [&](float value) { return (value - mean) * (value - mean); };
  const float variance = quotient_of(sum_of_row(sum_over(x, columns, thread, squared), sums, own, thread), n);
  if (exists) write_row(x, mean, scale_of(variance), args, batch, row, thread);
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, onnxfuse::RESIDENTS)
    onnxfuse_norm(const __grid_constant__ OnnxfuseArguments args) {
  using namespace onnxfuse;
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  wait_for_kernel_before();
  let_kernel_behind_start();
  auto* sums = reinterpret_cast<float*>(onnxfuse_shared);
  if constexpr (BATCHED) {
#pragma unroll 1
    for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) normalise(args, batch, sums);
  } else {  // a loop would keep in registers what it computes once
    normalise(args, 0, sums);
  }
}
