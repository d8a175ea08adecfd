// Global -> shared in copies of one or two bytes, which are less than cp.async moves: they pass through registers,
// several at once, so that the thread waits for memory once for all of them.
#pragma once
#include "common/ptx.cuh"
#include "common/addressing.cuh"

namespace onnxfuse {

constexpr int CP_ASYNC_BYTES = 4;  // the narrowest

// Zeros are written where not `inside`, nothing where not `written`.
struct SmallCopy {
  unsigned shared;
  const void* global;
  bool inside;
  bool written;
};

// The copies at(0), ..., at(COUNT - 1) of this thread.
template <int BYTES, int COUNT, typename At>
__device__ __forceinline__ void copy_small(const At& at) {
  constexpr int AT_ONCE = COUNT < 8 ? COUNT : 8;
  const auto is_copy = [](int number) { return COUNT % AT_ONCE == 0 || number < COUNT; };
#pragma unroll 1
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    unsigned short values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const SmallCopy copy = at(first + i);
      values[i] = load_small<BYTES>(copy.global, is_copy(first + i) && copy.inside);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const SmallCopy copy = at(first + i);
      if (is_copy(first + i) && copy.written) store_small<BYTES>(copy.shared, values[i]);
    }
  }
}

// A warp's tile[ROWS, COLUMNS] of an operand of the epilogue, of which `rows` and `columns` lie inside the tensor;
// zeros elsewhere. `shared` gives the address of what belongs to a row and a column.
template <typename Access, int ROWS, int COLUMNS, typename Shared>
__device__ __forceinline__ void copy_small_tile(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int batch,
                                                int first_row, int first_column, int rows, int columns,
                                                const Shared& shared) {
  using T = typename Access::Type;
  constexpr int LANES = 32;
  constexpr int PER_LINE = (Access::TRANSPOSED ? ROWS : COLUMNS) / Access::WIDTH;
  constexpr int ACCESSES = ROWS * COLUMNS / Access::WIDTH;
  static_assert(ACCESSES % LANES == 0, "every lane has as many");
  const T* first = element_of<Access>(tensor, outer, batch, first_row, first_column);
  copy_small<Access::WIDTH * sizeof(T), ACCESSES / LANES>([&](int pass) {
    const int access = threadIdx.x % LANES + pass * LANES;
    const int line = access / PER_LINE;
    const int along = access % PER_LINE * Access::WIDTH;
    const int row = Access::TRANSPOSED ? along : line;
    const int column = Access::TRANSPOSED ? line : along;
    const T* global = first + row * tensor.row_stride + column * tensor.column_stride;
    if constexpr (Access::OUTER_ROWS || Access::OUTER_COLUMNS) {
      global = element_of<Access>(tensor, outer, batch, first_row + row, first_column + column);
    }
    return SmallCopy{shared(row, column), global, row < rows && column < columns, true};
  });
}

}  // namespace onnxfuse
