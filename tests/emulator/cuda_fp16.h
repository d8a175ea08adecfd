#pragma once
struct __half {
  _Float16 value;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {{static_cast<_Float16>(x)}, {static_cast<_Float16>(y)}}; }
inline __half __ushort_as_half(unsigned short bits) {
  __half value;
  memcpy(static_cast<void*>(&value), &bits, 2);
  return value;
}
