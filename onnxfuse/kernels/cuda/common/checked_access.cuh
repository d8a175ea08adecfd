// Which way a kernel that is CHECKED takes to a tensor: accesses as wide as its Access says or, where they are not
// legal in this run, single elements.
#pragma once
#include "common/arguments.cuh"
#include "common/addressing.cuh"

namespace onnxfuse {

// The same tensor, one element at a time.
template <typename Access>
struct Single : Access {
  static constexpr int WIDTH = 1;
};

// Whether accesses of WIDTH neighbours are legal everywhere in a tensor: `along` is the distance from neighbour to
// neighbour; `pitches` has the bits of all other distances and of the length of a run. WIDTH is a power of two.
template <typename T, int WIDTH>
__device__ __forceinline__ bool is_legal(const void* pointer, long long along, long long pitches) {
  const auto address = reinterpret_cast<unsigned long long>(pointer);
  return address % (WIDTH * sizeof(T)) == 0 && along == 1 && pitches % WIDTH == 0;
}

template <typename Access>
__device__ __forceinline__ bool is_legal(const OnnxfuseArguments& args, const OnnxfuseTensor& tensor,
                                         const OnnxfuseOuter& outer) {
  const int rows = Access::OUTER_ROWS ? outer.rows : args.m;
  const int columns = Access::OUTER_COLUMNS ? outer.columns : args.n;
  const long long within = Access::TRANSPOSED ? tensor.column_stride | rows : tensor.row_stride | columns;
  long long pitches = tensor.batch_stride | within;
  if constexpr (Access::OUTER_ROWS) pitches |= outer.row_stride;
  if constexpr (Access::OUTER_COLUMNS) pitches |= outer.column_stride;
  if constexpr (Access::OUTER_BATCH) pitches |= outer.batch_stride;
  const long long along = Access::TRANSPOSED ? tensor.row_stride : tensor.column_stride;
  return is_legal<typename Access::Type, Access::WIDTH>(tensor.pointer, along, pitches);
}

// body(way) with the way to a tensor: its Access or, in a kernel that is CHECKED, Single of it where that is not legal.
// The whole grid goes the same way.
template <typename Access, typename Body>
__device__ __forceinline__ void with_way(const OnnxfuseArguments& args, const OnnxfuseTensor& tensor,
                                         const OnnxfuseOuter& outer, const Body& body) {
  if constexpr (CHECKED && Access::WIDTH > 1) {
    if (!is_legal<Access>(args, tensor, outer)) return body(Single<Access>());
  }
  body(Access());
}

}  // namespace onnxfuse
