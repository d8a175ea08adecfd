// One step of a warp: integers, scales and zero points of a stage times rows of lhs.
#pragma once
#include "quantized_small_m/lhs.cuh"

namespace onnxfuse {

// Of SPREAD blocks that are multiplied at once, the first one of a lane's two sums in a row.
__device__ __forceinline__ int lane_block() { return lane() % 4 * 2 % SPREAD; }

// Scales that a lane needs of a column: all, or two of each SPREAD.
constexpr int LANE_SCALES = SPREAD == 1 ? BLOCKS : SPREADS * 2;

struct Multiplier {
  const unsigned char* stage;
  int zeros[FRAGMENTS][2];  // where those of a lane's columns lie
  int scales[FRAGMENTS][2];
  Element scales_ahead[FRAGMENTS][2][LANE_SCALES];  // unused unless SCALES_AHEAD
  int first_block;

  __device__ __forceinline__ Multiplier(const Work& work, const Ring& ring, const Place& place) {
    const Tile tile = work.tile(place.pass);
    const int step = work.turned(tile, place.step);
    stage = ring.stage_memory();
    first_block = work.first_block(step);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = f * FRAGMENT_COLUMNS + half * 8 + lane_group();
        const unsigned scale = Scales::IN_WORDS ? low_word(work.scales(tile, column)) + work.first_scale(step) : 0;
        scales[f][half] = SCALES_OFFSET + Scales::offset(column, scale);
        if constexpr (SCALES_AHEAD) read_scales(scales_ahead[f][half], stage + scales[f][half]);
        if constexpr (ZERO_POINTS) {
          const unsigned zero = Zeros::IN_WORDS ? low_word(work.zeros(tile, column)) + work.first_zero(step) : 0;
          zeros[f][half] = ZEROS_OFFSET + Zeros::offset(column, zero);
        }
      }
    }
  }

  static __device__ __forceinline__ unsigned low_word(const void* pointer) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(pointer));
  }
  static __device__ __forceinline__ void read_scales(Element (&scales)[LANE_SCALES], const unsigned char* from) {
    constexpr int WIDEST = Scales::IN_WORDS ? 1 : Scales::COPY / int(sizeof(Element));
    constexpr int VECTOR = SPREAD == 1 ? WIDEST : least(WIDEST, 2);
#pragma unroll
    for (int i = 0; i < LANE_SCALES; i += VECTOR) {
      const int block = SPREAD == 1 ? i : i / 2 * SPREAD + lane_block() + i % 2;
      const auto vector = load_packed<Packed<Element, VECTOR>>(reinterpret_cast<const Element*>(from) + block);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) scales[i + j] = vector.values[j];
    }
  }

  // Of the first of SPREAD blocks, or of the lane's own first or second of them.
  __device__ __forceinline__ Element scale_of(int f, int half, int block, int second) const {
    if constexpr (SPREAD > 1) return scales_ahead[f][half][block / SPREAD * 2 + second];
    if constexpr (SCALES_AHEAD) return scales_ahead[f][half][block];
    return reinterpret_cast<const Element*>(stage + scales[f][half])[block];
  }
  __device__ __forceinline__ unsigned zero(int f, int half, int block) const {
    const unsigned char* from = stage + zeros[f][half];
    if constexpr (QUANTIZED_BITS == 8) return from[block];
    const int nibble = (BLOCKS == 1 ? first_block % 2 : 0) + block;
    return from[nibble / 2] >> nibble % 2 * 4 & 15;
  }

  // acc += scale * (sums + excess), of a block or of SPREAD blocks from there on.
  __device__ __forceinline__ void fold(Sums& acc, const GroupSums& sums, const Excess& excess, int f, int block) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int half = e / 2, second = SPREAD > 1 ? e % 2 : 0;
      const float scale = to_float(scale_of(f, half, block, second));
      const int own_block = SPREAD > 1 ? block + lane_block() + second : block;
      const float zero_point = ZERO_POINTS ? zero_offset(zero(f, half, own_block)) : 0.0f;
#pragma unroll
      for (int group = 0; group < ROW_GROUPS; ++group) {
        float sum = sums[group][e];
        if (ADDS_EXCESS) sum += excess.sums[group][e];
        if (ZERO_POINTS) sum = fmaf(-zero_point, excess.rows[group][e], sum);
        acc[f][group][e] = fmaf(scale, sum, acc[f][group][e]);
      }
    }
  }

  // acc += lhs * rhs of the step.
  template <typename Lhs>
  __device__ __forceinline__ void run(Sums& acc, const Lhs& lhs) const {
    Sums block_sums;
    Excess excess[SIDES];
#pragma unroll(SIDES > 1 && ROW_GROUPS > 1 ? 1 : PIECES)
    for (int piece = 0; piece < PIECES; piece += 2) {
      unsigned words[FRAGMENTS][4];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f) {
        const int column = f * FRAGMENT_COLUMNS + lane() % FRAGMENT_COLUMNS;
        const int at = column * COLUMN_PITCH + (piece + lane() / FRAGMENT_COLUMNS) * PIECE_BYTES;
        load_matrices(words[f], shared_address(stage + at));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        RowPairs rows;
        lhs.read(rows, piece + i);
        lhs.read_excess(excess, rows, piece + i);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
          add_piece(acc, block_sums[f], excess, words[f][2 * i], words[f][2 * i + 1], rows, f, piece + i);
        }
      }
    }
  }

  __device__ __forceinline__ void add_piece(Sums& acc, GroupSums& block_sums, const Excess (&excess)[SIDES],
                                            unsigned first, unsigned second,
                                            const RowPairs& rows, int f, int piece) const {
    unsigned pairs[2][WORD_PAIRS];
    unpack(pairs[0], first);
    unpack(pairs[1], second);
    const int k = piece * PIECE_K;
#pragma unroll
    for (int side = 0; side < SIDES; ++side) {
      const GroupSums none = {};
      const GroupSums& start = HAS_EXCESS && !ADDS_EXCESS ? excess[side].sums : none;
      const GroupSums& own_sums = block_sums;
      const bool begins = k % SPREAD_K == 0 || SIDES > 1 || piece == 0;
      multiply(block_sums, begins ? start : own_sums, pairs[0], pairs[1], rows, side);
      if ((k + PIECE_K) % SPREAD_K == 0 || SIDES > 1 || piece == PIECES - 1) {
        fold(acc, block_sums, excess[side], f, k / SPREAD_K * SPREAD + side);
      }
    }
  }
};

}  // namespace onnxfuse
