// A thread's share of a row in the kernels without a product: SPAN neighbours of each tensor, read and written as wide as
// that one allows.
#pragma once
#include "common/addressing.cuh"
#include "common/arguments.cuh"
#include "common/checked_access.cuh"
#include "common/ptx.cuh"

namespace onnxfuse {

// SPAN neighbours of one row of a tensor, in accesses of WIDTH elements.
template <typename Access>
struct Span {
  static constexpr int WIDTH = Access::WIDTH;
  Packed<typename Access::Type, WIDTH> chunks[SPAN / WIDTH];

  __device__ __forceinline__ auto& at(int element) { return chunks[element / WIDTH].values[element % WIDTH]; }
  __device__ __forceinline__ auto at(int element) const { return chunks[element / WIDTH].values[element % WIDTH]; }
};

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

// The chunks of a span inside of the tensor.
template <typename Access>
__device__ __forceinline__ void write_span(const Span<Access>& span, const OnnxfuseTensor& tensor,
                                           const OnnxfuseOuter& outer, int batch, int row, int column, int left) {
#pragma unroll
  for (int i = 0; i < SPAN; i += Access::WIDTH) {
    auto* element = element_of<Access>(tensor, outer, batch, row, column + i);
    if (i < left) store_global(element, span.chunks[i / Access::WIDTH]);
  }
}

// Keeps what was computed as the tensor has it.
template <typename Access>
__device__ __forceinline__ void round_into(Span<Access>& span, int element, float value) {
  typename Access::Type rounded[2];
  store_pair(rounded, value, value);
  span.at(element) = rounded[0];
}

}  // namespace onnxfuse
