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

// Whether rows of 16-bit elements may begin anywhere, one stride apart.
template <typename Access>
constexpr bool is_ragged() {
  return sizeof(typename Access::Type) == 2 && Access::WIDTH == 1 && !Access::TRANSPOSED && !Access::OUTER_ROWS &&
         !Access::OUTER_COLUMNS && !Access::OUTER_BATCH;
}

constexpr int WIDEST_COPY = 16;  // bytes of one cp.async

// Elements of others before a row, in the chunk of memory in which it begins.
template <typename T>
__device__ __forceinline__ int shift_of(const T* row) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(row) % WIDEST_COPY / sizeof(T));
}

// A warp's tile[ROWS, COLUMNS] of such a tensor, [begin, end), from `first` on, asynchronously: chunks as they lie in
// memory, so that a row's first element has shift_of() others before it. `shared` gives the address of a row's chunk at a
// column. Of a chunk that leaves the tensor, what lies inside is copied by itself.
//
//   memory   |.......a|aaaaaaaa|aaaabbbb|bbbbbbbb|b.......|
//   row 0    |.......a|aaaaaaaa|aaaabbbb|                      shift 7
//   row 1    |aaaabbbb|bbbbbbbb|b.......|                      shift 4
template <int ROWS, int COLUMNS, typename T, typename Shared>
__device__ __forceinline__ void copy_ragged_tile(const T* first, long long row_stride, const T* begin, const T* end,
                                                 int rows, const Shared& shared) {
  constexpr int LANES = 32, CHUNK = WIDEST_COPY / int(sizeof(T)), PER_ROW = COLUMNS / CHUNK + 1;
  static_assert(COLUMNS % CHUNK == 0, "one chunk more than the columns fill");
#pragma unroll 2
  for (int number = threadIdx.x % LANES; number < ROWS * PER_ROW; number += LANES) {
    const int row = number / PER_ROW, column = number % PER_ROW * CHUNK;
    if (row >= rows) return;
    const T* global = first + row * row_stride;
    global += column - shift_of(global);
    const unsigned target = shared(row, column);
    if (global >= begin && global + CHUNK <= end) {
      copy_async<WIDEST_COPY>(target, global, true);
      continue;
    }
#pragma unroll 1
    for (int element = 0; element < CHUNK; ++element, ++global) {
      if (global < begin || global >= end) continue;
      store_small<sizeof(T)>(target + element * sizeof(T), load_small<sizeof(T)>(global, true));
    }
  }
}

}  // namespace onnxfuse
