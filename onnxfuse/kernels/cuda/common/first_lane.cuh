// What one lane of a warp finds out early for all of them.
#pragma once
#include "common/cluster_ptx.cuh"

namespace onnxfuse {

// Keeps the compiler from moving what T's integers, which are all that it has, are computed from to behind this place.
template <typename T>
__device__ __forceinline__ void pin_integers(T& value) {
  int* integers = reinterpret_cast<int*>(&value);
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / sizeof(int); ++i) pin(integers[i]);
}

// What the first lane has of T.
template <typename T>
__device__ __forceinline__ T of_first_lane(T value) {
  int* integers = reinterpret_cast<int*>(&value);
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / sizeof(int); ++i) integers[i] = __shfl_sync(0xffffffff, integers[i], 0);
  return value;
}

}  // namespace onnxfuse
