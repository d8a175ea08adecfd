// Where an element of a tensor lies. A loop whose axes lie apart in the tensor, as the columns (h d) of an output
// stored as [b, h, s, d], is walked in two levels; which, the kernel's text says, so that all others pay nothing for
// it.
#pragma once
#include "common/arguments.cuh"

namespace onnxfuse {

// How many elements lie before step `index` of a loop: `run` steps have one stride, and the next `run` begin
// `outer_stride` behind the first of them.
template <bool TWO_LEVELS>
__device__ __forceinline__ long long steps(int index, long long stride, int run, long long outer_stride) {
  if constexpr (TWO_LEVELS) {
    const int runs = index / run;
    return runs * outer_stride + (index - runs * run) * stride;
  } else {
    return index * stride;
  }
}

// One element of a factor of the product: one stride walks its rows, one its columns, and one its batches unless they
// are OUTER_BATCH.
template <typename T, bool OUTER_BATCH>
__device__ __forceinline__ const T* factor_pointer(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int batch,
                                                   long long row, long long column) {
  const long long first = steps<OUTER_BATCH>(batch, tensor.batch_stride, outer.batches, outer.batch_stride);
  return static_cast<const T*>(tensor.pointer) + first + row * tensor.row_stride + column * tensor.column_stride;
}

// One element of a load or an output; each loop may be walked in two levels.
template <typename Access>
__device__ __forceinline__ typename Access::Type* element_of(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer,
                                                             int batch, int row, int column) {
  return static_cast<typename Access::Type*>(tensor.pointer) +
         steps<Access::OUTER_BATCH>(batch, tensor.batch_stride, outer.batches, outer.batch_stride) +
         steps<Access::OUTER_ROWS>(row, tensor.row_stride, outer.rows, outer.row_stride) +
         steps<Access::OUTER_COLUMNS>(column, tensor.column_stride, outer.columns, outer.column_stride);
}

}  // namespace onnxfuse
