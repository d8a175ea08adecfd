// The ring of stages that TMA fills and wgmma reads, shared memory and barriers around it, and which tile a block computes:
// what the kernels of sm_90a have in common, whatever their stages hold.
//
// The generated text defines BLOCK_K, the k of a stage, and STAGE_BYTES.
#pragma once
#include "common/arguments.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/ptx.cuh"
#include "common/first_lane.cuh"

namespace onnxfuse {

constexpr int TEAMS = PINGPONG ? 2 : 1;
constexpr int TEAM_GROUPS = CONSUMERS / TEAMS;
constexpr int ALL_GROUPS = CONSUMERS * K_GROUPS;          // that multiply; those of the first part of k run epilogues
constexpr int PRODUCER_THREAD = ALL_GROUPS * WARP_GROUP;  // the first one behind them
constexpr int SHARING = CLUSTER_M * CLUSTER_N;  // blocks that a stage is sent to
constexpr int CLUSTER = SHARING * SPLITS;
constexpr int VECTOR_BUFFERS = 4;                         // with 2, every tile would wait for the next one's vectors
constexpr int ROW_BYTES = 128;                            // of k in a stage: the widest swizzle
constexpr int STEP_K = 32 / sizeof(Element);              // of one wgmma

// 65,536 registers: 128 * 40 + 2 * 128 * 232 = 64,512, or 128 * 32 + 3 * 128 * 160. The compiler allots 168 or 128 to
// every thread of the block. With four groups a quarter of the multiprocessor has five warps, so each thread has 96, and
// there is nothing to give away.
constexpr bool GIVE_REGISTERS = ALL_GROUPS < 4;
constexpr int PRODUCER_REGISTERS = ALL_GROUPS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = ALL_GROUPS == 2 ? 232 : 160;

// Columns of a block's tile: with parts apart, each of two groups multiplies one part by all of them, and then has both
// parts of half of them.
constexpr int TILE_COLUMNS = APART ? 2 * BLOCK_N : BLOCK_N;

// All of rhs that the tiles of a block have in common may stay in shared memory behind the stages, which then hold lhs
// alone. Tile numbers go along the columns, and a block's tiles are a multiple of them apart.
constexpr bool KEEPS_RHS = KEPT_BYTES > 0;
constexpr int KEPT_OFFSET = STAGES * STAGE_BYTES;
constexpr int RING_BYTES = KEPT_OFFSET + KEPT_BYTES;
constexpr int FULL_OFFSET = VECTORS_OFFSET + VECTOR_BUFFERS * VECTORS_BYTES;
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;
constexpr int VECTORS_FULL_OFFSET = EMPTY_OFFSET + STAGES * 8;
constexpr int VECTORS_EMPTY_OFFSET = VECTORS_FULL_OFFSET + VECTOR_BUFFERS * 8;

// Tile operands, slab by slab: those of group 0, then those of group 1. The first wait until the ring is on its way.
constexpr int GROUP_SLABS_BYTES = HAS_SLABS ? LOAD_BUFFERS * 8 : 0;
constexpr int SLABS_FULL_OFFSET = VECTORS_EMPTY_OFFSET + VECTOR_BUFFERS * 8;
constexpr int SLABS_EMPTY_OFFSET = SLABS_FULL_OFFSET + CONSUMERS * GROUP_SLABS_BYTES;
constexpr int SLABS_START_OFFSET = SLABS_EMPTY_OFFSET + CONSUMERS * GROUP_SLABS_BYTES;

constexpr int SUMS_FULL_OFFSET = SLABS_START_OFFSET + (HAS_SLABS ? 8 : 0);
constexpr int SUMS_READ_OFFSET = SUMS_FULL_OFFSET + (SPLITS > 1 ? 8 : 0);

// Who reads a stage arrives at `empty`, once a warp: one group or both, in every block that any of it is sent to.
constexpr int TILE_WARPS = TEAM_GROUPS * 4;
constexpr int READERS = TILE_WARPS * (CLUSTER_M + CLUSTER_N - 1);

// Of a group, warps whose rows belong to one block.
constexpr int OWN_WARPS = WARP_GROUP / WARP_SIZE / SPLITS;
constexpr int SLAB_WARPS = WARP_GROUP / WARP_SIZE / SLAB_BLOCKS;  // that read slabs of this block
constexpr int WARP_SUMS_BYTES = SUBTILES * ACCUMULATORS * WARP_SIZE * 4;
constexpr int SPLIT_SUMS_BYTES = (SPLITS - 1) * TEAM_GROUPS * OWN_WARPS * WARP_SUMS_BYTES;  // of the cluster's other blocks
constexpr int K_GROUP_SUMS_BYTES = CONSUMERS * (WARP_GROUP / WARP_SIZE) * WARP_SUMS_BYTES;  // of groups that share k
constexpr int GROUP_SUMS_BYTES = (K_GROUPS - 1) * K_GROUP_SUMS_BYTES;

static_assert(SHARED_BYTES == SUMS_READ_OFFSET + (SPLITS > 1 ? 8 : 0), "footprint and kernel agree");
static_assert(SPLITS == 1 || SPLITS == 2 || SPLITS == 4, "warps belong to blocks, and sums are paired");
static_assert(SPLITS == 1 || SHARING == 1, "the blocks of a cluster work on one tile");
static_assert(SPLITS == 1 || LAST_WAVE_SPLIT || TEAMS == 1, "sums of one tile at a time lie in shared memory");
static_assert(!LAST_WAVE_SPLIT || (SPLITS > 1 && K_GROUPS == 1 && !SERVED), "each block has tiles of its own");
static_assert(SUMS_BYTES == SPLIT_SUMS_BYTES + GROUP_SUMS_BYTES, "footprint and kernel agree");
static_assert(K_GROUPS == 1 || TEAMS == 1, "groups that share k have the same tile");
// A group waits for a stage's next phase by its parity, so it has to have seen the one before; and it reads a stage while
// it still holds the one before.
static_assert(K_GROUPS == 1 || (STAGES % K_GROUPS == 0 && STAGES >= 2 * K_GROUPS), "each group has stages of its own");
static_assert(VECTORS_OFFSET == RING_BYTES + SUMS_BYTES + CONSUMERS * 4 * STAGING_BYTES, "footprint and kernel agree");
static_assert(GROUP_M == (APART ? BLOCK_M : BLOCK_M / TEAM_GROUPS), "footprint and kernel agree");
static_assert(!APART || (PARTS == 2 && CONSUMERS == 2 && TEAMS == 1 && SPLITS == 1), "a group for each part");
static_assert(!KEEPS_RHS || (CLUSTER == 1 && GROUP_ROWS == 1), "a block loads its rhs, and keeps it from tile to tile");
static_assert(STAGING_BYTES % (BOX_CHUNKS * 128) == 0, "boxes start on whole periods of the swizzle");

// ---- shared-memory matrix descriptors of wgmma (PTX ISA, "Matrix Descriptor"); distances in units of 16 bytes

__device__ constexpr unsigned long long descriptor(int swizzle_span, int leading_bytes, int stride_bytes) {
  const unsigned long long swizzle = swizzle_span == 128 ? 1 : swizzle_span == 64 ? 2 : 3;
  return swizzle << 62 | static_cast<unsigned long long>(stride_bytes / 16) << 32 |
         static_cast<unsigned long long>(leading_bytes / 16) << 16;
}

// The address field; behind its 18 bits, a shared-memory address holds the block's rank in the cluster.
__device__ __forceinline__ unsigned long long descriptor_address(unsigned shared) { return (shared & 0x3ffff) >> 4; }

// Of the M side, k contiguous: rows of 128 bytes, 8 of them a period of the swizzle; m contiguous: an atom's rows of m for
// all k of the stage, then the next atom, which is as many rows as one wgmma reads.
constexpr int LHS_ATOM = ROW_BYTES / sizeof(Element);
constexpr unsigned long long K_CONTIGUOUS_DESCRIPTOR = descriptor(ROW_BYTES, 16, 8 * ROW_BYTES);
constexpr int K_CONTIGUOUS_STEP = STEP_K * sizeof(Element) / 16;
constexpr unsigned long long LHS_DESCRIPTOR =
    LHS_K_CONTIGUOUS ? K_CONTIGUOUS_DESCRIPTOR : descriptor(ROW_BYTES, BLOCK_K * ROW_BYTES, 8 * ROW_BYTES);
constexpr int LHS_STEP = LHS_K_CONTIGUOUS ? K_CONTIGUOUS_STEP : STEP_K * ROW_BYTES / 16;

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

// Where a block is among those that share loads: blocks side by side have the rows of their tiles in common, and blocks one
// above the other the columns.
struct ClusterPlace {
  int down, right;

  __device__ __forceinline__ explicit ClusterPlace(int rank) {
    down = CLUSTER_M > 1 ? rank % CLUSTER_M : 0;
    right = CLUSTER_N > 1 ? rank / CLUSTER_M : 0;
  }
  // A bit for each block of the same rows, or of the same columns.
  __device__ __forceinline__ unsigned short with_rows() const {
    unsigned blocks = 0;
#pragma unroll
    for (int i = 0; i < CLUSTER_N; ++i) blocks |= 1u << i * CLUSTER_M;
    return static_cast<unsigned short>(blocks << down);
  }
  __device__ __forceinline__ unsigned short with_columns() const {
    return static_cast<unsigned short>(((1u << CLUSTER_M) - 1) << right * CLUSTER_M);
  }
};

// Tile number -> place: GROUP_ROWS tiles down, then one to the right, and so on; then the next group of rows; then the
// next batch. The blocks of a cluster take neighbouring tiles. With LAST_ROWS_FULL the last tile down ends where the
// rows end, and with LAST_COLUMNS_FULL the last one to the right where the columns do: some are computed twice, to the same
// bits, because TMA takes three times as long for a row of a box that lies behind a tensor's end as for any other.
//
// With LAST_WAVE_SPLIT blocks take tiles by themselves, wave after wave, and what remains is split along k if each such tile
// can have a cluster: it counts once for each block. All tiles of the same columns are split or none, for a row's bits do
// not depend on where it lies, nor do those that are computed twice.
struct TileScheduler {
  int tiles_m, tiles_n, tiles, clusters, first, last_row, last_column, whole;

  __device__ __forceinline__ TileScheduler(const OnnxfuseArguments& args) {
    constexpr int TOGETHER = LAST_WAVE_SPLIT ? 1 : CLUSTER;
    tiles_m = (rows_of(args) - 1) / (BLOCK_M * CLUSTER_M) + 1;
    tiles_n = (columns_of(args) - 1) / (TILE_COLUMNS * CLUSTER_N) + 1;
    tiles = tiles_m * tiles_n * args.batch;
    clusters = gridDim.x / TOGETHER;
    first = blockIdx.x / TOGETHER;
    last_row = LAST_ROWS_FULL ? max(rows_of(args) - BLOCK_M, 0) : rows_of(args);
    last_column = LAST_COLUMNS_FULL ? max(columns_of(args) - TILE_COLUMNS, 0) : columns_of(args);
    if constexpr (KEEPS_RHS) {  // a block behind the last whole row of tiles has none; where a row has more, all have some
      clusters -= clusters < tiles_n ? 0 : clusters % tiles_n;
      if (first >= clusters) first = tiles;
    }
    whole = LAST_WAVE_SPLIT ? tiles / clusters * clusters : 0;
    const int rest = (tiles - whole) * SPLITS;
    const bool splits = args.batch == 1 && whole % tiles_n == 0 && rest <= clusters;
    if constexpr (LAST_WAVE_SPLIT) splits ? tiles = whole + rest : whole = tiles;
  }

  // Whether the blocks of a cluster share this tile.
  __device__ __forceinline__ bool is_split(int number) const { return SPLITS > 1 && (!LAST_WAVE_SPLIT || number >= whole); }

  __device__ __forceinline__ OutTile at(int number, int rank) const {
    const unsigned tile = LAST_WAVE_SPLIT && is_split(number) ? whole + (number - whole) / SPLITS : number;
    const unsigned of_batch = tiles_m * tiles_n, of_group = GROUP_ROWS * tiles_n;
    const unsigned batch = tile < of_batch ? 0 : tile / of_batch;
    const unsigned in_batch = tile - batch * of_batch;
    const unsigned group = in_batch < of_group ? 0 : in_batch / of_group;
    const unsigned in_group = in_batch - group * of_group;
    const unsigned height = min(tiles_m - group * GROUP_ROWS, unsigned(GROUP_ROWS));
    const unsigned right = height == GROUP_ROWS ? in_group / GROUP_ROWS : in_group / height;
    const ClusterPlace place(rank);
    const int tile_m = (group * GROUP_ROWS + in_group - right * height) * CLUSTER_M + place.down;
    const int tile_n = right * CLUSTER_N + place.right;
    const int row = tile_m * BLOCK_M, column = tile_n * TILE_COLUMNS;
    return {int(batch), LAST_ROWS_FULL ? min(row, last_row) : row,
            LAST_COLUMNS_FULL ? min(column, last_column) : column, 0};
  }
};

// What a consumer group computes of a block's tile.
__device__ __forceinline__ OutTile group_tile(OutTile tile, int group) {
  if constexpr (APART) {
    tile.column += group * BLOCK_N;
  } else {
    tile.row += group % TEAM_GROUPS * GROUP_M;
  }
  return tile;
}

// Numbers of the first tile of a group and between its tiles.
__device__ __forceinline__ int first_number(const TileScheduler& scheduler, int group) {
  return scheduler.first + group / TEAM_GROUPS * scheduler.clusters;
}
__device__ __forceinline__ int next_number(const TileScheduler& scheduler) { return TEAMS * scheduler.clusters; }

// Steps of k of one block. Where there are fewer than for all blocks, the last ones read zeros behind the end of k. Groups
// that share k have as many each: a stage and a step are then always the same group's, and a row's bits do not depend on
// which tiles its block had before.
__device__ __forceinline__ int steps_of(const OnnxfuseArguments& args, int blocks) {
  return ((args.k - 1) / (BLOCK_K * blocks * K_GROUPS) + 1) * K_GROUPS;
}

// What a block multiplies for a tile: `steps` stages from k = `first_k` on, of which a group that shares k has every
// K_GROUPS-th one from its own number on.
struct Work {
  OutTile tile;
  int first_k, steps, k_group;
};

// ---- a factor's batch

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

// A box of an operand; with SHARED, it is one of those that this block loads for several `blocks` of the cluster. With
// IN_RUNS the map has runs of batches.
template <bool SHARED, bool IN_RUNS>
__device__ __forceinline__ void load(unsigned shared, const TensorMap& map, unsigned full, int x, int y,
                                     const BatchPlace& place, unsigned short blocks) {
  if constexpr (IN_RUNS) {
    load_box(shared, map, full, x, y, place.batch, place.run);
  } else if constexpr (SHARED) {
    load_box_to_all(shared, map, full, x, y, place.batch, blocks);
  } else {
    load_box(shared, map, full, x, y, place.batch);
  }
}

// Whether this lane tells the block of its number that a stage was read: those are told that load a part of it.
__device__ __forceinline__ bool tells_block() {
  const int lane = threadIdx.x % WARP_SIZE;
  if constexpr (CLUSTER_M == 1 || CLUSTER_N == 1) return lane < SHARING;
  const ClusterPlace own(cluster_rank()), other(lane);
  return lane < SHARING && (own.down == other.down || own.right == other.right);
}

// This warp has read the stage: its blocks may overwrite it.
__device__ __forceinline__ void release(unsigned shared, int stage, bool tells = tells_block()) {
  const unsigned empty = shared + EMPTY_OFFSET + stage * 8;
  if constexpr (SHARING > 1) {
    if (tells) barrier_arrive_peer(empty, threadIdx.x % WARP_SIZE);
  } else {
    if (tells) barrier_arrive(empty);
  }
}

// multiply(stage, step), behind a fence of its own, for each stage of a block's k: its wgmma are in flight while the next
// stage's are issued.
template <typename Multiply>
__device__ __forceinline__ void multiply_stages(RingPosition& ring, unsigned shared, int steps,
                                                const Multiply& multiply) {
  const bool tells = tells_block();
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    barrier_wait(shared + FULL_OFFSET + ring.stage * 8, ring.parity);
    multiply(shared + ring.stage * STAGE_BYTES, step);
    multiply_commit();
    if (step > 0) {
      multiply_wait<1>();
      release(shared, previous, tells);
    }
    previous = ring.stage;
    ring.next();
  }
}

}  // namespace onnxfuse
