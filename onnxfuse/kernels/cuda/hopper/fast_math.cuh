// The activations of the sm_90a kernel, whose operands have 16 bits or are rounded to TF32: a third of the instructions
// of the functions of math.cuh, with errors that are a small part of what the operands' rounding does. Defined for
// every float.
#pragma once
#include "common/ptx.cuh"

namespace onnxfuse::pointwise {

constexpr float LOG2_E = 1.4426950408889634f;

// Results below 2^-126 are zero; both are off by 2 ulp at most.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// numerator / (1 + exp(-x))
__device__ __forceinline__ float fast_logistic(float numerator, float x) {
  return numerator * fast_reciprocal(1.0f + fast_exp2(-LOG2_E * x));
}

__device__ __forceinline__ float fast_sigmoid(float x) { return fast_logistic(1.0f, x); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ float fast_gelu_tanh(float x) {
  const float square = x * x;
  return x * fast_reciprocal(1.0f + fast_exp2(x * (-2.3022081986f - 0.10294324f * square)));
}

// x Phi(x) = x / (1 + 2^(x s)), s = s0 + s1 x^2 + ... + s4 x^8: Phi is the logistic function of an odd function, and
// the polynomial fits that one. Phi is off by 1.5e-6 at most, and by 1e-3 of itself down to x = -3, where it is 1e-3;
// below, 1 + erf() in 16 bits has long been zero. Two more coefficients would be ten times as exact, and 6 % slower.
__device__ __forceinline__ float fast_gelu(float x) {
  const float square = x * x;
  float sum = -4.09301492254599e-06f;
  sum = fmaf(sum, square, 0.00010560534428805113f);
  sum = fmaf(sum, square, 0.00025454783462919295f);
  sum = fmaf(sum, square, -0.10500745475292206f);
  sum = fmaf(sum, square, -2.3021647930145264f);
  return x * fast_reciprocal(1.0f + fast_exp2(x * sum));
}

}  // namespace onnxfuse::pointwise
