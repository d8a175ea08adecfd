// The shares of a cluster's blocks (sm_90 and later): one warp of each has sums of its own keys of the same 16 rows; those
// of the others go through distributed shared memory to that of the first block, which adds them.
#pragma once
#include "common/cluster_ptx.cuh"
#include "common/online_softmax.cuh"

namespace onnxfuse {

template <int COUNT>
__device__ __forceinline__ void pin_all(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) pin(values[i]);
}

// Of so many blocks; the shares lie at an offset of the first one's shared memory, barriers at one of each.
template <int BLOCKS, int SHARES, int BARRIERS>
struct ClusterShares {
  static constexpr int BYTES = (BLOCKS - 1) * SHARE_BYTES;
  static constexpr int FULL = BARRIERS;  // of all other blocks of the cluster
  static constexpr int READ = FULL + 8;  // of this block, by the first one
  static constexpr int BARRIER_BYTES = 16;

  const unsigned char* memory;
  unsigned shared;
  int tiles = 0;  // that were shared so far
  bool has_met = false;

  // By one thread; then barrier_init_fence(), and the blocks meet before anything is sent.
  static __device__ __forceinline__ void init_barriers(unsigned shared) {
    barrier_init(shared + FULL, 1);
    barrier_init(shared + READ, 1);
  }

  // All threads, after cluster_arrive(): what the first tile takes hides the wait.
  __device__ __forceinline__ void meet() {
    if (!has_met) cluster_wait();
    has_met = true;
  }

  // What one warp found -> the first block of the cluster, when that has read what it was sent of the tiles before.
  __device__ __forceinline__ void send(const float (&sums)[SUMS], const Softmax& softmax, int before) const {
    const unsigned own = SHARES + (cluster_rank() - 1) * SHARE_BYTES + lane() * 16;
    const unsigned target = peer_address(shared + own, 0), full = peer_address(shared + FULL, 0);
    if (before > 0) barrier_wait(shared + READ, (before - 1) % 2);
    for_each_four_of_share(sums, softmax, [&](int number, const Packed<float, 4>& four) {
      const float4 values = {four.values[0], four.values[1], four.values[2], four.values[3]};
      store_peer(target + number * SHARE_PITCH, values, full);
    });
  }

  // Adds what the cluster's other blocks found, always in the same order.
  __device__ __forceinline__ void add(float (&sums)[SUMS], Softmax& softmax, int before) const {
    if (lane() == 0) barrier_arrive_expect(shared + FULL, BYTES);
    barrier_wait(shared + FULL, before % 2);
#pragma unroll 1
    for (int share = 0; share < BLOCKS - 1; ++share) add_share(sums, softmax, memory + SHARES + share * SHARE_BYTES);
    pin_all(sums);  // they have been read: the next ones overwrite them
    __syncwarp();
    if (lane() > 0 && lane() < BLOCKS) barrier_arrive_peer(shared + READ, lane());
  }

  // Whether this warp has the whole of its rows now.
  __device__ __forceinline__ bool gather(float (&sums)[SUMS], Softmax& softmax) {
    const int before = tiles++;
    if (cluster_rank() > 0) {
      send(sums, softmax, before);
      return false;
    }
    add(sums, softmax, before);
    return true;
  }

  // A block that has ended has no shared memory: not before the first one has read its share.
  __device__ __forceinline__ void await_read() const {
    if (cluster_rank() == 0 || tiles == 0) return;
    barrier_wait(shared + READ, (tiles - 1) % 2);
  }
};

}  // namespace onnxfuse
