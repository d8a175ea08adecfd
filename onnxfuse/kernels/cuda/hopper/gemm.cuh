// One block computes tile after tile of out[m, n] = epilogue(acc_0 .. acc_{PARTS-1}), acc_p = lhs[m, k] * rhs_p[k, n].
// sm_90a: TMA fills a ring of stages, wgmma reads it, and nobody waits for anybody who could still be working.
//
//   the last warps   producers: one thread keeps TMA busy, up to STAGES tiles of k ahead, across output tiles; a warp
//                    brings the row, column and scalar operands of the next tiles, and their places; for each consumer
//                    group a warp brings its tile operands
//                       |  cp.async.bulk.tensor, swizzled; in a cluster each block loads half and sends it to both;
//                       |  lhs in one box or, where m may be small, in LHS_BOXES, of which only those with rows come
//   ring             [stage 0][stage 1] ... [stage STAGES-1]      a stage: 128 bytes of k of BLOCK_M rows of lhs and of
//                       |  full[stage]: the bytes have landed     BLOCK_N columns of every part of rhs, side by side:
//                       |  empty[stage]: every reader is done     one wgmma leaves all parts in the same thread, or
//                       |                                         two where not all columns fill the widest swizzle
//   4 warps each     consumer groups
//                       |  wgmma m64 x (PARTS * BLOCK_N) x 32 bytes of k, fp32 accumulators in registers
//                    epilogue.cuh: functor, staging area of the warp, TMA store
//
//   ping-pong        a team, one group or two, owns every other tile; its epilogue runs behind the other's main loop
//                      team 0   [main loop 0]  epilogue 0   [main loop 2]  epilogue 2 ...
//                      team 1                [main loop 1]  epilogue 1   [main loop 3] ...
//                    two groups have half the registers each, and hide each other's latencies in the epilogue
//                    `turn` hands the tensor cores over as soon as the last wgmma is issued. It also keeps a team from
//                    waiting for a stage's phase after next, whose parity is that of the last one.
//   cooperative      all groups are one team and share each tile: larger tiles, the epilogue is exposed
//   split k          the SPLITS blocks of a cluster multiply one tile, each a range of its k; a warp's rows belong to
//                    one of them, which adds up the sums of all and runs their epilogue
//                      block 0   k [0 .......)  warp 0: adds, epilogue      warp 1: sums -> block 1
//                      block 1   k [....... k)  warp 0: sums -> block 0     warp 1: adds, epilogue
//                      sums_full: what the others have for this block's warps has come; sums_read: what this one sent is
//                      added
//
// Launch: THREADS threads, SHARED_BYTES of dynamic shared memory, a grid of (blocks, 1, 1): whole clusters, at
// most one for each tile; one block a multiprocessor is best. The second argument holds the tensor maps that
// `hopper_tile.map_rules` describes.
//
// Contract: k > 0; rows of lhs and rhs start on 16-byte boundaries; the WIDTH of a load or output divides n, its
// strides and its pointer.
//
// The generated text before this file defines Element, RHS_K_CONTIGUOUS, the constants, the tables Load<I> and Out<I>,
// the struct Epilogue, and multiply(): one wgmma of a piece of the columns.
#pragma once
#include "common/arguments.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/ptx.cuh"

namespace onnxfuse {

constexpr int TEAMS = PINGPONG ? 2 : 1;
constexpr int TEAM_GROUPS = CONSUMERS / TEAMS;
constexpr int SHARING = CLUSTER_M * CLUSTER_N;  // blocks that a stage is sent to
constexpr int CLUSTER = SHARING * SPLITS;
constexpr int VECTOR_BUFFERS = 4;                         // with 2, every tile would wait for the next one's vectors
constexpr int ROW_BYTES = 128;                            // of k in a stage: the widest swizzle
constexpr int BLOCK_K = ROW_BYTES / sizeof(Element);
constexpr int STEP_K = 32 / sizeof(Element);              // of one wgmma

// 65,536 registers: 128 * 40 + 2 * 128 * 232 = 64,512, or 128 * 32 + 3 * 128 * 160. The compiler allots 168 or 128 to
// every thread of the block. With four groups a quarter of the multiprocessor has five warps, so each thread has 96, and
// there is nothing to give away.
constexpr bool GIVE_REGISTERS = CONSUMERS < 4;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;

constexpr int LHS_BYTES = BLOCK_M * ROW_BYTES;
constexpr int RHS_BYTES = WIDTH * ROW_BYTES;
constexpr int STAGE_BYTES = LHS_BYTES + RHS_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int LHS_BOXES = BLOCK_M / CLUSTER_N / LHS_BOX_ROWS;  // where k is contiguous; those without rows stay away
constexpr int FULL_OFFSET = VECTORS_OFFSET + VECTOR_BUFFERS * VECTORS_BYTES;
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;
constexpr int VECTORS_FULL_OFFSET = EMPTY_OFFSET + STAGES * 8;
constexpr int VECTORS_EMPTY_OFFSET = VECTORS_FULL_OFFSET + VECTOR_BUFFERS * 8;

// Tile operands, slab by slab: those of group 0, then those of group 1. The first wait until the ring is on its way.
constexpr int GROUP_SLABS_BYTES = TILE_LOADS > 0 ? LOAD_BUFFERS * 8 : 0;
constexpr int SLABS_FULL_OFFSET = VECTORS_EMPTY_OFFSET + VECTOR_BUFFERS * 8;
constexpr int SLABS_EMPTY_OFFSET = SLABS_FULL_OFFSET + CONSUMERS * GROUP_SLABS_BYTES;
constexpr int SLABS_START_OFFSET = SLABS_EMPTY_OFFSET + CONSUMERS * GROUP_SLABS_BYTES;

constexpr int SUMS_FULL_OFFSET = SLABS_START_OFFSET + (TILE_LOADS > 0 ? 8 : 0);
constexpr int SUMS_READ_OFFSET = SUMS_FULL_OFFSET + (SPLITS > 1 ? 8 : 0);

// Who reads a stage arrives at `empty`, once a warp: one group or both, in every block that the stage is sent to.
constexpr int TILE_WARPS = TEAM_GROUPS * 4;
constexpr int READERS = TILE_WARPS * SHARING;

// Of a group, warps whose rows belong to one block.
constexpr int OWN_WARPS = WARP_GROUP / WARP_SIZE / SPLITS;
constexpr int WARP_SUMS_BYTES = SUBTILES * ACCUMULATORS * WARP_SIZE * 4;

static_assert(SHARED_BYTES == SUMS_READ_OFFSET + (SPLITS > 1 ? 8 : 0), "footprint and kernel agree");
static_assert(SPLITS == 1 || SPLITS == 2 || SPLITS == 4, "warps belong to blocks, and sums are paired");
static_assert(SPLITS == 1 || (SHARING == 1 && TEAMS == 1), "the blocks of a cluster work on one tile");
static_assert(SUMS_BYTES == (SPLITS - 1) * CONSUMERS * OWN_WARPS * WARP_SUMS_BYTES, "footprint and kernel agree");
static_assert(VECTORS_OFFSET == RING_BYTES + SUMS_BYTES + CONSUMERS * 4 * STAGING_BYTES, "footprint and kernel agree");
static_assert(GROUP_M == BLOCK_M / TEAM_GROUPS, "footprint and kernel agree");
static_assert(STAGING_BYTES % (BOX_CHUNKS * 128) == 0, "boxes start on whole periods of the swizzle");
static_assert(LHS_BOXES == 1 || (SHARING == 1 && LHS_K_CONTIGUOUS && BLOCK_M % LHS_BOX_ROWS == 0), "boxes of rows");
static_assert(SHARING == 1 || !(LHS_OUTER_BATCH || RHS_OUTER_BATCH), "boxes that blocks share have rank 3");
static_assert(!(LHS_OUTER_BATCH && LHS_OUTER_COLUMNS), "the map's batches are runs of k or of batches");
static_assert(BLOCK_N % 16 == 0 && WIDTH <= 256 && BLOCK_M <= 256, "one wgmma and one box");

// ---- shared-memory matrix descriptors of wgmma (PTX ISA, "Matrix Descriptor"); distances in units of 16 bytes

__device__ constexpr unsigned long long descriptor(int swizzle_span, int leading_bytes, int stride_bytes) {
  const unsigned long long swizzle = swizzle_span == 128 ? 1 : swizzle_span == 64 ? 2 : 3;
  return swizzle << 62 | static_cast<unsigned long long>(stride_bytes / 16) << 32 |
         static_cast<unsigned long long>(leading_bytes / 16) << 16;
}

// The address field; behind its 18 bits, a shared-memory address holds the block's rank in the cluster.
__device__ __forceinline__ unsigned long long descriptor_address(unsigned shared) { return (shared & 0x3ffff) >> 4; }

// k contiguous: rows of 128 bytes, 8 of them a period of the swizzle. n contiguous: 64 rows (of k) of an atom's
// columns, then the next atom; m contiguous: the same with LHS_ATOM, which one wgmma reads.
constexpr int LHS_ATOM = ROW_BYTES / sizeof(Element);
constexpr unsigned long long K_CONTIGUOUS_DESCRIPTOR = descriptor(128, 16, 8 * ROW_BYTES);
constexpr int K_CONTIGUOUS_STEP = STEP_K * sizeof(Element) / 16;
constexpr unsigned long long LHS_DESCRIPTOR =
    LHS_K_CONTIGUOUS ? K_CONTIGUOUS_DESCRIPTOR : descriptor(ROW_BYTES, BLOCK_K * ROW_BYTES, 8 * ROW_BYTES);
constexpr int LHS_STEP = LHS_K_CONTIGUOUS ? K_CONTIGUOUS_STEP : STEP_K * ROW_BYTES / 16;

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
  static constexpr int OFFSET = LHS_BYTES + PARTS * FIRST * ROW_BYTES;  // in a stage
  static constexpr int BOX_COLUMNS = RHS_K_CONTIGUOUS ? COLUMNS : ATOM;
  static constexpr int BOX_ROW_BYTES = RHS_K_CONTIGUOUS ? ROW_BYTES : ATOM_BYTES;
  static constexpr int FIRST_MAP = FIRST > 0 ? PARTS : 0;

  static __device__ __forceinline__ void multiply_step(float (&acc)[ACCUMULATORS], unsigned long long lhs,
                                                       unsigned stage, int step, int accumulate) {
    const unsigned long long rhs = DESCRIPTOR | descriptor_address(stage + OFFSET);
    multiply<FIRST_ACCUMULATOR, ALL_COLUMNS>(acc, lhs, rhs + step * STEP, accumulate);
  }
};
using MainPiece = Piece<0, RHS_COLUMNS, RHS_ATOM>;
using RestPiece = Piece<RHS_COLUMNS, BLOCK_N - RHS_COLUMNS, REST_ATOM>;

// ---- which tile

// Position in the ring: every role walks the same sequence of stages.
struct RingPosition {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void skip(int count) {
    const int position = stage + count;
    parity ^= position / STAGES & 1;
    stage = position % STAGES;
  }
};

// Tile number -> place: GROUP_ROWS tiles down, then one to the right, and so on; then the next group of rows; then the
// next batch. The blocks of a cluster take neighbouring tiles.
struct TileScheduler {
  int tiles_m, tiles_n, tiles, clusters, first;

  __device__ __forceinline__ TileScheduler(const OnnxfuseArguments& args) {
    tiles_m = (args.m - 1) / (BLOCK_M * CLUSTER_M) + 1;
    tiles_n = (args.n - 1) / (BLOCK_N * CLUSTER_N) + 1;
    tiles = tiles_m * tiles_n * args.batch;
    clusters = gridDim.x / CLUSTER;
    first = blockIdx.x / CLUSTER;
  }

  __device__ __forceinline__ OutTile at(int tile, int rank) const {
    const int batch = tile / (tiles_m * tiles_n);
    const int in_batch = tile % (tiles_m * tiles_n);
    const int group = in_batch / (GROUP_ROWS * tiles_n);
    const int in_group = in_batch % (GROUP_ROWS * tiles_n);
    const int height = min(tiles_m - group * GROUP_ROWS, GROUP_ROWS);
    const int tile_m = (group * GROUP_ROWS + in_group % height) * CLUSTER_M + (CLUSTER_M > 1 ? rank : 0);
    const int tile_n = in_group / height * CLUSTER_N + (CLUSTER_N > 1 ? rank : 0);
    return {batch, tile_m * BLOCK_M, tile_n * BLOCK_N, 0};
  }
};

// Steps of k of one block. Where there are fewer than for all blocks, the last ones read zeros behind the end of k.
__device__ __forceinline__ int steps_of(const OnnxfuseArguments& args) { return (args.k - 1) / (BLOCK_K * SPLITS) + 1; }

// ---- producer

// Where a batch lies along the batches of a factor's map, and along its runs of them: where the tensor is broadcast,
// there is one.
struct BatchPlace {
  int batch, run;

  __device__ __forceinline__ BatchPlace(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int number,
                                        bool in_runs) {
    const int runs = in_runs ? number / outer.batches : 0;
    batch = tensor.batch_stride ? number - runs * outer.batches : 0;
    run = in_runs && outer.batch_stride ? runs : 0;
  }
};

// A box of an operand; with SHARED, it is one of those that this block loads for the whole cluster. With IN_RUNS the
// map has runs of batches.
template <bool SHARED, bool IN_RUNS>
__device__ __forceinline__ void load(unsigned shared, const TensorMap& map, unsigned full, int x, int y,
                                     const BatchPlace& place) {
  if constexpr (IN_RUNS) {
    load_box(shared, map, full, x, y, place.batch, place.run);
  } else if constexpr (SHARED) {
    load_box_to_both(shared, map, full, x, y, place.batch);
  } else {
    load_box(shared, map, full, x, y, place.batch);
  }
}

// Bytes of a stage of one tile. What a box of lhs that stays away leaves in the ring meets only rows that nobody
// stores.
__device__ __forceinline__ int stage_bytes(const OnnxfuseArguments& args, const OutTile& tile) {
  if constexpr (LHS_BOXES == 1) return STAGE_BYTES;
  const int boxes = min((args.m - tile.row - 1) / LHS_BOX_ROWS + 1, LHS_BOXES);
  return STAGE_BYTES - (LHS_BOXES - boxes) * LHS_BOX_ROWS * ROW_BYTES;
}

// Boxes side by side: the columns of a part or, where n is contiguous, the columns of a swizzle. Of each, a block of a
// cluster that shares rhs loads its half of the rows in shared memory.
template <typename Columns>
__device__ __forceinline__ void load_piece(unsigned stage, unsigned full, const OnnxfuseArguments& args,
                                           const Maps& maps, const OutTile& tile, int k, int rank) {
  const int row = CLUSTER_M > 1 ? rank * RHS_BOX_ROWS : 0;
#pragma unroll
  for (int first = 0; first < Columns::ALL_COLUMNS; first += Columns::BOX_COLUMNS) {
    const int part = first / Columns::PART_COLUMNS;
    const int column = tile.column + Columns::FIRST_COLUMN + first % Columns::PART_COLUMNS;
    const unsigned target = stage + Columns::OFFSET + first * ROW_BYTES + row * Columns::BOX_ROW_BYTES;
    const int x = RHS_K_CONTIGUOUS ? k : column;
    const int y = (RHS_K_CONTIGUOUS ? column : k) + row;
    const TensorMap& map = maps.rhs[Columns::FIRST_MAP + part];
    const BatchPlace place(args.rhs[part], args.rhs_outer, tile.batch, RHS_OUTER_BATCH);
    load<(CLUSTER_M > 1), RHS_OUTER_BATCH>(target, map, full, x, y, place);
  }
}

__device__ __forceinline__ void load_stage(unsigned stage, unsigned full, const OnnxfuseArguments& args,
                                           const Maps& maps, const OutTile& tile, int k, int rank) {
  constexpr int LHS_ROWS = BLOCK_M / CLUSTER_N;
  const int lhs_row = CLUSTER_N > 1 ? rank * LHS_ROWS : 0;
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
      load<(CLUSTER_N > 1), LHS_OUTER_BATCH>(stage + row * ROW_BYTES, maps.lhs, full, lhs_column, y, place);
    }
  } else {  // boxes of LHS_ATOM rows, side by side as those of rhs are where n is contiguous
#pragma unroll
    for (int row = lhs_row; row < lhs_row + LHS_ROWS; row += LHS_ATOM) {
      const int x = tile.row + row;
      load<(CLUSTER_N > 1), LHS_OUTER_BATCH>(stage + row * ROW_BYTES, maps.lhs, full, x, lhs_column, place);
    }
  }
  load_piece<MainPiece>(stage, full, args, maps, tile, k, rank);
  if constexpr (RHS_PIECES > 1) load_piece<RestPiece>(stage, full, args, maps, tile, k, rank);
}

// Until no other block of the cluster arrives at this one's barriers or reads its sums any more: a block that has ended
// has no shared memory. One thread waits, where a barrier of the cluster would hold up all of them and cost a fence.
__device__ __forceinline__ void await_cluster(unsigned shared, RingPosition ring, int sums_parity) {
#pragma unroll 1
  for (int stage = 0; SHARING > 1 && stage < STAGES; ++stage) {
    barrier_wait(shared + EMPTY_OFFSET + ring.stage * 8, ring.parity ^ 1);
    ring.next();
  }
  if constexpr (SPLITS > 1) barrier_wait(shared + SUMS_READ_OFFSET, sums_parity);
}

__device__ __forceinline__ void produce(const OnnxfuseArguments& args, const Maps& maps, unsigned shared, int rank) {
  const TileScheduler scheduler(args);
  const int steps = steps_of(args);
  const int first_step = SPLITS > 1 ? rank * steps : 0;
  const int filled = min(steps, STAGES) - 1;
  RingPosition ring;
  int sums_parity = 0;
  for (int number = scheduler.first; number < scheduler.tiles; number += scheduler.clusters) {
    const OutTile tile = scheduler.at(number, rank);
    const int bytes = stage_bytes(args, tile);
    if (SPLITS > 1 && number != scheduler.first) {
      barrier_wait(shared + SUMS_READ_OFFSET, sums_parity);
      sums_parity ^= 1;
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const unsigned full = shared + FULL_OFFSET + ring.stage * 8;
      barrier_wait(shared + EMPTY_OFFSET + ring.stage * 8, ring.parity ^ 1);
      barrier_arrive_expect(full, bytes);
      load_stage(shared + ring.stage * STAGE_BYTES, full, args, maps, tile, (first_step + step) * BLOCK_K, rank);
      if (TILE_LOADS > 0 && step == filled && number == scheduler.first) barrier_arrive(shared + SLABS_START_OFFSET);
      ring.next();
    }
  }
  await_cluster(shared, ring, sums_parity);
}

// What the epilogues of tile after tile need beside the product, by one warp: far enough ahead that no consumer waits
// for global memory or divides tile numbers.
__device__ __forceinline__ void produce_vectors(const OnnxfuseArguments& args, unsigned char* memory,
                                                unsigned shared, int rank) {
  const TileScheduler scheduler(args);
  int count = 0;
#pragma unroll 1
  for (int number = scheduler.first; number < scheduler.tiles; number += scheduler.clusters, ++count) {
    const int buffer = count % VECTOR_BUFFERS;
    const OutTile tile = scheduler.at(number, rank);
    unsigned char* vectors = memory + VECTORS_OFFSET + buffer * VECTORS_BYTES;
    barrier_wait(shared + VECTORS_EMPTY_OFFSET + buffer * 8, count / VECTOR_BUFFERS % 2 ^ 1);
    stage_vectors(vectors, args, tile);
    if (threadIdx.x % WARP_SIZE == 0) *reinterpret_cast<OutTile*>(vectors) = tile;
    barrier_arrive(shared + VECTORS_FULL_OFFSET + buffer * 8);
  }
}

__device__ __forceinline__ OutTile group_tile(OutTile tile, int group) {
  tile.row += group % TEAM_GROUPS * GROUP_M;
  return tile;
}

// Numbers of the first tile of a group and between its tiles.
__device__ __forceinline__ int first_number(const TileScheduler& scheduler, int group) {
  return scheduler.first + group / TEAM_GROUPS * scheduler.clusters;
}
__device__ __forceinline__ int next_number(const TileScheduler& scheduler) { return TEAMS * scheduler.clusters; }

// One slab of a consumer group's tile operands, as soon as its buffer is free.
__device__ __forceinline__ void produce_slab(const OnnxfuseArguments& args, unsigned char* memory, unsigned shared,
                                             const OutTile& tile, int group, int index, int parity, int first_warp) {
  const int block_warp = group * WARP_GROUP / WARP_SIZE + first_warp;
  unsigned char* staging = memory + RING_BYTES + SUMS_BYTES + block_warp * STAGING_BYTES;
  const unsigned barrier = shared + group * GROUP_SLABS_BYTES + index % LOAD_BUFFERS * 8;
  barrier_wait(barrier + SLABS_EMPTY_OFFSET, parity ^ 1);
  load_slab(staging, args, group_tile(tile, group), index, first_warp);
  barrier_arrive_copied(barrier + SLABS_FULL_OFFSET);
}

// The tile operands of a consumer group, by one warp, as far ahead as there are buffers. Of three groups, which share
// each tile, one warp serves the first and the last.
__device__ __forceinline__ void produce_slabs(const OnnxfuseArguments& args, unsigned char* memory, unsigned shared,
                                              int rank, int first_group) {
  const TileScheduler scheduler(args);
  const int first_warp = SPLITS > 1 ? rank : 0;
  barrier_wait(shared + SLABS_START_OFFSET, 0);
  int count = 0;
#pragma unroll 1
  for (int number = first_number(scheduler, first_group); number < scheduler.tiles;
       number += next_number(scheduler), ++count) {
    const OutTile tile = scheduler.at(number, rank);
#pragma unroll 1
    for (int index = 0; index < SLABS; ++index) {
      const int parity = slab_parity(count, index);
      produce_slab(args, memory, shared, tile, first_group, index, parity, first_warp);
      if (CONSUMERS == 3 && first_group == 0) produce_slab(args, memory, shared, tile, 2, index, parity, first_warp);
    }
  }
}

// ---- consumers

// This warp has read the stage: its blocks may overwrite it.
__device__ __forceinline__ void release(unsigned shared, int stage) {
  const unsigned empty = shared + EMPTY_OFFSET + stage * 8;
  const int lane = threadIdx.x % WARP_SIZE;
  if constexpr (SHARING > 1) {
    if (lane < SHARING) barrier_arrive_peer(empty, lane);
  } else {
    if (lane == 0) barrier_arrive(empty);
  }
}

// acc = lhs * rhs over all of the block's k. One stage's wgmma are in flight while the next stage's are issued.
__device__ __forceinline__ void run_main_loop(float (&acc)[SUBTILES][ACCUMULATORS], RingPosition& ring,
                                              unsigned shared, int first_row, int steps) {
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    barrier_wait(shared + FULL_OFFSET + ring.stage * 8, ring.parity);
    const unsigned stage = shared + ring.stage * STAGE_BYTES;
    const unsigned long long lhs = LHS_DESCRIPTOR | descriptor_address(stage + first_row * ROW_BYTES);
    multiply_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / STEP_K; ++i) {
#pragma unroll
      for (int subtile = 0; subtile < SUBTILES; ++subtile) {
        const unsigned long long rows = lhs + subtile * GROUP_WGMMA_ROWS * ROW_BYTES / 16;
        const int accumulate = step + i > 0;
        MainPiece::multiply_step(acc[subtile], rows + i * LHS_STEP, stage, i, accumulate);
        if constexpr (RHS_PIECES > 1) RestPiece::multiply_step(acc[subtile], rows + i * LHS_STEP, stage, i, accumulate);
      }
    }
    multiply_commit();
    if (step > 0) {
      multiply_wait<1>();
      release(shared, previous);
    }
    previous = ring.stage;
    ring.next();
  }
}

__device__ __forceinline__ void finish_main_loop(float (&acc)[SUBTILES][ACCUMULATORS], const RingPosition& ring,
                                                 unsigned shared) {
  multiply_wait<0>();
  release(shared, ring.stage == 0 ? STAGES - 1 : ring.stage - 1);
#pragma unroll
  for (int subtile = 0; subtile < SUBTILES; ++subtile) {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) pin(acc[subtile][i]);
  }
}

constexpr int TURN_BARRIER = 1;  // named barrier of team 0; the next is that of team 1

// Where the sums that come from block `from` of the cluster lie for a warp of its owner, or for one of that number in the
// block that sends them: four registers after the other, lanes side by side, without bank conflicts.
__device__ __forceinline__ int sums_offset(int from, int owner) {
  const int own_warp = threadIdx.x / WARP_GROUP * OWN_WARPS + threadIdx.x % WARP_GROUP / WARP_SIZE / SPLITS;
  const int sender = (from ^ owner) - 1;
  const int warp = sender * CONSUMERS * OWN_WARPS + own_warp;
  return RING_BYTES + warp * WARP_SUMS_BYTES + threadIdx.x % WARP_SIZE * 16;
}
constexpr int SUMS_PITCH = WARP_SIZE * 16;

// This warp's sums -> block `owner` of the cluster, whose barrier counts their bytes. The owner has read those of the
// tile before: the producer waited for that before it loaded what was multiplied since.
__device__ __forceinline__ void send_partials(const float (&acc)[SUBTILES][ACCUMULATORS], unsigned shared, int rank,
                                              int owner) {
  const unsigned target = peer_address(shared + sums_offset(rank, owner), owner);
  const unsigned full = peer_address(shared + SUMS_FULL_OFFSET, owner);
#pragma unroll
  for (int i = 0; i < SUBTILES * ACCUMULATORS; i += 4) {
    const float* sums = acc[i / ACCUMULATORS] + i % ACCUMULATORS;
    store_peer(target + i / 4 * SUMS_PITCH, {sums[0], sums[1], sums[2], sums[3]}, full);
  }
}

// What the cluster's other blocks sent to this warp is added, in an order that depends on the block alone: `acc` has
// all of k.
__device__ __forceinline__ void reduce_partials(float (&acc)[SUBTILES][ACCUMULATORS], const unsigned char* memory,
                                                unsigned shared, int rank, int parity) {
  if (threadIdx.x == rank * WARP_SIZE) barrier_arrive_expect(shared + SUMS_FULL_OFFSET, SUMS_BYTES);
  barrier_wait(shared + SUMS_FULL_OFFSET, parity);
#pragma unroll
  for (int distance = 1; distance < SPLITS; ++distance) {
    const unsigned char* sums = memory + sums_offset(rank ^ distance, rank);
#pragma unroll
    for (int i = 0; i < SUBTILES * ACCUMULATORS; i += 4) {
      const float4 peer = *reinterpret_cast<const float4*>(sums + i / 4 * SUMS_PITCH);
      float* own = acc[i / ACCUMULATORS] + i % ACCUMULATORS;
      own[0] += peer.x, own[1] += peer.y, own[2] += peer.z, own[3] += peer.w;
    }
  }
  // Sums that are added have been loaded; the peer's next tile overwrites them.
#pragma unroll
  for (int i = 0; i < SUBTILES * ACCUMULATORS; ++i) pin(acc[i / ACCUMULATORS][i % ACCUMULATORS]);
  __syncwarp();
  const int lane = threadIdx.x % WARP_SIZE;
  if (lane > 0 && lane < SPLITS) barrier_arrive_peer(shared + SUMS_READ_OFFSET, rank ^ lane);
}

__device__ __forceinline__ void consume(const OnnxfuseArguments& args, const Maps& maps, unsigned char* memory,
                                        unsigned shared, int rank, int group) {
  const TileScheduler scheduler(args);
  const int steps = steps_of(args);
  const int team = group / TEAM_GROUPS;
  const int first_row = group % TEAM_GROUPS * GROUP_M;
  unsigned char* staging = memory + RING_BYTES + SUMS_BYTES + threadIdx.x / WARP_SIZE * STAGING_BYTES;
  RingPosition ring;
  if (team == 1) ring.skip(steps);
  float acc[SUBTILES][ACCUMULATORS];
  const unsigned slabs_full = shared + SLABS_FULL_OFFSET + group * GROUP_SLABS_BYTES;
  const unsigned slabs_empty = shared + SLABS_EMPTY_OFFSET + group * GROUP_SLABS_BYTES;
  int count = team;
#pragma unroll 1
  for (int number = first_number(scheduler, group); number < scheduler.tiles; number += next_number(scheduler)) {
    if (PINGPONG && count > 0) named_sync(TURN_BARRIER + team, CONSUMERS * WARP_GROUP);
    run_main_loop(acc, ring, shared, first_row, steps);
    const bool is_last = number + scheduler.clusters >= scheduler.tiles;
    if (PINGPONG && !is_last) named_arrive(TURN_BARRIER + (team ^ 1), CONSUMERS * WARP_GROUP);
    finish_main_loop(acc, ring, shared);
    const int buffer = count % VECTOR_BUFFERS;
    const unsigned char* vectors = memory + VECTORS_OFFSET + buffer * VECTORS_BYTES;
    barrier_wait(shared + VECTORS_FULL_OFFSET + buffer * 8, count / VECTOR_BUFFERS % 2);
    const OutTile tile = group_tile(*reinterpret_cast<const OutTile*>(vectors), group);
    const int owner = SPLITS > 1 ? threadIdx.x / WARP_SIZE % SPLITS : rank;
    if (owner == rank) {
      if constexpr (SPLITS > 1) reduce_partials(acc, memory, shared, rank, count % 2);
      run_epilogue(acc, args, maps, tile, first_row, {vectors, staging, slabs_full, slabs_empty}, count / TEAMS);
    } else {
      send_partials(acc, shared, rank, owner);
    }
    barrier_arrive(shared + VECTORS_EMPTY_OFFSET + buffer * 8);
    count += TEAMS;
    if (PINGPONG) ring.skip(steps);
  }
  if (TMA_STORED_OUTS > 0 && threadIdx.x % WARP_SIZE == 0) store_wait<0>();  // else the block's memory is gone
}

__device__ __forceinline__ void init_barriers(unsigned shared) {
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    barrier_init(shared + FULL_OFFSET + stage * 8, 1);
    barrier_init(shared + EMPTY_OFFSET + stage * 8, READERS);
  }
#pragma unroll
  for (int buffer = 0; buffer < VECTOR_BUFFERS; ++buffer) {
    barrier_init(shared + VECTORS_FULL_OFFSET + buffer * 8, WARP_SIZE);
    barrier_init(shared + VECTORS_EMPTY_OFFSET + buffer * 8, TILE_WARPS * WARP_SIZE);
  }
  if constexpr (TILE_LOADS > 0) {
#pragma unroll
    for (int slab = 0; slab < CONSUMERS * LOAD_BUFFERS; ++slab) {
      barrier_init(shared + SLABS_FULL_OFFSET + slab * 8, 2 * WARP_SIZE);
      barrier_init(shared + SLABS_EMPTY_OFFSET + slab * 8, OWN_WARPS);
    }
    barrier_init(shared + SLABS_START_OFFSET, 1);
  }
  if constexpr (SPLITS > 1) {
    barrier_init(shared + SUMS_FULL_OFFSET, 1);
    barrier_init(shared + SUMS_READ_OFFSET, (SPLITS - 1) * CONSUMERS * OWN_WARPS);
  }
  barrier_init_fence();
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, 1) ONNXFUSE_CLUSTER
onnxfuse_gemm(const __grid_constant__ OnnxfuseArguments args, const __grid_constant__ onnxfuse::Maps maps) {
  using namespace onnxfuse;
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  const unsigned shared = shared_address(onnxfuse_shared);
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == CONSUMERS * WARP_GROUP) {
    init_barriers(shared);
  } else if (threadIdx.x < sizeof(Maps) / sizeof(TensorMap)) {
    prefetch_map(reinterpret_cast<const TensorMap*>(&maps)[threadIdx.x]);
  }
  if constexpr (CLUSTER > 1) {
    __syncwarp();
    cluster_meet();
  } else {
    __syncthreads();
  }
  // Under programmatic dependent launch everything up to here ran beside the end of the previous kernel, whose results
  // this one may read and whose operands it may overwrite.
  wait_for_previous_kernel();
  let_next_kernel_start();
  // The same in all lanes: the compiler may keep what follows from it in uniform registers.
  const int group = __shfl_sync(0xffffffff, threadIdx.x / WARP_GROUP, 0);
  if (group == CONSUMERS) {
    if constexpr (GIVE_REGISTERS) give_registers<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x % WARP_GROUP / WARP_SIZE, 0);
    if (warp == 0) {
      if (threadIdx.x % WARP_SIZE == 0) produce(args, maps, shared, rank);
    } else if (warp == 1) {
      produce_vectors(args, onnxfuse_shared, shared, rank);
    } else if constexpr (TILE_LOADS > 0) {
      produce_slabs(args, onnxfuse_shared, shared, rank, warp - 2);
    }
  } else {
    if constexpr (GIVE_REGISTERS) take_registers<CONSUMER_REGISTERS>();
    consume(args, maps, onnxfuse_shared, shared, rank, group);
  }
}
