// Slabs that producers store, of a kernel's only output, of 16 bits and in boxes: no consumer waits for a store. If there
// is one tile operand, of 16 bits and in boxes too, its slabs lie where those of the output will: half the memory, so that
// all of a tile's are there before its epilogue begins.
//
//   one thread of    load ---- full: TMA's bytes ----------------- empty: store, and once TMA has read it, load what the
//   a producer warp    |             |                             |        group computes next in this buffer
//   the group's                      reads pairs, writes results   arrives, once a warp
//   four warps                       where the pairs were
//
// A slab is SLAB_COLUMNS of the 64 rows of one wgmma: one box for all warps, swizzled as those of outputs are.
#pragma once
#include "hopper/ring.cuh"

namespace onnxfuse {

constexpr int SLAB_BYTES = BOX_ROWS * BOX_BYTES;
constexpr int GROUP_WARPS = WARP_GROUP / WARP_SIZE;

static_assert(!SERVED || (TILE_LOADS == IN_PLACE && OUTS == 1 && SPLITS == 1), "one operand, whose place the output takes");
static_assert(!SERVED || LOAD_BUFFERS > 1 || SLABS == 1, "a slab is loaded when the next one is stored");
static_assert(!SERVED || STAGING_BYTES * GROUP_WARPS == LOAD_BUFFERS * SLAB_BYTES, "footprint and kernel agree");

// Where the staging area of this warp begins, or its rows of the group's first slab.
__device__ __forceinline__ int staging_of(int group) {
  const int warp = threadIdx.x % WARP_GROUP / WARP_SIZE;
  return group * GROUP_WARPS * STAGING_BYTES + warp * (SERVED ? WARP_ROWS * BOX_BYTES : STAGING_BYTES);
}

// One slab of a consumer group: its shared memory, its barriers and where it lies in the output.
struct GroupSlab {
  unsigned memory, full, empty;
  int batch, row, column;

  __device__ __forceinline__ GroupSlab(unsigned shared, const OutTile& block_tile, int group, int index) {
    const int buffer = index % LOAD_BUFFERS;
    const OutTile tile = group_tile(block_tile, group);
    memory = shared + RING_BYTES + SUMS_BYTES + group * GROUP_WARPS * STAGING_BYTES + buffer * SLAB_BYTES;
    full = shared + SLABS_FULL_OFFSET + group * GROUP_SLABS_BYTES + buffer * 8;
    empty = full - SLABS_FULL_OFFSET + SLABS_EMPTY_OFFSET;
    batch = tile.batch;
    row = tile.row + index / SLABS_N * GROUP_WGMMA_ROWS;
    column = tile.column + index % SLABS_N * SLAB_COLUMNS;
  }

  __device__ __forceinline__ void load(const OnnxfuseArguments& args, const Maps& maps) const {
    if constexpr (!IN_PLACE) return barrier_arrive(full);  // there is nothing to load, but room
    const bool broadcast = args.loads[IN_PLACE ? IN_PLACE_LOAD : 0].batch_stride == 0;
    barrier_arrive_expect(full, SLAB_BYTES);
    load_box(memory, maps.outs[OUTS], full, column, row, broadcast ? 0 : batch);
  }

  __device__ __forceinline__ void store(const Maps& maps) const {
    store_box(maps.outs[0], memory, column, row, batch);
  }
};

// Of three groups, which share each tile, one of two producer warps serves the first and the last; of four, which are two
// teams, each serves a team: their slabs come in turn.
constexpr int SERVED_STEP = CONSUMERS == 4 ? 1 : 2;
__device__ __forceinline__ int first_served(int server) { return CONSUMERS == 4 ? 2 * server : server; }

// The slabs of the consumer groups that a producer warp serves.
struct SlabServer {
  const OnnxfuseArguments& args;
  const Maps& maps;
  unsigned shared;
  int first_group;

  template <typename Body>
  __device__ __forceinline__ void for_each(const OutTile& tile, int index, const Body& body) const {
    for (int group = first_group; group < (CONSUMERS == 4 ? first_group + 2 : CONSUMERS); group += SERVED_STEP) {
      body(GroupSlab(shared, tile, group, index));
    }
  }

  __device__ __forceinline__ void load(const OutTile& tile, int index) const {
    for_each(tile, index, [&](const GroupSlab& slab) { slab.load(args, maps); });
  }

  // Once the groups have put what they computed there, in their tile number `count`.
  __device__ __forceinline__ void store(const OutTile& tile, int index, int count) const {
    for_each(tile, index, [&](const GroupSlab& slab) {
      barrier_wait(slab.empty, slab_parity(count, index));
      slab.store(maps);
    });
    store_commit();
  }

  // What comes next in the buffer of a slab whose store has been read.
  __device__ __forceinline__ void refill(const OutTile& tile, int index, const OutTile& next, bool follows) const {
    if (index + LOAD_BUFFERS < SLABS) {
      load(tile, index + LOAD_BUFFERS);
    } else if (follows) {
      load(next, index % LOAD_BUFFERS);
    }
  }
};

// The slabs of all tiles of some consumer groups, by one thread.
__device__ __forceinline__ void serve_slabs(const OnnxfuseArguments& args, const Maps& maps, unsigned shared, int rank,
                                            int first_group) {
  const TileScheduler scheduler(args);
  const SlabServer server{args, maps, shared, first_group};
  int number = first_number(scheduler, first_group);
  if (number >= scheduler.tiles) return;
  barrier_wait(shared + SLABS_START_OFFSET, 0);
  OutTile tile = scheduler.at(number, rank);
#pragma unroll 1
  for (int index = 0; index < LOAD_BUFFERS; ++index) server.load(tile, index);
#pragma unroll 1
  for (int count = 0; number < scheduler.tiles; ++count) {
    number += next_number(scheduler);
    const bool follows = number < scheduler.tiles;
    const OutTile next = scheduler.at(number, rank);
#pragma unroll 1
    for (int index = 0; index < SLABS; ++index) {
      server.store(tile, index, count);
      if (index == 0) continue;
      store_wait<1>();
      server.refill(tile, index - 1, next, follows);
    }
    store_wait<0>();
    server.refill(tile, SLABS - 1, next, follows);
    tile = next;
  }
}

}  // namespace onnxfuse
