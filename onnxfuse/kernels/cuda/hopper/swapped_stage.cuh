// A stage of two factors of which the weight is the M side of wgmma and lhs the N side. So the kernel's rows are columns n
// of the output (SWAPPED) and its columns rows of lhs, of which there may be any multiple of 8: a tile of 160 rows
// multiplies 154 of them where two of 128 multiply 256, and reads the weight once.
//
// Blocks of a cluster may share loads: those of the same rows of the weight load a part of them each, those of the same rows of
// lhs likewise, and TMA brings it to all of them. A part may begin at any row, for the swizzle goes by addresses.
//
//   a stage    lhs [BLOCK_N][128 bytes], swizzled; then of each part of the weight [BLOCK_M][128 bytes] or, where n is
//              contiguous, [BLOCK_M / LHS_ATOM][BLOCK_K][128 bytes]. A group multiplies its rows of every part
#pragma once
#include "hopper/ring.cuh"

namespace onnxfuse {

constexpr int ACTIVATION_BYTES = BLOCK_N * ROW_BYTES;
constexpr int PART_BYTES = BLOCK_M * ROW_BYTES;

constexpr bool PREPARES = false;  // TMA brings all of a stage
__device__ __forceinline__ void prepare(const OnnxfuseArguments&, unsigned, int) {}

static_assert(SWAPPED && !APART && !KEEPS_RHS, "the weight is the M side, its parts one above the other");
static_assert(STAGE_BYTES == ACTIVATION_BYTES + PARTS * PART_BYTES, "footprint and kernel agree");
static_assert(BLOCK_K * sizeof(Element) == ROW_BYTES, "a stage has one swizzled row of each operand's k");
static_assert(BLOCK_N % 8 == 0 && BLOCK_N <= 256 && BLOCK_M <= 256, "one wgmma and one box");

__device__ __forceinline__ int stage_bytes(const OnnxfuseArguments&, const OutTile&, bool) { return STAGE_BYTES; }

__device__ __forceinline__ void load_lhs(unsigned stage, unsigned full, const OnnxfuseArguments& args, const Maps& maps,
                                         const OutTile& tile, int k, int rank) {
  const ClusterPlace own(rank);
  const BatchPlace activations(args.lhs, args.lhs_outer, tile.batch, false);
  const int first = own.down * (BLOCK_N / CLUSTER_M);
  load<(CLUSTER_M > 1), false>(stage + first * ROW_BYTES, maps.lhs, full, k, tile.column + first, activations,
                               own.with_columns());
}

__device__ __forceinline__ void load_rhs(unsigned, unsigned stage, unsigned full, const OnnxfuseArguments& args,
                                         const Maps& maps, const OutTile& tile, int k, int rank) {
  const ClusterPlace own(rank);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const BatchPlace weight(args.rhs[part], args.rhs_outer, tile.batch, false);
    const unsigned target = stage + ACTIVATION_BYTES + part * PART_BYTES;
    const auto load_weight = [&](int row, int x, int y) {  // the box that begins at a row of the part in shared memory
      load<(CLUSTER_N > 1), false>(target + row * ROW_BYTES, maps.rhs[part], full, x, y, weight, own.with_rows());
    };
    if constexpr (LHS_K_CONTIGUOUS) {
      const int row = own.right * (BLOCK_M / CLUSTER_N);
      load_weight(row, k, tile.row + row);
    } else {
      const int depth = own.right * (BLOCK_K / CLUSTER_N);
#pragma unroll
      for (int row = 0; row < BLOCK_M; row += LHS_ATOM) load_weight(row + depth, tile.row + row, k + depth);
    }
  }
}

}  // namespace onnxfuse
