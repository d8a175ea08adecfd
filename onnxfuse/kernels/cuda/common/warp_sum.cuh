// Sums of the lanes of a warp.
#pragma once

namespace onnxfuse {

// Of so many adjacent lanes, a power of two: the sum of their values, in all of them and always in the same order.
template <int LANES>
__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  return sum;
}

}  // namespace onnxfuse
