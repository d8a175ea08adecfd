// Element types: how they are packed into one access and converted to and from the fp32 of the epilogue.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace onnxfuse {

// An unsigned integer, or a vector of them, of exactly BYTES bytes: what one memory instruction moves.
template <int BYTES>
struct Word;
template <>
struct Word<1> {
  using Type = unsigned char;
};
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

// WIDTH neighbours of one tensor, moved in one instruction.
template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Packed {
  using Type = T;
  T values[WIDTH];
};

template <typename Vector>
__device__ __forceinline__ Vector load_packed(const typename Vector::Type* shared) {
  using Bits = typename Word<sizeof(Vector)>::Type;
  Vector packed;
  *reinterpret_cast<Bits*>(&packed) = *reinterpret_cast<const Bits*>(shared);
  return packed;
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(unsigned char value) { return value != 0 ? 1.0f : 0.0f; }  // a bool

// Two neighbours rounded to nearest even: one conversion instruction where the type has one.
__device__ __forceinline__ void store_pair(float* shared, float first, float second) {
  *reinterpret_cast<float2*>(shared) = make_float2(first, second);
}
__device__ __forceinline__ void store_pair(__half* shared, float first, float second) {
  *reinterpret_cast<__half2*>(shared) = __floats2half2_rn(first, second);
}
__device__ __forceinline__ void store_pair(__nv_bfloat16* shared, float first, float second) {
  *reinterpret_cast<__nv_bfloat162*>(shared) = __floats2bfloat162_rn(first, second);
}

// body(Index<BEGIN>{}), ..., body(Index<END - 1>{}): a loop whose counter is a constant, for tables of types.
template <int INDEX>
struct Index {
  static constexpr int value = INDEX;
};

template <int BEGIN, int END, typename Body>
__device__ __forceinline__ void static_for(const Body& body) {
  if constexpr (BEGIN < END) {
    body(Index<BEGIN>{});
    static_for<BEGIN + 1, END>(body);
  }
}

}  // namespace onnxfuse
