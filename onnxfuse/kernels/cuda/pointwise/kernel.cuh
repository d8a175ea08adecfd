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
#include "common/arguments.cuh"
#include "common/ptx.cuh"
#include "common/addressing.cuh"
#include "common/checked_access.cuh"

namespace onnxfuse {

constexpr int COLUMN_THREADS = BLOCK_N / SPAN;
constexpr int ROW_THREADS = THREADS / COLUMN_THREADS;
constexpr int ROWS = BLOCK_M / ROW_THREADS;
static_assert(COLUMN_THREADS * ROW_THREADS == THREADS && ROWS * ROW_THREADS == BLOCK_M && ROWS > 0,
              "threads tile the block");

// SPAN neighbours of one row of a tensor, in accesses of WIDTH elements.
template <typename Access>
struct Span {
  static constexpr int WIDTH = Access::WIDTH;
  Packed<typename Access::Type, WIDTH> chunks[SPAN / WIDTH];

  __device__ __forceinline__ auto& at(int element) { return chunks[element / WIDTH].values[element % WIDTH]; }
  __device__ __forceinline__ auto at(int element) const { return chunks[element / WIDTH].values[element % WIDTH]; }
};

// What a thread has read of the loads 0 .. COUNT - 1.
template <int COUNT>
struct Operands : Operands<COUNT - 1> {
  Span<Load<COUNT - 1>> own;
};
template <>
struct Operands<0> {};

template <int INDEX>
__device__ __forceinline__ auto& own_span(Operands<LOADS>& operands) {
  return static_cast<Operands<INDEX + 1>&>(operands).own;
}

constexpr bool varies_along_rows(Kind kind) { return kind == Kind::column || kind == Kind::tile; }
constexpr bool varies_along_columns(Kind kind) { return kind == Kind::row || kind == Kind::tile; }

// In accesses of the way's WIDTH. `left` columns of the tensor begin at the span's first; a chunk lies inside or
// outside as a whole.
template <typename Way, typename Access>
__device__ __forceinline__ void read_span(Span<Access>& span, const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer,
                                          int batch, int row, int column, int left) {
  using Chunk = Packed<typename Access::Type, Way::WIDTH>;
#pragma unroll
  for (int i = 0; i < SPAN; i += Way::WIDTH) {
    const auto* element = element_of<Access>(tensor, outer, batch, row, column + i);
    if constexpr (Way::WIDTH == Access::WIDTH) {
      if (i < left) span.chunks[i / Way::WIDTH] = load_global<Chunk>(element);
    } else {
      if (i < left) span.at(i) = load_global<Chunk>(element).values[0];
    }
  }
}

// Reads the operands that vary along the rows, or those that do not.
template <bool ALONG_ROWS>
__device__ __forceinline__ void read_operands(Operands<LOADS>& operands, const OnnxfuseArguments& args, int batch,
                                              int row, int column) {
  static_for<0, LOADS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    if constexpr (varies_along_rows(Load<I>::KIND) == ALONG_ROWS) {
      auto& span = own_span<I>(operands);
      const auto& tensor = args.loads[I];
      const auto& outer = args.loads_outer[I];
      const int first = ALONG_ROWS ? row : 0;
      if constexpr (varies_along_columns(Load<I>::KIND)) {
        with_way<Load<I>>(args, tensor, outer, [&](auto way) {
          read_span<decltype(way)>(span, tensor, outer, batch, first, column, args.n - column);
        });
      } else {
        span.chunks[0] = load_global<Packed<typename Load<I>::Type, 1>>(
            element_of<Load<I>>(tensor, outer, batch, first, 0));
      }
    }
  });
}

template <int INDEX>
struct Results : Results<INDEX - 1> {
  Span<Out<INDEX - 1>> own;
};
template <>
struct Results<0> {};

// The epilogue on one element of the span.
__device__ __forceinline__ void compute_element(Results<OUTS>& results, Operands<LOADS>& by_row,
                                                Operands<LOADS>& constant, int element) {
  float operands[LOADS + 1], values[OUTS];
  static_for<0, LOADS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    auto& span = own_span<I>(varies_along_rows(Load<I>::KIND) ? by_row : constant);
    operands[I] = to_float(span.at(varies_along_columns(Load<I>::KIND) ? element : 0));
  });
  Epilogue::apply(operands, values);
  static_for<0, OUTS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    typename Out<I>::Type rounded[2];
    store_pair(rounded, values[I], values[I]);
    static_cast<Results<I + 1>&>(results).own.at(element) = rounded[0];
  });
}

__device__ __forceinline__ void store_results(const Results<OUTS>& results, const OnnxfuseArguments& args, int batch,
                                              int row, int column) {
  static_for<0, OUTS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    constexpr int WIDTH = Out<I>::WIDTH;
#pragma unroll
    for (int i = 0; i < SPAN; i += WIDTH) {
      auto* element = element_of<Out<I>>(args.outs[I], args.outs_outer[I], batch, row, column + i);
      if (column + i < args.n) store_global(element, static_cast<const Results<I + 1>&>(results).own.chunks[i / WIDTH]);
    }
  });
}

__device__ __forceinline__ void compute_tile(const OnnxfuseArguments& args, int batch) {
  // Tiles of the same rows are neighbours: together they read whole rows.
  const int tiles_n = (args.n - 1) / BLOCK_N + 1;
  const int row = static_cast<int>(blockIdx.x) / tiles_n * BLOCK_M + static_cast<int>(threadIdx.x) / COLUMN_THREADS;
  const int column =
      static_cast<int>(blockIdx.x) % tiles_n * BLOCK_N + static_cast<int>(threadIdx.x) % COLUMN_THREADS * SPAN;
  if (column >= args.n) return;

  Operands<LOADS> constant, by_row[ROWS];
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
  for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) onnxfuse::compute_tile(args, batch);
}
