// The roles of a block of sm_90a, and its entry. What a stage holds is that of the file before: load_stage(),
// stage_bytes() and run_main_loop().
#pragma once
#include "hopper/ring.cuh"
#include "hopper/slabs.cuh"

namespace onnxfuse {

// ---- producer

// Until all that was loaded has been read.
__device__ __forceinline__ void await_readers(unsigned shared, RingPosition ring) {
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    barrier_wait(shared + EMPTY_OFFSET + ring.stage * 8, ring.parity ^ 1);
    ring.next();
  }
}

// Until no other block of the cluster arrives at this one's barriers or reads its sums any more: a block that has ended
// has no shared memory. One thread waits, where a barrier of the cluster would hold up all of them and cost a fence.
__device__ __forceinline__ void await_cluster(unsigned shared, const RingPosition& ring, int sums_parity) {
  if constexpr (SHARING > 1) await_readers(shared, ring);
  if constexpr (SENDS_OFTEN) barrier_wait(shared + SUMS_READ_OFFSET, sums_parity);
}

// How many steps of a tile may have their rhs before the kernel before has ended: more of them would hold up the first
// step's lhs where it ends at once.
constexpr int AHEAD_STEPS = 4;

// Rhs of a block's first steps, where no kernel of this run writes it. Returns of how many.
__device__ __forceinline__ int load_ahead(const OnnxfuseArguments& args, const Maps& maps, unsigned shared, int rank,
                                          const OutTile& tile, const TileScheduler& scheduler) {
  if (!args.rhs_ready || scheduler.first >= scheduler.tiles) return 0;
  const bool is_split = scheduler.is_split(scheduler.first);
  const int steps = steps_of(args, is_split ? SPLITS : 1), first_step = is_split ? rank * steps : 0;
  const int bytes = stage_bytes(args, tile, true), ahead = min(steps, AHEAD_STEPS < STAGES ? AHEAD_STEPS : STAGES);
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) {
    const unsigned full = shared + FULL_OFFSET + step * 8;
    barrier_arrive_expect(full, bytes);
    load_rhs(shared, shared + step * STAGE_BYTES, full, args, maps, tile, (first_step + step) * BLOCK_K, rank);
  }
  return ahead;
}

// Under programmatic dependent launch what comes before this runs beside the end of the kernel before, whose results this
// one may read and whose operands it may overwrite.
__device__ __forceinline__ void wait_for_operands() {
  wait_for_kernel_before();
  let_kernel_behind_start();
}

__device__ __forceinline__ void produce(const OnnxfuseArguments& args, const Maps& maps, unsigned shared, int rank,
                                        OutTile tile) {
  const TileScheduler scheduler(args);
  const int of_whole = steps_of(args, 1), of_split = steps_of(args, SPLITS);
  RingPosition ring;
  OutTile kept = tile;
  int sums_parity = 0;
  int ahead = load_ahead(args, maps, shared, rank, tile, scheduler);  // steps that only lack lhs
  wait_for_operands();
  for (int number = scheduler.first; number < scheduler.tiles; number += scheduler.clusters) {
    if (number != scheduler.first) tile = scheduler.at(number, rank);
    const int steps = scheduler.is_split(number) ? of_split : of_whole;
    const int first_step = scheduler.is_split(number) ? rank * steps : 0;
    const int filled = min(steps, STAGES) - 1;
    const bool is_first = number == scheduler.first;
    const bool brings_rhs = !KEEPS_RHS || is_first || tile.column != kept.column || tile.batch != kept.batch;
    if (KEEPS_RHS && brings_rhs && !is_first) await_readers(shared, ring);
    kept = tile;
    const int bytes = stage_bytes(args, tile, brings_rhs);
    if (SENDS_OFTEN && !is_first) {
      barrier_wait(shared + SUMS_READ_OFFSET, sums_parity);
      sums_parity ^= 1;
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const unsigned stage = shared + ring.stage * STAGE_BYTES, full = shared + FULL_OFFSET + ring.stage * 8;
      const int k = (first_step + step) * BLOCK_K;
      const bool is_ahead = ahead-- > 0;
      if (!is_ahead) barrier_wait(shared + EMPTY_OFFSET + ring.stage * 8, ring.parity ^ 1);
      if (!is_ahead) barrier_arrive_expect(full, bytes);
      load_lhs(stage, full, args, maps, tile, k, rank);
      if (!is_ahead && brings_rhs) load_rhs(shared, stage, full, args, maps, tile, k, rank);
      if (HAS_SLABS && step == filled && is_first) barrier_arrive(shared + SLABS_START_OFFSET);
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
// each tile, one warp serves the first and the last; where another one prepares stages, it serves all.
__device__ __forceinline__ void produce_slabs(const OnnxfuseArguments& args, unsigned char* memory, unsigned shared,
                                              int rank, int first_group) {
  const TileScheduler scheduler(args);
  const int first_warp = SENDS_OFTEN ? rank : 0;
  int number = first_number(scheduler, first_group);
  if (number >= scheduler.tiles) return;
  barrier_wait(shared + SLABS_START_OFFSET, 0);
#pragma unroll 1
  for (int count = 0; number < scheduler.tiles; number += next_number(scheduler), ++count) {
    const OutTile tile = scheduler.at(number, rank);
#pragma unroll 1
    for (int index = 0; index < SLABS; ++index) {
      const int parity = slab_parity(count, index);
      produce_slab(args, memory, shared, tile, first_group, index, parity, first_warp);
      if (PREPARES && CONSUMERS > 1) produce_slab(args, memory, shared, tile, 1, index, parity, first_warp);
      if (CONSUMERS == 3 && first_group == 0) produce_slab(args, memory, shared, tile, 2, index, parity, first_warp);
    }
  }
}

// The producers, a warp each, of which the first one is asked for by itself: else ptxas reads the way of each from a table,
// and the first loads would wait for it.
__device__ __forceinline__ void serve(const OnnxfuseArguments& args, const Maps& maps, unsigned char* memory,
                                      unsigned shared, int rank, const OutTile& first) {
  if (__shfl_sync(0xffffffff, threadIdx.x < PRODUCER_THREAD + WARP_SIZE, 0)) {
    const OutTile tile = of_first_lane(first);
    if (is_elected()) produce(args, maps, shared, rank, tile);
    return;
  }
  const int warp = __shfl_sync(0xffffffff, threadIdx.x % WARP_GROUP / WARP_SIZE, 0);
  const bool prepares = PREPARES && warp == 3;
  if (!prepares || !args.rhs_ready) wait_for_operands();
  if (warp == 1) {
    produce_vectors(args, memory, shared, rank);
  } else if (prepares) {
    prepare(args, shared, rank);
  } else if constexpr (SERVED) {
    if (is_elected()) serve_slabs(args, maps, shared, rank, first_served(warp - 2));
  } else if constexpr (TILE_LOADS > 0) {
    produce_slabs(args, memory, shared, rank, warp - 2);
  }
}

// ---- consumers

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
  const int group = threadIdx.x / WARP_GROUP % TEAM_GROUPS;
  const int own_warp = group * OWN_WARPS + threadIdx.x % WARP_GROUP / WARP_SIZE / SPLITS;
  const int sender = (from ^ owner) - 1;
  const int warp = sender * TEAM_GROUPS * OWN_WARPS + own_warp;
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

// What the cluster's other blocks sent to this warp is added: `acc` has all of k. First the sums of blocks 0 and 1 and of
// 2 and 3, then both, whichever of them is this block: a row's bits do not depend on where in a tile it lies.
__device__ __forceinline__ void reduce_partials(float (&acc)[SUBTILES][ACCUMULATORS], const unsigned char* memory,
                                                unsigned shared, int rank, int parity) {
  const int thread = threadIdx.x % (TEAM_GROUPS * WARP_GROUP);
  if (thread == rank * WARP_SIZE) barrier_arrive_expect(shared + SUMS_FULL_OFFSET, SPLIT_SUMS_BYTES);
  barrier_wait(shared + SUMS_FULL_OFFSET, parity);
  const auto sums_of = [&](int distance, int i) {
    const unsigned char* sums = memory + sums_offset(rank ^ distance, rank);
    return *reinterpret_cast<const float4*>(sums + i / 4 * SUMS_PITCH);
  };
  const auto add = [](float* sums, const float4& others) {
    sums[0] += others.x, sums[1] += others.y, sums[2] += others.z, sums[3] += others.w;
  };
#pragma unroll
  for (int i = 0; i < SUBTILES * ACCUMULATORS; i += 4) {
    float* own = acc[i / ACCUMULATORS] + i % ACCUMULATORS;
    add(own, sums_of(1, i));
    if constexpr (SPLITS == 4) {
      float4 pair = sums_of(2, i);
      add(&pair.x, sums_of(3, i));
      add(own, pair);
    }
  }
  if constexpr (!SENDS_OFTEN) return;
  // Sums that are added have been loaded; the peer's next tile overwrites them.
#pragma unroll
  for (int i = 0; i < SUBTILES * ACCUMULATORS; ++i) pin(acc[i / ACCUMULATORS][i % ACCUMULATORS]);
  __syncwarp();
  const int lane = threadIdx.x % WARP_SIZE;
  if (lane > 0 && lane < SPLITS) barrier_arrive_peer(shared + SUMS_READ_OFFSET, rank ^ lane);
}

// This warp does not read the slabs of its tile number `count`, which another block's warp has too: it hands over each in
// turn, as those do that read them.
__device__ __forceinline__ void leave_slabs(unsigned slabs_full, unsigned slabs_empty, int count) {
  const bool leader = threadIdx.x % WARP_SIZE == 0;
#pragma unroll
  for (int index = 0; index < SLABS; ++index) {
    barrier_wait(slabs_full + index % LOAD_BUFFERS * 8, slab_parity(count, index));
    if (leader) barrier_arrive(slabs_empty + index % LOAD_BUFFERS * 8);
  }
}

constexpr int PAIR_BARRIER = 3;  // named barrier of two warps with the same rows, of one part each; one for each pair
constexpr int HALF = ACCUMULATORS / 2;
constexpr int AT_ONCE = SLAB_COLUMNS * WARP_ROWS * 2 / (WARP_SIZE * 16) * 4;  // sums of a thread that staging areas hold

// The sums acc[FIRST, FIRST + HALF) of a warp against those that its pair has of the other part, through the staging areas.
template <int FIRST>
__device__ __forceinline__ void exchange_half(float (&acc)[ACCUMULATORS], unsigned char* memory) {
  const int warp = threadIdx.x / WARP_SIZE, pair = warp ^ WARP_GROUP / WARP_SIZE;
  unsigned char* lane = memory + RING_BYTES + SUMS_BYTES + threadIdx.x % WARP_SIZE * 16;
  __syncwarp();
#pragma unroll
  for (int first = FIRST; first < FIRST + HALF; first += AT_ONCE) {
    const int end = min(first + AT_ONCE, FIRST + HALF);
#pragma unroll
    for (int i = first; i < end; i += 4) {
      auto* own = reinterpret_cast<float4*>(lane + warp * STAGING_BYTES + (i - first) * WARP_SIZE * 4);
      *own = {acc[i], acc[i + 1], acc[i + 2], acc[i + 3]};
    }
    named_sync(PAIR_BARRIER + warp % 4, 2 * WARP_SIZE);
#pragma unroll
    for (int i = first; i < end; i += 4) {
      const auto other = *reinterpret_cast<const float4*>(lane + pair * STAGING_BYTES + (i - first) * WARP_SIZE * 4);
      acc[i] = other.x, acc[i + 1] = other.y, acc[i + 2] = other.z, acc[i + 3] = other.w;
    }
    named_sync(PAIR_BARRIER + warp % 4, 2 * WARP_SIZE);
  }
}

// Each group has one part of all columns; then both parts of its own half of them.
__device__ __forceinline__ void exchange_parts(float (&acc)[ACCUMULATORS], unsigned char* memory, int group) {
  if (group == 0) {
    exchange_half<HALF>(acc, memory);
  } else {
    exchange_half<0>(acc, memory);
  }
}

// Named barriers of groups with the same columns that share k, one for each such set: their sums lie there, or were added.
constexpr int LEFT_BARRIER = 7, TAKEN_BARRIER = 9;

// The sums of groups that share k, in shared memory between two barriers.
struct GroupSums {
  unsigned char* own;  // of this lane, by the first of those groups
  int group, k_group;

  __device__ __forceinline__ GroupSums(unsigned char* memory, int group, int k_group) : group(group), k_group(k_group) {
    const int warp = group * (WARP_GROUP / WARP_SIZE) + threadIdx.x % WARP_GROUP / WARP_SIZE;
    own = memory + RING_BYTES + SPLIT_SUMS_BYTES + warp * WARP_SUMS_BYTES + threadIdx.x % WARP_SIZE * 16;
  }
  __device__ __forceinline__ float4& four(int from, int i) const {
    return *reinterpret_cast<float4*>(own + (from - 1) * K_GROUP_SUMS_BYTES + i / 4 * SUMS_PITCH);
  }
  // This group's sums, where those of the tile before have been added.
  __device__ __forceinline__ void leave(const float (&acc)[SUBTILES][ACCUMULATORS], bool is_first) const {
    if (!is_first) named_sync(TAKEN_BARRIER + group, K_GROUPS * WARP_GROUP);
#pragma unroll
    for (int i = 0; i < SUBTILES * ACCUMULATORS; i += 4) {
      const float* sums = acc[i / ACCUMULATORS] + i % ACCUMULATORS;
      four(k_group, i) = {sums[0], sums[1], sums[2], sums[3]};
    }
    named_arrive(LEFT_BARRIER + group, K_GROUPS * WARP_GROUP);
  }
  // acc += what the other groups left, always in the same order.
  __device__ __forceinline__ void add(float (&acc)[SUBTILES][ACCUMULATORS], bool is_last) const {
    named_sync(LEFT_BARRIER + group, K_GROUPS * WARP_GROUP);
#pragma unroll
    for (int from = 1; from < K_GROUPS; ++from) {
#pragma unroll
      for (int i = 0; i < SUBTILES * ACCUMULATORS; i += 4) {
        float* sums = acc[i / ACCUMULATORS] + i % ACCUMULATORS;
        const float4 left = four(from, i);
        sums[0] += left.x, sums[1] += left.y, sums[2] += left.z, sums[3] += left.w;
      }
    }
    if (!is_last) named_arrive(TAKEN_BARRIER + group, K_GROUPS * WARP_GROUP);
  }
};

__device__ __forceinline__ void gather(float (&acc)[SUBTILES][ACCUMULATORS], const GroupSums& sums, bool is_first,
                                       bool is_last) {
  if (sums.k_group > 0) {
    sums.leave(acc, is_first);
  } else {
    sums.add(acc, is_last);
  }
}

// What is left of a consumer group's `count`-th tile when its sums are there.
__device__ __forceinline__ void finish_tile(float (&acc)[SUBTILES][ACCUMULATORS], const OnnxfuseArguments& args,
                                            const Maps& maps, unsigned char* memory, unsigned shared, int rank,
                                            int group, int count, bool is_split) {
  const int first_row = group % TEAM_GROUPS * GROUP_M, buffer = count % VECTOR_BUFFERS;
  unsigned char* staging = memory + RING_BYTES + SUMS_BYTES + staging_of(group);
  const unsigned slabs = shared + group * GROUP_SLABS_BYTES;
  const unsigned char* vectors = memory + VECTORS_OFFSET + buffer * VECTORS_BYTES;
  barrier_wait(shared + VECTORS_FULL_OFFSET + buffer * 8, count / VECTOR_BUFFERS % 2);
  const OutTile tile = group_tile(*reinterpret_cast<const OutTile*>(vectors), group);
  const int owner = is_split ? threadIdx.x / WARP_SIZE % SPLITS : rank;
  if (owner == rank) {
    if (is_split) reduce_partials(acc, memory, shared, rank, SENDS_OFTEN ? count % 2 : 0);
    if constexpr (APART) exchange_parts(acc[0], memory, group);
    run_epilogue(acc, args, maps, tile, APART ? 0 : first_row,
                 {vectors, staging, slabs + SLABS_FULL_OFFSET, slabs + SLABS_EMPTY_OFFSET}, count / TEAMS);
  } else {
    send_partials(acc, shared, rank, owner);
    if constexpr (LAST_WAVE_SPLIT && HAS_SLABS) {
      leave_slabs(slabs + SLABS_FULL_OFFSET, slabs + SLABS_EMPTY_OFFSET, count / TEAMS);
    }
  }
  barrier_arrive(shared + VECTORS_EMPTY_OFFSET + buffer * 8);
}

__device__ __forceinline__ void consume(const OnnxfuseArguments& args, const Maps& maps, unsigned char* memory,
                                        unsigned shared, int rank, int any_group) {
  const int group = K_GROUPS > 1 ? any_group % CONSUMERS : any_group;
  const int k_group = K_GROUPS > 1 ? any_group / CONSUMERS : 0;
  const TileScheduler scheduler(args);
  const int of_whole = steps_of(args, 1), of_split = steps_of(args, SPLITS);
  const int team = group / TEAM_GROUPS;
  const int first_row = group % TEAM_GROUPS * GROUP_M;
  RingPosition ring;
  if (team == 1) ring.skip(of_whole);
  float acc[SUBTILES][ACCUMULATORS];
  int count = team;
#pragma unroll 1
  for (int number = first_number(scheduler, group); number < scheduler.tiles; number += next_number(scheduler)) {
    if (PINGPONG && count > 0) named_sync(TURN_BARRIER + team, CONSUMERS * WARP_GROUP);
    const bool is_split = scheduler.is_split(number);
    const int steps = is_split ? of_split : of_whole, first_k = is_split ? rank * steps * BLOCK_K : 0;
    run_main_loop(acc, ring, shared, first_row, args, {scheduler.at(number, rank), first_k, steps, k_group});
    const bool is_last = number + scheduler.clusters >= scheduler.tiles;
    if (PINGPONG && !is_last) named_arrive(TURN_BARRIER + (team ^ 1), CONSUMERS * WARP_GROUP);
    finish_main_loop(acc, ring, shared);
    if constexpr (K_GROUPS > 1) {
      ring.skip(K_GROUPS - 1 - k_group);
      gather(acc, {memory, group, k_group}, count == 0, is_last);
    }
    if (k_group == 0) finish_tile(acc, args, maps, memory, shared, rank, group, count, is_split);
    count += TEAMS;
    if (PINGPONG) ring.skip(of_whole);
  }
  if (TMA_STORED_OUTS > 0 && is_elected()) store_wait<0>();  // else the block's memory is gone
}

// ---- before the block's barrier

__device__ __forceinline__ void init_ring(unsigned shared) {
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    barrier_init(shared + FULL_OFFSET + stage * 8, PREPARES ? 1 + 2 * WARP_SIZE : 1);
    barrier_init(shared + EMPTY_OFFSET + stage * 8, READERS);
  }
  barrier_init_fence();
}

__device__ __forceinline__ void init_beside_ring(unsigned shared) {
#pragma unroll
  for (int buffer = 0; buffer < VECTOR_BUFFERS; ++buffer) {
    barrier_init(shared + VECTORS_FULL_OFFSET + buffer * 8, WARP_SIZE);
    barrier_init(shared + VECTORS_EMPTY_OFFSET + buffer * 8, TILE_WARPS * WARP_SIZE);
  }
  if constexpr (HAS_SLABS) {
#pragma unroll
    for (int slab = 0; slab < CONSUMERS * LOAD_BUFFERS; ++slab) {
      barrier_init(shared + SLABS_FULL_OFFSET + slab * 8, SERVED ? 1 : 2 * WARP_SIZE);
      barrier_init(shared + SLABS_EMPTY_OFFSET + slab * 8, SLAB_WARPS);
    }
    barrier_init(shared + SLABS_START_OFFSET, 1);
  }
  if constexpr (SPLITS > 1) {
    barrier_init(shared + SUMS_FULL_OFFSET, 1);
    barrier_init(shared + SUMS_READ_OFFSET, (SPLITS - 1) * CONSUMERS * OWN_WARPS);
  }
  barrier_init_fence();
}

// Where the first tile lies, which takes up to three divisions.
__device__ __forceinline__ OutTile first_tile(const OnnxfuseArguments& args, int rank) {
  const TileScheduler scheduler(args);
  OutTile tile = scheduler.at(scheduler.first, rank);
  pin_integers(tile);
  return tile;
}

// What the block waits for, side by side in four warps, by one lane each: instructions of barriers and maps take uniform
// registers, so that lanes would take turns. The first tile is the producer's.
__device__ __forceinline__ OutTile prepare_block(const OnnxfuseArguments& args, const Maps& maps, unsigned shared,
                                                 int rank) {
  OutTile first = {};
  if (threadIdx.x == PRODUCER_THREAD) {
    first = first_tile(args, rank);
  } else if (threadIdx.x == PRODUCER_THREAD + WARP_SIZE) {
    init_ring(shared);
  } else if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < MAPS; ++i) prefetch_map(reinterpret_cast<const TensorMap*>(&maps)[i]);
  } else if (threadIdx.x == WARP_SIZE) {
    init_beside_ring(shared);
  }
  __syncwarp();
  return first;
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, 1) ONNXFUSE_CLUSTER
onnxfuse_gemm(const __grid_constant__ OnnxfuseArguments args, const __grid_constant__ onnxfuse::Maps maps) {
  using namespace onnxfuse;
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  const unsigned shared = shared_address(onnxfuse_shared);
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const OutTile first = prepare_block(args, maps, shared, rank);
  if constexpr (CLUSTER > 1) {
    cluster_meet();
  } else {
    __syncthreads();
  }
  // The same in all lanes: the compiler may keep what follows from it in uniform registers.
  const int group = __shfl_sync(0xffffffff, threadIdx.x / WARP_GROUP, 0);
  if (group == ALL_GROUPS) {
    if constexpr (GIVE_REGISTERS) give_registers<PRODUCER_REGISTERS>();
    serve(args, maps, onnxfuse_shared, shared, rank, first);
  } else {
    if constexpr (GIVE_REGISTERS) take_registers<CONSUMER_REGISTERS>();
    wait_for_operands();
    consume(args, maps, onnxfuse_shared, shared, rank, group);
  }
}
