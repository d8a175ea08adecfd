// One step's operands of a warp and their multiplication: on the tensor cores, exact fp32 on them, and FFMA.
#pragma once
#include "common/ptx.cuh"
#include "portable/epilogue.cuh"
#include "portable/shared_tile.cuh"
#include "portable/split_fp32.cuh"

namespace onnxfuse {

// The sums of one thread: of every part, those of its fragments.
using Accumulators = float[PARTS][FRAGMENTS_M][FRAGMENTS_N][4];

// body(part, i, j) for every fragment.
template <typename Body>
__device__ __forceinline__ void for_each_fragment(const Body& body) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) body(part, i, j);
    }
  }
}

// body(part, i, j, e) for every sum.
template <typename Body>
__device__ __forceinline__ void for_each_accumulator(const Body& body) {
  for_each_fragment([&](int part, int i, int j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) body(part, i, j, e);
  });
}

// One step's operands of a warp, as mma.sync wants them: a thread holds, with g = lane / 4 and t = lane % 4, rows g and
// g + 8 of lhs and column g of rhs.
struct TensorFragments {
  static constexpr int STEP_K = 2 * CHUNK;  // the depth of m16n8k16 (16-bit) and m16n8k8 (TF32)
  static constexpr int SETS = 2;            // the next step's operands are loaded before this one's are multiplied
  unsigned lhs[FRAGMENTS_M][4];
  unsigned rhs[PARTS][FRAGMENTS_N][2];

  __device__ __forceinline__ void load_lhs(unsigned tile, int warp_row, int step, int lane) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
      const int first = warp_row + i * FRAGMENT_ROWS;
      if constexpr (LHS_K_CONTIGUOUS) {
        load_matrices(lhs[i],
                      tile + LhsTile::offset(first + lane % 16, step * STEP_K + lane / 16 * CHUNK, lane % 8));
      } else if constexpr (!LHS_PADDED) {
        const int k = step * STEP_K + lane / 16 * 8 + lane % 8;
        load_matrices_transposed(lhs[i], tile + LhsTile::offset(k, first + lane / 8 % 2 * CHUNK, lane % 8));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int k = step * STEP_K + j / 2 * CHUNK + lane % 4;
          lhs[i][j] = load_shared_word(tile + LhsTile::offset(k, first + j % 2 * 8 + lane / 4));
        }
      }
    }
  }

  // The rhs of fragments j and j + 1 of one part.
  __device__ __forceinline__ void load_rhs(unsigned (&first)[2], unsigned (&second)[2], unsigned tile, int column,
                                           int step, int lane) {
    unsigned matrices[4];
    if constexpr (RHS_K_CONTIGUOUS) {
      const int row = column + lane % 8 + lane / 16 * FRAGMENT_COLUMNS;
      load_matrices(matrices, tile + RhsTile::offset(row, step * STEP_K + lane / 8 % 2 * CHUNK, lane % 8));
    } else if constexpr (!RHS_PADDED) {
      const int row = step * STEP_K + lane % 16;
      load_matrices_transposed(matrices, tile + RhsTile::offset(row, column + lane / 16 * CHUNK, lane % 8));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = step * STEP_K + i % 2 * CHUNK + lane % 4;
        matrices[i] = load_shared_word(tile + RhsTile::offset(row, column + i / 2 * FRAGMENT_COLUMNS + lane / 4));
      }
    }
    first[0] = matrices[0], first[1] = matrices[1], second[0] = matrices[2], second[1] = matrices[3];
  }

  __device__ __forceinline__ void load(unsigned stage, int warp_row, int warp_column, int step) {
    const int lane = threadIdx.x % WARP_SIZE;
    load_lhs(stage, warp_row, step, lane);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; j += 2) {
        const unsigned tile = stage + LhsTile::BYTES + part * RhsTile::BYTES;
        load_rhs(rhs[part][j], rhs[part][j + 1], tile, warp_column + j * FRAGMENT_COLUMNS, step, lane);
      }
    }
  }

  // Rounds late, just before the multiplication, so that the loads above have returned by then.
  __device__ __forceinline__ void round() {
    if constexpr (MATH == Math::tf32) {
      for (auto& fragment : lhs) {
        for (unsigned& value : fragment) round_to_tf32(value);
      }
      for (auto& part : rhs) {
        for (auto& fragment : part) {
          for (unsigned& value : fragment) round_to_tf32(value);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply(Accumulators& acc) {
    round();
    for_each_fragment([&](int part, int i, int j) {
      multiply_fragment(Element(), acc[part][i][j], lhs[i], rhs[part][j]);
    });
  }
};

// The same for exact fp32, as split_fp32.cuh says: a step's sums go to those of the tile.
struct SplitFragments : TensorFragments {
  static constexpr int SETS = 1;  // no registers are left for a second
  __device__ __forceinline__ void multiply(Accumulators& sum) {
    unsigned small_rhs[PARTS][FRAGMENTS_N][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) small_rhs[part][j][e] = split(rhs[part][j][e]);
      }
    }
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
      unsigned small_lhs[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) small_lhs[e] = split(lhs[i][e]);
      float step[PARTS][FRAGMENTS_N][4] = {};
      add_products(step, small_lhs, rhs);
      add_products(step, lhs[i], small_rhs);
      add_products(step, lhs[i], rhs);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[part][i][j][e] += step[part][j][e];
        }
      }
    }
  }

  static __device__ __forceinline__ void add_products(float (&step)[PARTS][FRAGMENTS_N][4], const unsigned (&lhs)[4],
                                                      const unsigned (&rhs)[PARTS][FRAGMENTS_N][2]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) multiply_fragment(float(), step[part][j], lhs, rhs[part][j]);
    }
  }
};

// The same for FFMA, with the accumulators where mma.sync would have them: rows g and g + 8, columns 2t and 2t + 1.
struct ScalarFragments {
  static constexpr int SETS = 2;
  static constexpr int STEP_K = 2;  // one 8-byte read a row; more would not leave registers for 128 accumulators
  float lhs[FRAGMENTS_M][2][STEP_K];
  float rhs[PARTS][FRAGMENTS_N][2][STEP_K];

  __device__ __forceinline__ void load_rhs(float (&columns)[2][STEP_K], unsigned tile, int column, int step) {
    if constexpr (RHS_K_CONTIGUOUS) {
#pragma unroll
      for (int side = 0; side < 2; ++side)
        load_shared(columns[side], tile + RhsTile::offset(column + side, step * STEP_K));
    } else {
#pragma unroll
      for (int k = 0; k < STEP_K; ++k) {
        float pair[2];
        load_shared(pair, tile + RhsTile::offset(step * STEP_K + k, column));
        columns[0][k] = pair[0], columns[1][k] = pair[1];
      }
    }
  }

  __device__ __forceinline__ void load(unsigned stage, int warp_row, int warp_column, int step) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int i = 0; i < 2 * FRAGMENTS_M; ++i) {
      const int row = warp_row + i * 8 + lane / 4;
      if constexpr (LHS_K_CONTIGUOUS) {
        load_shared(lhs[i / 2][i % 2], stage + LhsTile::offset(row, step * STEP_K, lane / 4));
      } else {
#pragma unroll
        for (int k = 0; k < STEP_K; ++k) {
          lhs[i / 2][i % 2][k] = __uint_as_float(load_shared_word(stage + LhsTile::offset(step * STEP_K + k, row)));
        }
      }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
        const unsigned tile = stage + LhsTile::BYTES + part * RhsTile::BYTES;
        load_rhs(rhs[part][j], tile, warp_column + j * FRAGMENT_COLUMNS + lane % 4 * 2, step);
      }
    }
  }

  __device__ __forceinline__ void multiply(Accumulators& acc) const {
#pragma unroll
    for (int k = 0; k < STEP_K; ++k) {
      for_each_accumulator([&](int part, int i, int j, int e) {
        acc[part][i][j][e] = fmaf(lhs[i][e / 2][k], rhs[part][j][e % 2][k], acc[part][i][j][e]);
      });
    }
  }
};

template <Math>
struct FragmentsOf {
  using Type = TensorFragments;
};
template <>
struct FragmentsOf<Math::split_fp32> {
  using Type = SplitFragments;
};
template <>
struct FragmentsOf<Math::fp32> {
  using Type = ScalarFragments;
};

}  // namespace onnxfuse
