// The activations of the sm_90a kernel, whose operands have 16 bits: a third of the instructions of the functions of
// pointwise.cuh, with errors that are a small part of a 16-bit unit in the last place. Defined for every float.
#pragma once
#include "ptx.cuh"

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

// exp(a^2 / 2) * Phi(-a) for a >= 0, Phi the normal distribution: a polynomial in t = 1 / (1 + 0.4 a), fitted so that
// Phi(-a) is off by 2e-7 at most, and by 2e-5 of itself up to a = 4: what 1 + erf() loses there, this does not.
__device__ __forceinline__ float scaled_tail(float a) {
  const float t = fast_reciprocal(fmaf(0.4f, a, 1.0f));
  float sum = 0.05662980753938069f;
  sum = fmaf(sum, t, -0.2556069588929047f);
  sum = fmaf(sum, t, 0.3410652762374704f);
  sum = fmaf(sum, t, 0.012189771119452632f);
  sum = fmaf(sum, t, 0.18906855308242013f);
  sum = fmaf(sum, t, 0.1566536088749553f);
  return sum * t;
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|). Behind |x| = 14 the second term is 0 in fp32; its factors must stay finite.
__device__ __forceinline__ float fast_gelu(float x) {
  const float a = fminf(fabsf(x), 14.0f);
  const float density = a * fast_exp2(-0.5f * LOG2_E * (a * a));
  return fmaf(-scaled_tail(a), density, maximum(x, 0.0f));
}

// erf(x) = 1 - 2 Phi(-sqrt(2) x) for x >= 0, and odd.
__device__ __forceinline__ float fast_erf(float x) {
  const float a = 1.4142135623730951f * x;
  const float size = fmaf(-2.0f * scaled_tail(fabsf(a)), fast_exp2(-LOG2_E * (x * x)), 1.0f);
  return copysignf(size, x);
}

}  // namespace onnxfuse::pointwise
