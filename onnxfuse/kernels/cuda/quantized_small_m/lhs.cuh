// Rows of lhs as the mma takes them: of fp32, each term of a row is one.
#pragma once
#include "quantized_small_m/ring.cuh"

namespace onnxfuse {

// k of one piece of a row of lhs in the order of unpacked integers; `words` may be `pairs`.
__device__ __forceinline__ void permute(unsigned (&pairs)[PIECE_PAIRS], const unsigned (&words)[PIECE_PAIRS]) {
  unsigned permuted[PIECE_PAIRS];
#pragma unroll
  for (int i = 0; i < PIECE_PAIRS; ++i) {
    if constexpr (QUANTIZED_BITS == 4) {
      permuted[i] = permute_bytes(words[i / 2], words[i / 2 + 2], i % 2 == 0 ? 0x5410 : 0x7632);
    } else {
      permuted[i] = words[i];
    }
  }
#pragma unroll
  for (int i = 0; i < PIECE_PAIRS; ++i) pairs[i] = permuted[i];
}

// A lane's numbers of one piece of a row.
constexpr int LANE_ELEMENTS = 2 * PIECE_PAIRS;

// One term of two numbers: the first ones are cut off, the last one is rounded, so of TERMS terms 8 * TERMS bits are left.
// What is left of an infinity is NaN, as it is of an infinity whose constants are taken away again.
__device__ __forceinline__ unsigned term_pair(float first, float second, int term) {
  unsigned pair = 0;
#pragma unroll
  for (int t = 0; t < TERMS - 1; ++t) {
    const unsigned words[2] = {__float_as_uint(first), __float_as_uint(second)};
    pair = t == 0 || term == t ? permute_bytes(words[0], words[1], 0x7632) : pair;
    first -= __uint_as_float(words[0] & 0xffff0000);
    second -= __uint_as_float(words[1] & 0xffff0000);
  }
  return term == TERMS - 1 ? pack_pair(Factor(), first, second) : pair;
}

// The same of a piece, in the order of unpacked integers.
__device__ __forceinline__ void term_pairs(unsigned (&pairs)[PIECE_PAIRS], const float (&row)[LANE_ELEMENTS], int term) {
#pragma unroll
  for (int i = 0; i < PIECE_PAIRS; ++i) {
    const int first = QUANTIZED_BITS == 4 ? i : 2 * i, second = QUANTIZED_BITS == 4 ? i + 4 : 2 * i + 1;
    pairs[i] = term_pair(row[first], row[second], term);
  }
}

// One piece of a row of the mma, whose row of lhs lies in shared memory.
__device__ __forceinline__ void read_row(unsigned (&pairs)[PIECE_PAIRS], const unsigned char* slot, int row, int piece) {
  const int existing = least(row / TERMS, BLOCK_M - 1), along = piece * LHS_PIECE;
  const int span = along % BANKS_BYTES ^ swizzle(existing);
  const unsigned char* from = slot + existing * ROW_PITCH + along / BANKS_BYTES * BANKS_BYTES + span;
  from += lane() % 4 * (LHS_PIECE / 4);
  if constexpr (TERMS > 1) {
    float elements[LANE_ELEMENTS];
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; i += 4) {
      const auto four = load_packed<Packed<float, 4>>(reinterpret_cast<const float*>(from) + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) elements[i + j] = four.values[j];
    }
    term_pairs(pairs, elements, row % TERMS);
  } else {
    const auto words = load_packed<Packed<unsigned, PIECE_PAIRS>>(reinterpret_cast<const unsigned*>(from));
    permute(pairs, words.values);
  }
}

using RowPairs = unsigned[ROW_GROUPS][PIECE_PAIRS];
using GroupSums = float[ROW_GROUPS][4];
using Sums = GroupSums[FRAGMENTS];

// sums = start + one piece of 16 columns and all rows; of a block that is half of a piece, the rows of other lanes count
// as zero.
__device__ __forceinline__ void multiply(GroupSums& sums, const GroupSums& start, const unsigned (&first)[WORD_PAIRS],
                                         const unsigned (&second)[WORD_PAIRS],
                                         const RowPairs& rows, int side) {
  const GroupSums& own_sums = sums;
#pragma unroll
  for (int j = 0; j < MULTIPLICATIONS; ++j) {
    const unsigned columns[4] = {first[2 * j], second[2 * j], first[2 * j + 1], second[2 * j + 1]};
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
      const bool own = SIDES == 1 || lane() % 4 * SIDES / 4 == side;
      const unsigned own_rows[2] = {own ? rows[group][2 * j] : 0, own ? rows[group][2 * j + 1] : 0};
      multiply_onto(Factor(), sums[group], j == 0 ? start[group] : own_sums[group], columns, own_rows);
    }
  }
}

// What a block's sums are too large by, if its numbers are multiplied with what unpacking leaves in them: the same for
// all columns but for their zero points, so it is multiplied once for all, by columns of constants.
struct Excess {
  GroupSums sums;  // negative
  GroupSums rows;  // of lhs alone

  // The rows of a piece, the first of a block or not.
  __device__ __forceinline__ void add(const RowPairs& lhs, int side, bool first) {
    const GroupSums none = {};
    const GroupSums &own_sums = sums, &own_rows = rows;
    unsigned pairs[WORD_PAIRS], ones[WORD_PAIRS];
#pragma unroll
    for (int i = 0; i < WORD_PAIRS; ++i) {
      pairs[i] = negative_excess(i);
      ones[i] = IS_BF16 ? 0x3f803f80 : 0x3c003c00;
    }
    if constexpr (HAS_EXCESS) multiply(sums, first ? none : own_sums, pairs, pairs, lhs, side);
    if constexpr (ZERO_POINTS) multiply(rows, first ? none : own_rows, ones, ones, lhs, side);
  }
};

// Rows of lhs in shared memory, of one step.
struct SharedRows {
  const unsigned char* slot;

  __device__ __forceinline__ void read(RowPairs& rows, int piece) const {
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
      read_row(rows[group], slot, group * MMA_ROWS + lane_group(), piece);
    }
  }
  __device__ __forceinline__ void read_excess(Excess (&excess)[SIDES], const RowPairs& rows, int piece) const {
#pragma unroll
    for (int side = 0; side < SIDES; ++side) {
      excess[side].add(rows, side, piece * PIECE_K % QUANTIZED_BLOCK == 0 || SIDES > 1 || piece == 0);
    }
  }
};

// Rows of lhs in registers, of KEPT_STEPS steps; and in shared memory, the excess of their blocks, which is multiplied
// once. What is kept is changed where a tile has other rows, or a warp's share of k has more steps: all is loaded at once,
// and each step's rows are settled when they are multiplied first. Rows that are streamed change with every step, and the
// next step's are on their way.
struct KeptRows {
  using Words = unsigned[KEPT ? KEPT_STEPS : 1][KEPT ? KEPT_PIECES : 1][ROW_GROUPS][PIECE_PAIRS];

  Words pairs;
  Words coming;  // of streamed rows the next ones, as they lie in memory
  const Element* coming_from[ROW_GROUPS];  // where a lane's first piece of a row begins
  int coming_depth[ROW_GROUPS];            // k that exist from there on
  unsigned char* starts;
  int kept_row = -1, kept_step = 0;
  bool is_fresh = false;  // whether it was loaded for this pass

  explicit __device__ __forceinline__ KeptRows(unsigned char* starts) : starts(starts) {}

  // The rows of a pass, from a step on.
  __device__ __forceinline__ void keep(const Work& work, int pass, int step) {
    Tile tile = work.tile(pass);
    if constexpr (STREAMED) {
      if (kept_row < 0) {
        go_to(work, tile);
        load(work, work.turned(tile, step));
        kept_row = 0;
      }
      permute_step(0);
      const Place next = Place{pass, step}.ahead(1);
      if (next.pass != pass) {
        if (next.pass == work.passes) return;
        tile = work.tile(next.pass);
        go_to(work, tile);
      }
      load(work, work.turned(tile, next.step));
    } else {
      is_fresh = tile.row != kept_row || step != kept_step;
      if (!is_fresh) return;
      kept_row = tile.row;
      kept_step = step;
      go_to(work, tile);
      load(work, step);
    }
  }

  // What is done once to what was loaded of one step, when it is there: those behind it are still on their way. Of terms
  // that is done as they come, for all that they are made of would take twice as many registers.
  __device__ __forceinline__ void settle(int kept_step) {
    if (STREAMED || !is_fresh) return;
    if (TERMS == 1) permute_step(kept_step);
    multiply_excess(kept_step);
  }

  // Of the mma, the row that a lane keeps.
  static __device__ __forceinline__ int own_row(int group) { return lane_group() / SPREAD + group * MMA_ROWS; }

  __device__ __forceinline__ void go_to(const Work& work, const Tile& tile) {
    const int k = work.depth(0) + depth(0) + lane() % 4 * LANE_ELEMENTS;
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
      const int row = own_row(group) / TERMS;
      coming_from[group] = factor_pointer<Element, LHS_OUTER_BATCH>(work.args.lhs, work.args.lhs_outer, work.batch,
                                                                    tile.row + row, k);
      coming_depth[group] = row < work.rows(tile) ? WEIGHT_DEPTH - k : 0;
    }
  }

  __device__ __forceinline__ void load(const Work& work, int step) {
    if constexpr (CHECKED && LHS_WIDTH > 1) {
      if (!work.is_wide) return load<1>(step);
    }
    load<LHS_WIDTH>(step);
  }

  // Where a lane's piece begins in those of a step.
  static __device__ __forceinline__ int depth(int piece) {
    const int block = piece / BLOCK_PIECES * SPREAD + lane_group() % SPREAD;
    return (block * BLOCK_PIECES + piece % BLOCK_PIECES) * PIECE_K;
  }

  template <int WIDE>
  __device__ __forceinline__ void load(int first) {
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
#pragma unroll
      for (int s = 0; s < KEPT_STEPS; ++s) {
#pragma unroll
        for (int piece = 0; piece < KEPT_PIECES; ++piece) {
          const int along = (first + s) * WARPS_K * BLOCK_K + depth(piece) - depth(0);
          auto& words = (STREAMED ? coming : pairs)[s][piece][group];
          if constexpr (TERMS > 1) {
            load_terms<WIDE>(words, coming_from[group] + along, coming_depth[group] - along, own_row(group) % TERMS);
          } else {
            load_words<WIDE>(words, coming_from[group] + along, coming_depth[group] - along);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void permute_step(int step) {
#pragma unroll
    for (int piece = 0; piece < KEPT_PIECES; ++piece) {
#pragma unroll
      for (int group = 0; group < ROW_GROUPS; ++group) {
        permute(pairs[step][piece][group], (STREAMED ? coming : pairs)[step][piece][group]);
      }
    }
  }

  // One term of a lane's numbers of a piece, of which so many exist.
  template <int WIDE>
  static __device__ __forceinline__ void load_terms(unsigned (&words)[PIECE_PAIRS], const Element* from, int existing,
                                                    int term) {
    float elements[LANE_ELEMENTS];
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; i += WIDE) {
      const auto vector = load_fresh<Packed<float, WIDE>>(reinterpret_cast<const float*>(from) + i, i < existing);
#pragma unroll
      for (int j = 0; j < WIDE; ++j) elements[i + j] = vector.values[j];
    }
    term_pairs(words, elements, term);
  }

  // A lane's words of a piece, of which so many elements exist.
  template <int WIDE>
  static __device__ __forceinline__ void load_words(unsigned (&words)[PIECE_PAIRS], const Element* from, int existing) {
    constexpr int COPY = least(WIDE, 2 * PIECE_PAIRS);
    if constexpr (COPY >= 4) {
#pragma unroll
      for (int i = 0; i < PIECE_PAIRS; i += COPY / 2) {
        const auto vector = load_fresh<Packed<unsigned, COPY / 2>>(reinterpret_cast<const unsigned*>(from) + i,
                                                                   2 * i < existing);
#pragma unroll
        for (int j = 0; j < COPY / 2; ++j) words[i + j] = vector.values[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < PIECE_PAIRS; ++i) {
        const unsigned low = load_small<2>(from + 2 * i, 2 * i < existing);
        words[i] = low | load_small<2>(from + 2 * i + 1, 2 * i + 1 < existing) << 16;
      }
    }
  }

  __device__ __forceinline__ int start(int step, int spread, int group) const {
    return ((step * SPREADS + spread) * ROW_GROUPS + group) * 4 + lane() % 4;
  }
  __device__ __forceinline__ float* excess_at(int start) const { return reinterpret_cast<float*>(starts) + start * 4; }
  __device__ __forceinline__ float* rows_at(int start) const {
    return reinterpret_cast<float*>(starts + STARTS_BYTES) + start * 2;
  }

  // The constants are the same for all blocks: each column of the mma has the sums of its own.
  __device__ __forceinline__ void add_excess(Excess& excess, int step, int spread) const {
#pragma unroll
    for (int i = 0; i < BLOCK_PIECES; ++i) excess.add(pairs[step][spread * BLOCK_PIECES + i], 0, i == 0);
  }
  __device__ __forceinline__ void multiply_excess(int step) {
    __syncwarp();  // all have read what is overwritten
#pragma unroll
    for (int spread = 0; spread < SPREADS; ++spread) {
      Excess excess;
      add_excess(excess, step, spread);
#pragma unroll
      for (int group = 0; group < ROW_GROUPS; ++group) {
        if (lane_group() != 0) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (HAS_EXCESS) excess_at(start(step, spread, group))[e] = excess.sums[group][e];
          if (ZERO_POINTS && e < 2) rows_at(start(step, spread, group))[e] = excess.rows[group][e];
        }
      }
    }
    __syncwarp();
  }
};

// The kept rows of one step.
struct KeptStep {
  const KeptRows& kept;
  int step;

  __device__ __forceinline__ void read(RowPairs& rows, int piece) const {
    const int block = piece / BLOCK_PIECES;
    const bool own = SPREAD == 1 || lane_group() % SPREAD == block % SPREAD;
    const RowPairs& from = kept.pairs[step][block / SPREAD * BLOCK_PIECES + piece % BLOCK_PIECES];
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
#pragma unroll
      for (int i = 0; i < PIECE_PAIRS; ++i) rows[group][i] = own ? from[group][i] : 0;
    }
  }
  // As one vector: of two numbers that are copied the compiler makes four by moves.
  __device__ __forceinline__ void read_excess(Excess (&excess)[SIDES], const RowPairs&, int piece) const {
    const int spread = piece / (SPREAD * BLOCK_PIECES);
    if (piece % (SPREAD * BLOCK_PIECES) != 0) return;
    if constexpr (STREAMED) return kept.add_excess(excess[0], step, spread);
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
      const int start = kept.start(step, spread, group);
      if constexpr (HAS_EXCESS) {
        const auto sums = load_packed<Packed<float, 4>>(kept.excess_at(start));
#pragma unroll
        for (int e = 0; e < 4; ++e) excess[0].sums[group][e] = sums.values[e];
      }
      if constexpr (ZERO_POINTS) {
        const auto rows = load_packed<Packed<float, 2>>(kept.rows_at(start));
#pragma unroll
        for (int e = 0; e < 4; ++e) excess[0].rows[group][e] = rows.values[e % 2];
      }
    }
  }
};

}  // namespace onnxfuse
