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

// An angle is `quadrant` times pi/2, of which four are a turn, and `rest`, which is little more than pi/4 at most.
struct Angle {
  float rest;
  unsigned quadrant;
};

// Below 2^16, where the first product is subtracted without rounding: pi/2 in three numbers.
__device__ __forceinline__ Angle small_angle(float x) {
  const float nearest = fmaf(x, 0.63661977f, 12582912.0f), turned = 12582912.0f - nearest;
  const float rest = fmaf(turned, -4.371139e-8f, fmaf(turned, 1.5707964f, x));
  return {fmaf(turned, -1.7151245e-15f, rest), __float_as_uint(nearest)};
}

// From 2^16 on: of 2/pi times the mantissa the 64 bits from a half turn on, as what is before them is whole turns. No
// number of fp32 is nearer to a multiple of pi/2 than 2^-30 or so, which leaves more bits than `rest` has. A function
// that is called: in line for each of a thread's outputs, texts are longer than what instructions are kept in.
__device__ __noinline__ Angle large_angle(float x) {
  // 2/pi behind a word of zeros: all of it that the largest number of fp32 needs. In here, no other kernel carries it.
  static constexpr unsigned TWO_BY_PI[] = {0x0u,        0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                                           0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};
  const unsigned bits = __float_as_uint(x), first = (bits >> 23 & 255) - 120;
  unsigned long long window[3];
  for (unsigned i = 0; i < 3; ++i) {
    const unsigned long long high = TWO_BY_PI[first / 32 + i], low = TWO_BY_PI[first / 32 + i + 1];
    window[i] = (high << 32 | low) << first % 32 >> 32;
  }
  const unsigned long long mantissa = (bits & 0x7fffff) | 0x800000;
  const unsigned long long turns = (mantissa * window[0] << 32) + mantissa * window[1] + (mantissa * window[2] >> 32);
  const unsigned quadrant = static_cast<unsigned>((turns + (1ull << 61)) >> 62);
  const auto over = static_cast<long long>(turns - (static_cast<unsigned long long>(quadrant) << 62));
  const float rest = static_cast<float>(over) * 3.4061217e-19f;  // pi/2 * 2^-62
  if ((bits & 0x7f800000) == 0x7f800000) return {x - x, 0};  // NaN
  return x < 0.0f ? Angle{-rest, 0u - quadrant} : Angle{rest, quadrant};
}

// Off by less than 3 ulp: the polynomials by 2^-28 and 2^-33, `rest` by an ulp. Not sinf, which keeps words of large
// numbers in local memory: kernels would be a third longer.
__device__ __forceinline__ float sine(float x, unsigned quadrants) {
  const Angle angle = fabsf(x) < 65536.0f ? small_angle(x) : large_angle(x);
  const float r = angle.rest, square = r * r;
  const float bend = fmaf(square, fmaf(square, -1.9513328e-4f, 8.332146e-3f), -0.16666654f);
  const float near_0 = fmaf(r * square, bend, r);
  const float curve = fmaf(square, fmaf(square, 2.4430923e-5f, -1.3887297e-3f), 0.041666646f);
  const float near_1 = fmaf(square, fmaf(square, curve, -0.5f), 1.0f);
  const unsigned quadrant = angle.quadrant + quadrants;
  const float value = quadrant & 1 ? near_1 : near_0;
  return quadrant & 2 ? -value : value;
}

__device__ __forceinline__ float sin(float x) { return sine(x, 0); }

__device__ __forceinline__ float cos(float x) { return sine(x, 1); }

}  // namespace onnxfuse::pointwise
