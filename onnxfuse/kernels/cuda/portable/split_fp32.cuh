// Exact fp32 on tensor cores that multiply TF32. Each factor is the sum of two TF32 numbers, big and small, within
// 2^-23 of it, and three products of these are added; small * small is left out, which is another 2^-22. Tensor cores
// cut what they add: a step's sums begin at zero, the small ones first, and go to the sum of all steps by FADD, which
// rounds. big is infinite where the factor is, or would round to it, and small is then not a number; nor are the sums,
// and FFMA must take over.
#pragma once
#include "common/ptx.cuh"

namespace onnxfuse {

// `value` becomes big. Where it is not a number, big may be any, but small is none either. Of small the tensor cores
// cut the low bits off.
__device__ __forceinline__ unsigned split(unsigned& value) {
  const unsigned big = (value + 0x1000) & 0xffffe000;
  const float small = __uint_as_float(value) - __uint_as_float(big);
  value = big;
  return __float_as_uint(small);
}

// False for a sum that is not finite, or may have been cut to the largest number on the way.
__device__ __forceinline__ bool is_far_from_infinity(float sum) { return fabsf(sum) < 0x1p126f; }

}  // namespace onnxfuse
