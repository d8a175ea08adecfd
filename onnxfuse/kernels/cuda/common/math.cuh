// The pointwise functions of the epilogue that CUDA does not name. All are defined for every float: what overflows
// inside must not turn into NaN, and a NaN that comes in must come out.
#pragma once
#include "common/ptx.cuh"

namespace onnxfuse::pointwise {

__device__ __forceinline__ float clip(float x, float low, float high) { return minimum(maximum(x, low), high); }

// numerator / (1 + exp(-x)). __expf is off by 2 + 1.16 |x| ulp, so the result is off by less than 4e-7 of the numerator
// everywhere. __fdividef gives 0 for a divisor above 2^126, where the quotient is below 2^-126 of the numerator.
__device__ __forceinline__ float logistic(float numerator, float x) { return __fdividef(numerator, 1.0f + __expf(-x)); }

__device__ __forceinline__ float sigmoid(float x) { return logistic(1.0f, x); }

// max(x, 0) + log(1 + exp(-|x|)): the argument of exp is never positive, so nothing overflows.
__device__ __forceinline__ float softplus(float x) { return maximum(x, 0.0f) + log1pf(expf(-fabsf(x))); }

__device__ __forceinline__ float leaky_relu(float x, float alpha) { return x >= 0.0f ? x : alpha * x; }

__device__ __forceinline__ float elu(float x, float alpha) { return x > 0.0f ? x : alpha * expm1f(x); }

__device__ __forceinline__ float hard_sigmoid(float x, float alpha, float beta) {
  return clip(alpha * x + beta, 0.0f, 1.0f);
}

__device__ __forceinline__ float hard_swish(float x) { return x * hard_sigmoid(x, 1.0f / 6.0f, 0.5f); }

// x * tanh(softplus(x)) with e = exp(x): tanh(log(1 + e)) = e (e + 2) / (e (e + 2) + 2), which is 1 in fp32 from x = 20
// on.
__device__ __forceinline__ float mish(float x) {
  const float e = expf(minimum(x, 20.0f));
  const float numerator = e * (e + 2.0f);
  return x * __fdividef(numerator, numerator + 2.0f);
}

__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3): no cancellation for negative x.
__device__ __forceinline__ float gelu_tanh(float x) {
  return logistic(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
}

}  // namespace onnxfuse::pointwise
