// A stage of two factors as they are: how TMA brings it, and how wgmma reads it.
#pragma once
#include "hopper/ring.cuh"

namespace onnxfuse {

constexpr int LHS_BYTES = BLOCK_M * ROW_BYTES;
constexpr int RHS_BYTES = WIDTH * ROW_BYTES;
constexpr int LHS_BOXES = BLOCK_M / CLUSTER_N / LHS_BOX_ROWS;  // where k is contiguous; those without rows stay away

constexpr bool PREPARES = false;  // TMA brings all of a stage
__device__ __forceinline__ void prepare(const OnnxfuseArguments&, unsigned, int) {}

static_assert(STAGE_BYTES == LHS_BYTES + (KEEPS_RHS ? 0 : RHS_BYTES), "footprint and kernel agree");
static_assert(KEPT_BYTES % RHS_BYTES == 0 && BLOCK_K * sizeof(Element) == ROW_BYTES, "footprint and kernel agree");
static_assert(LHS_BOXES == 1 || (SHARING == 1 && LHS_K_CONTIGUOUS && BLOCK_M % LHS_BOX_ROWS == 0), "boxes of rows");
static_assert(SHARING == 1 || !(LHS_OUTER_BATCH || RHS_OUTER_BATCH), "boxes that blocks share have rank 3");
static_assert(!(LHS_OUTER_BATCH && LHS_OUTER_COLUMNS), "the map's batches are runs of k or of batches");
static_assert(BLOCK_N % 16 == 0 && WIDTH <= 256 && BLOCK_M <= 256, "one wgmma and one box");

// Columns of every part, from FIRST on, that one wgmma multiplies: COLUMNS of them, in boxes of ATOM where n is
// contiguous, of all of them where k is.
template <int FIRST, int COLUMNS, int ATOM>
struct Piece {
  static constexpr int ATOM_BYTES = ATOM * sizeof(Element);
  static constexpr unsigned long long DESCRIPTOR =
      RHS_K_CONTIGUOUS ? K_CONTIGUOUS_DESCRIPTOR : descriptor(ATOM_BYTES, BLOCK_K * ATOM_BYTES, 8 * ATOM_BYTES);
  static constexpr int STEP = RHS_K_CONTIGUOUS ? K_CONTIGUOUS_STEP : STEP_K * ATOM_BYTES / 16;
  static constexpr int FIRST_COLUMN = FIRST;
  static constexpr int PART_COLUMNS = COLUMNS;
  static constexpr int ALL_COLUMNS = PARTS * COLUMNS;
  static constexpr int FIRST_ACCUMULATOR = PARTS * FIRST / 2;
  static constexpr int OFFSET = PARTS * FIRST * ROW_BYTES;  // in a step's rhs
  static constexpr int BOX_COLUMNS = RHS_K_CONTIGUOUS ? COLUMNS : ATOM;
  static constexpr int BOX_ROW_BYTES = RHS_K_CONTIGUOUS ? ROW_BYTES : ATOM_BYTES;
  static constexpr int BOX_ROWS = (RHS_K_CONTIGUOUS ? COLUMNS : BLOCK_K) / CLUSTER_M;
  static constexpr int FIRST_MAP = FIRST > 0 ? PARTS : 0;

  static __device__ __forceinline__ void multiply_step(float (&acc)[ACCUMULATORS], unsigned long long lhs,
                                                       unsigned rhs, int step, int accumulate) {
    const unsigned long long columns = DESCRIPTOR | descriptor_address(rhs + OFFSET);
    multiply<FIRST_ACCUMULATOR, ALL_COLUMNS>(acc, lhs, columns + step * STEP, accumulate);
  }
};
using MainPiece = Piece<0, RHS_COLUMNS, RHS_ATOM>;
using RestPiece = Piece<RHS_COLUMNS, BLOCK_N - RHS_COLUMNS, REST_ATOM>;

// Where rhs of a step lies: behind lhs in its stage, or where it stays.
__device__ __forceinline__ unsigned rhs_of(unsigned shared, unsigned stage, int step) {
  return KEEPS_RHS ? shared + KEPT_OFFSET + step * RHS_BYTES : stage + LHS_BYTES;
}

// Bytes that come for a stage of one tile. What a box of lhs that stays away leaves in the ring meets only rows that
// nobody stores.
__device__ __forceinline__ int stage_bytes(const OnnxfuseArguments& args, const OutTile& tile, bool brings_rhs) {
  const int all = LHS_BYTES + (brings_rhs ? RHS_BYTES : 0);
  if constexpr (LHS_BOXES == 1) return all;
  const int boxes = min((args.m - tile.row - 1) / LHS_BOX_ROWS + 1, LHS_BOXES);
  return all - (LHS_BOXES - boxes) * LHS_BOX_ROWS * ROW_BYTES;
}

// Boxes side by side: the columns of a part or, where n is contiguous, the columns of a swizzle. Of each, a block of a
// cluster that shares rhs loads its half of the rows in shared memory.
template <typename Columns>
__device__ __forceinline__ void load_piece(unsigned rhs, unsigned full, const OnnxfuseArguments& args,
                                           const Maps& maps, const OutTile& tile, int k, int rank) {
  const int row = CLUSTER_M > 1 ? rank * Columns::BOX_ROWS : 0;
#pragma unroll
  for (int first = 0; first < Columns::ALL_COLUMNS; first += Columns::BOX_COLUMNS) {
    const int part = first / Columns::PART_COLUMNS;
    const int column = tile.column + Columns::FIRST_COLUMN + first % Columns::PART_COLUMNS;
    const unsigned target = rhs + Columns::OFFSET + first * ROW_BYTES + row * Columns::BOX_ROW_BYTES;
    const int x = RHS_K_CONTIGUOUS ? k : column;
    const int y = (RHS_K_CONTIGUOUS ? column : k) + row;
    const TensorMap& map = maps.rhs[Columns::FIRST_MAP + part];
    const BatchPlace place(args.rhs[part], args.rhs_outer, tile.batch, RHS_OUTER_BATCH);
    load<(CLUSTER_M > 1), RHS_OUTER_BATCH>(target, map, full, x, y, place, ClusterPlace(rank).with_columns());
  }
}

__device__ __forceinline__ void load_rhs(unsigned shared, unsigned stage, unsigned full, const OnnxfuseArguments& args,
                                         const Maps& maps, const OutTile& tile, int k, int rank) {
  const unsigned rhs = rhs_of(shared, stage, k / BLOCK_K);
  load_piece<MainPiece>(rhs, full, args, maps, tile, k, rank);
  if constexpr (RHS_PIECES > 1) load_piece<RestPiece>(rhs, full, args, maps, tile, k, rank);
}

__device__ __forceinline__ void load_lhs(unsigned stage, unsigned full, const OnnxfuseArguments& args, const Maps& maps,
                                         const OutTile& tile, int k, int rank) {
  constexpr int LHS_ROWS = BLOCK_M / CLUSTER_N;
  const int lhs_row = CLUSTER_N > 1 ? rank * LHS_ROWS : 0;
  const unsigned short blocks = ClusterPlace(rank).with_rows();
  int lhs_column = k;
  BatchPlace place(args.lhs, args.lhs_outer, tile.batch, LHS_OUTER_BATCH);
  if constexpr (LHS_OUTER_COLUMNS) {  // the map's batches are the runs of k of all batches
    const int run = args.lhs_outer.columns;
    place.batch = place.batch * (args.k / run) + k / run;
    lhs_column = k % run;
    if (SPLITS > 1 && k >= args.k) lhs_column = run;  // those of the next batch follow
  }
  if constexpr (LHS_K_CONTIGUOUS) {
#pragma unroll
    for (int row = lhs_row; row < lhs_row + LHS_ROWS; row += LHS_BOX_ROWS) {
      if (LHS_BOXES > 1 && tile.row + row >= args.m) break;
      const int y = tile.row + row;
      load<(CLUSTER_N > 1), LHS_OUTER_BATCH>(stage + row * ROW_BYTES, maps.lhs, full, lhs_column, y, place, blocks);
    }
  } else {  // boxes of LHS_ATOM rows, side by side as those of rhs are where n is contiguous
#pragma unroll
    for (int row = lhs_row; row < lhs_row + LHS_ROWS; row += LHS_ATOM) {
      const int x = tile.row + row;
      load<(CLUSTER_N > 1), LHS_OUTER_BATCH>(stage + row * ROW_BYTES, maps.lhs, full, x, lhs_column, place, blocks);
    }
  }
}

// acc = lhs * rhs over all of the block's k.
__device__ __forceinline__ void run_main_loop(float (&acc)[SUBTILES][ACCUMULATORS], RingPosition& ring,
                                              unsigned shared, int first_row, const OnnxfuseArguments&,
                                              const Work& work) {
  multiply_stages(ring, shared, work.steps, [&](unsigned stage, int step) {
    const unsigned long long lhs = LHS_DESCRIPTOR | descriptor_address(stage + first_row * ROW_BYTES);
    const unsigned rhs = rhs_of(shared, stage, step);
    multiply_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / STEP_K; ++i) {
#pragma unroll
      for (int subtile = 0; subtile < SUBTILES; ++subtile) {
        const unsigned long long rows = lhs + subtile * GROUP_WGMMA_ROWS * ROW_BYTES / 16;
        const int accumulate = step + i > 0;
        MainPiece::multiply_step(acc[subtile], rows + i * LHS_STEP, rhs, i, accumulate);
        if constexpr (RHS_PIECES > 1) RestPiece::multiply_step(acc[subtile], rows + i * LHS_STEP, rhs, i, accumulate);
      }
    }
  });
}

}  // namespace onnxfuse
