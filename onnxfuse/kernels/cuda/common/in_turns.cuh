// Parts of one tensor that take turns along its columns, as the two numbers of a pair: x0 y0 x1 y1 x2 y2 ... The load or
// output that leads them moves TURN_COLUMNS columns of all TURN_PARTS parts in one access, where the tensor begins at a
// multiple of its size, as all pitches are. Elsewhere each part is moved by itself.
#pragma once
#include "common/span.cuh"

namespace onnxfuse {

template <typename Access>
constexpr bool IN_TURNS = Access::TURN_COLUMNS > 0;

template <typename Access>
using Turns = Packed<typename Access::Type, Access::TURN_COLUMNS * Access::TURN_PARTS>;

// Where the part that leads has a column: that of the first part.
template <typename Access>
__device__ __forceinline__ auto* first_of_turns(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int batch,
                                                int row, int column) {
  return element_of<Access>(tensor, outer, batch, row, column) - Access::TURN;
}

template <typename Access>
__device__ __forceinline__ bool is_legal_in_turns(const OnnxfuseTensor& tensor) {
  const auto* first = static_cast<const typename Access::Type*>(tensor.pointer) - Access::TURN;
  return reinterpret_cast<unsigned long long>(first) % sizeof(Turns<Access>) == 0;
}

// Body(part, column, place) of every element of an access.
template <typename Access, typename Body>
__device__ __forceinline__ void for_each_of_turns(const Body& body) {
  static_for<0, Access::TURN_PARTS>([&](auto part) {
#pragma unroll
    for (int j = 0; j < Access::TURN_COLUMNS; ++j) body(part, j, j * Access::TURN_PARTS + part.value);
  });
}

// Gives each element of a span of all parts to take(part, element, value).
template <typename Access, typename Take>
__device__ __forceinline__ void read_in_turns(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int batch,
                                              int row, int column, int left, const Take& take) {
#pragma unroll
  for (int i = 0; i < SPAN; i += Access::TURN_COLUMNS) {
    if (i >= left) break;
    const auto turns = load_global<Turns<Access>>(first_of_turns<Access>(tensor, outer, batch, row, column + i));
    for_each_of_turns<Access>([&](auto part, int j, int place) { take(part, i + j, turns.values[place]); });
  }
}

// Stores what value_of(part, element) returns.
template <typename Access, typename ValueOf>
__device__ __forceinline__ void write_in_turns(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int batch,
                                               int row, int column, int left, const ValueOf& value_of) {
#pragma unroll
  for (int i = 0; i < SPAN; i += Access::TURN_COLUMNS) {
    if (i >= left) break;
    Turns<Access> turns;
    for_each_of_turns<Access>([&](auto part, int j, int place) { turns.values[place] = value_of(part, i + j); });
    store_global(first_of_turns<Access>(tensor, outer, batch, row, column + i), turns);
  }
}

}  // namespace onnxfuse
