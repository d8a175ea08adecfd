// The PTX instructions of the blocks of a cluster (sm_90 and later), one function each. A shared-memory address is the
// 32-bit offset that the instructions take; shared memory of the cluster's other blocks is reached through `peer`.
#pragma once
#include "common/ptx.cuh"

namespace onnxfuse {

// ---- mbarrier: a phase ends when all arrivals and all announced bytes are in.

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the init: visible to the other block of the cluster and to TMA.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier with the same offset in block `rank` of the cluster, which may be this block.
__device__ __forceinline__ void barrier_arrive_peer(unsigned barrier, int rank) {
  asm volatile("{ .reg .b32 peer; mapa.shared::cluster.u32 peer, %0, %1; "
               "mbarrier.arrive.shared::cluster.b64 _, [peer]; }"
               ::"r"(barrier), "r"(rank) : "memory");
}

// try_wait sleeps for a while on its own, so the loop is seldom run twice.
__device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
  unsigned done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

// ---- clusters

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All blocks of the cluster have come as far as the arrival, by whole warps, when the wait ends. What they wrote is not
// ordered by it, which would cost a fence of all memory; barriers that were initialized before barrier_init_fence() can
// be used.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_meet() {
  cluster_arrive();
  cluster_wait();
}

// The address of block `rank` at which it has what this block has at `shared`.
__device__ __forceinline__ unsigned peer_address(unsigned shared, int rank) {
  unsigned peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(shared), "r"(rank));
  return peer;
}

// 16 bytes into another block's shared memory, asynchronously; the barrier, of the same block, counts them. Where a fence
// before an arrival would wait for all memory, a thread that waits for the barrier sees them.
__device__ __forceinline__ void store_peer(unsigned peer, float4 values, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(peer), "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(barrier) : "memory");
}

// Likewise 8 bytes.
__device__ __forceinline__ void store_peer(unsigned peer, float2 values, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               ::"r"(peer), "f"(values.x), "f"(values.y), "r"(barrier) : "memory");
}

// ---- registers

// Keeps the compiler from moving reads of an accumulator to before this place, and what it computes of it to behind it.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ __forceinline__ void pin(int& value) { asm volatile("" : "+r"(value)::"memory"); }

}  // namespace onnxfuse
