// Activations where 16 bits are stored or multiplied, or TF32: a third of the instructions of the functions of math.cuh,
// with errors that are a small part of what that rounding does. Defined for every float.
#pragma once
#include "common/ptx.cuh"

namespace onnxfuse::pointwise {

constexpr float LOG2_E = 1.4426950408889634f;

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

// gelu(2 half) = relu(2 half) - s 2^P(s), s = |half| / 4 up to 1: P fits log2(8 Phi(-8 s)), so that nothing cancels, and
// only one MUFU is needed. Half of the argument is what the caller has at no cost, where it adds up a bias. The bounds,
// of all finite fp16 arguments before the result is rounded, and of it in fp16 (units of its last place), are:
//
//     coefficients    absolute    of |x|     all    from 2^-10 on    positive x
//     5               3.9e-6      9.8e-6     2.2    0.62             0.53
//     4               4.1e-5      1.1e-4     18     1.4              0.85
//
// The greatest units are those of results near zero, of x below -3. Rounding alone is 0.5; 1 + erf() in fp16 is off by
// thousands there.
__device__ __forceinline__ float gelu_below_relu(float half, float scaled, float exponent) {
  return fmaf(-scaled, fast_exp2(fmaf(exponent, scaled, 2.0f)), half + fabsf(half));
}

__device__ __forceinline__ float fast_gelu_of_half(float half) {
  const float scaled = __saturatef(fabsf(half) * 0.25f);
  float exponent = -13.718570709228516f;
  exponent = fmaf(exponent, scaled, 27.478103637695312f);
  exponent = fmaf(exponent, scaled, -26.102603912353516f);
  exponent = fmaf(exponent, scaled, -29.48214340209961f);
  exponent = fmaf(exponent, scaled, -9.20567512512207f);
  return gelu_below_relu(half, scaled, exponent);
}

// For results of 16 bits.
__device__ __forceinline__ float fast_short_gelu_of_half(float half) {
  const float scaled = __saturatef(fabsf(half) * 0.25f);
  float exponent = 13.685012817382812f;
  exponent = fmaf(exponent, scaled, -21.36558723449707f);
  exponent = fmaf(exponent, scaled, -30.11775016784668f);
  exponent = fmaf(exponent, scaled, -9.179391860961914f);
  return gelu_below_relu(half, scaled, exponent);
}

__device__ __forceinline__ float fast_gelu(float x) { return fast_gelu_of_half(0.5f * x); }

}  // namespace onnxfuse::pointwise
