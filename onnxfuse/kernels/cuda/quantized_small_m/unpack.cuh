// Packed integers of 4 or 8 bits as pairs of Factor, all too large by a constant.
//
// A number's bits in the mantissa of a power of two are the sum of both, so two of them take one instruction to unpack:
// of 1024 and of 64 in fp16, whose mantissa has 10 bits, of 128 in bf16, whose mantissa has 7. Of 8 bits, bf16 takes 7,
// and the last one chooses what is taken away; that leaves 128 less than the number, which is exact.
#pragma once
#include "common/ptx.cuh"

namespace onnxfuse {

template <typename T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<__nv_bfloat16> = true;

// What is multiplied: fp32 as the sum of TERMS numbers of bf16, whose range is its own.
template <typename T>
struct Multiplied {
  using Type = T;
};
template <>
struct Multiplied<float> {
  using Type = __nv_bfloat16;
};
using Factor = Multiplied<Element>::Type;

constexpr bool IS_BF16 = is_bf16<Factor>;
constexpr int WORD_PAIRS = 16 / QUANTIZED_BITS;
constexpr int IMPLIED_ZERO = 1 << (QUANTIZED_BITS - 1);

// Pair i of a word has numbers i and i + 4 of 4 bits, 2 i and 2 i + 1 of 8 bits.
__device__ __forceinline__ void unpack(unsigned (&pairs)[WORD_PAIRS], unsigned word) {
#pragma unroll
  for (int i = 0; i < WORD_PAIRS; ++i) {
    if constexpr (QUANTIZED_BITS == 4 && !IS_BF16) {
      const unsigned bits = word >> i / 2 * 8;
      pairs[i] = i % 2 == 0 ? masked_or(bits, 0x000f000f, 0x64006400) : masked_or(bits, 0x00f000f0, 0x54005400);
    } else if constexpr (QUANTIZED_BITS == 4) {
      pairs[i] = masked_or(word >> i * 4, 0x000f000f, 0x43004300);
    } else if constexpr (!IS_BF16) {
      pairs[i] = permute_bytes(word, 0x64646464, i == 0 ? 0x4140 : 0x4342);
    } else {
      const unsigned bits = permute_bytes(word, 0, i == 0 ? 0x4140 : 0x4342);
      pairs[i] =
          subtract_pair(Factor(), masked_or(bits, 0x007f007f, 0x43004300), (bits & 0x00800080) ^ 0x43804380);
    }
  }
}

// What is left to take away: a constant of pair i twice, in Factor and negative, with the zero point that is implied;
// and what a zero point of the tensor takes away beside it.
constexpr bool HAS_EXCESS = QUANTIZED_BITS == 4 || !IS_BF16;

__device__ __forceinline__ unsigned negative_excess(int i) {
  constexpr unsigned ZERO = ZERO_POINTS ? 0 : IMPLIED_ZERO;
  constexpr unsigned EVEN = IS_BF16 ? 0xc300 + ZERO : 0xe400 + ZERO, ODD = 0xd400 + (ZERO << 4);
  const unsigned half = QUANTIZED_BITS == 4 && !IS_BF16 && i % 2 == 1 ? ODD : EVEN;
  return half << 16 | half;
}

__device__ __forceinline__ float zero_offset(unsigned zero_point) {
  return static_cast<float>(static_cast<int>(zero_point) - (HAS_EXCESS ? 0 : IMPLIED_ZERO));
}

}  // namespace onnxfuse
