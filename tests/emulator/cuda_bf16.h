#pragma once
struct __nv_bfloat16 {
  unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return __int_as_float(static_cast<unsigned>(x.bits) << 16); }
inline __nv_bfloat16 to_bfloat16(float x) {  // to nearest even
  unsigned bits;
  memcpy(&bits, &x, 4);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return to_bfloat16(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {to_bfloat16(x), to_bfloat16(y)}; }
