// What follows a product that another kernel made: out[batch, row, column] = epilogue(loads[batch, row, column] ...).
//
// Memory bounds it, so the work of a thread is what keeps memory busy: SPAN adjacent columns of ROWS rows, all of their
// loads on their way before the first result is computed. Every tensor is read and written as wide as it allows, WIDTH
// elements at a time; SPAN is the widest of them. What does not vary along the rows is read once for all of them. A
// kernel that is CHECKED reads a tensor for which WIDTH is not legal element by element.
//
//                 COLUMN_THREADS x SPAN columns
//               +------------------------------+
//   ROW_THREADS |  t0   t1   t2   ...          |   a warp reads whole lines of 128 bytes
//     x ROWS    |  ...                         |   a thread's rows lie ROW_THREADS apart
//               +------------------------------+
#pragma once
#include "common/operands.cuh"
#include "common/results.cuh"

namespace onnxfuse {

constexpr int COLUMN_THREADS = BLOCK_N / SPAN;
constexpr int ROW_THREADS = THREADS / COLUMN_THREADS;
constexpr int ROWS = BLOCK_M / ROW_THREADS;
static_assert(COLUMN_THREADS * ROW_THREADS == THREADS && ROWS * ROW_THREADS == BLOCK_M && ROWS > 0,
              "threads tile the block");

using Read = Operands<0, LOADS>;

// Reads the operands that vary along the rows, or those that do not.
template <bool ALONG_ROWS>
__device__ __forceinline__ void read_operands(Read& operands, const OnnxfuseArguments& args, int batch, int row,
                                              int column) {
  static_for<0, LOADS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    if constexpr (varies_along_rows(Load<I>::KIND) == ALONG_ROWS) {
      read_operand<I>(operands, args, batch, ALONG_ROWS ? row : 0, column);
    }
  });
}

// The epilogue on one element of the span.
__device__ __forceinline__ void compute_element(Results<OUTS>& results, Read& by_row, Read& constant, int element) {
  float operands[LOADS + 1], values[OUTS];
  static_for<0, LOADS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    auto& span = own_span<I>(varies_along_rows(Load<I>::KIND) ? by_row : constant);
    operands[I] = to_float(span.at(varies_along_columns(Load<I>::KIND) ? element : 0));
  });
  Epilogue::apply(operands, values);
  round_results(results, element, values);
}

__device__ __forceinline__ void compute_tile(const OnnxfuseArguments& args, int batch) {
  // Tiles of the same rows are neighbours: together they read whole rows.
  const int tiles_n = (args.n - 1) / BLOCK_N + 1;
  const int row = static_cast<int>(blockIdx.x) / tiles_n * BLOCK_M + static_cast<int>(threadIdx.x) / COLUMN_THREADS;
  const int column =
      static_cast<int>(blockIdx.x) % tiles_n * BLOCK_N + static_cast<int>(threadIdx.x) % COLUMN_THREADS * SPAN;
  if (column >= args.n) return;

  Read constant, by_row[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (row + i * ROW_THREADS < args.m) read_operands<true>(by_row[i], args, batch, row + i * ROW_THREADS, column);
  }
  read_operands<false>(constant, args, batch, row, column);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    Results<OUTS> results;
#pragma unroll
    for (int element = 0; element < SPAN; ++element) compute_element(results, by_row[i], constant, element);
    if (row + i * ROW_THREADS < args.m) store_results(results, args, batch, row + i * ROW_THREADS, column);
  }
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, 2)
    onnxfuse_pointwise(const __grid_constant__ OnnxfuseArguments args) {
  onnxfuse::wait_for_kernel_before();
  onnxfuse::let_kernel_behind_start();
  for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) onnxfuse::compute_tile(args, batch);
}
