// What one lane of a warp finds out early for all of them.
#pragma once
#include "common/cluster_ptx.cuh"

namespace onnxfuse {

// T has integers and nothing else.
template <typename T>
constexpr int INTEGERS = sizeof(T) / sizeof(int);

// Keeps the compiler from moving what they are computed from to behind this place.
template <typename T>
__device__ __forceinline__ void pin_integers(T& value) {
  static_assert(sizeof(T) == INTEGERS<T> * sizeof(int) && alignof(T) >= alignof(int), "integers");
  int* integers = reinterpret_cast<int*>(&value);
#pragma unroll
  for (int i = 0; i < INTEGERS<T>; ++i) pin(integers[i]);
}

// What the first lane has of T.
template <typename T>
__device__ __forceinline__ T of_first_lane(T value) {
  int* integers = reinterpret_cast<int*>(&value);
#pragma unroll
  for (int i = 0; i < INTEGERS<T>; ++i) integers[i] = __shfl_sync(0xffffffff, integers[i], 0);
  return value;
}

}  // namespace onnxfuse
