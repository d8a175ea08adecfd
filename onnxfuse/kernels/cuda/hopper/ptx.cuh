// The PTX instructions that only sm_90a has, one function each; the wgmma of the kernel's own width is generated. A
// shared-memory address is the 32-bit offset that the instructions take.
#pragma once
#include "common/cluster_ptx.cuh"
#include "common/ptx.cuh"

namespace onnxfuse {

constexpr int WARP_GROUP = 128;  // threads of one wgmma

// CUtensorMap of cuda.h, which NVRTC does not have. TMA wants it in constant or parameter memory.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// Arrives twice: now, and when all asynchronous copies that this thread has begun are done.
__device__ __forceinline__ void barrier_arrive_copied(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
  barrier_arrive(barrier);
}

// ---- TMA: a box of a tensor map <-> shared memory; elements outside of the tensor are read as zero and not written. x
// is the contiguous axis, z the batch, which in a load of rank 4 lies in runs: u is the run's number.

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Whether this lane is the one that acts for its warp, all of which is here; it is the same one each time. Where a lane's
// number says so, ptxas loops over lanes that may have other operands, around each instruction of TMA.
__device__ __forceinline__ bool is_elected() {
  unsigned chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
  return chosen != 0;
}

__device__ __forceinline__ void load_box(unsigned shared, const TensorMap& map, unsigned barrier, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

__device__ __forceinline__ void load_box(unsigned shared, const TensorMap& map, unsigned barrier, int x, int y, int z,
                                         int u) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u) : "memory");
}

// Into each block of the cluster that has its bit in `blocks`, at the same offsets; its own barrier counts the bytes.
__device__ __forceinline__ void load_box_to_all(unsigned shared, const TensorMap& map, unsigned barrier, int x, int y,
                                                int z, unsigned short blocks) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4, %5}], [%2], %6;"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
                   : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, unsigned shared, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"(&map), "r"(shared), "r"(x), "r"(y), "r"(z) : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, unsigned shared, int x, int y, int z, int u, int v) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
               ::"l"(&map), "r"(shared), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v) : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until the shared memory of all but this thread's PENDING newest groups of stores has been read.
template <int PENDING>
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// What this thread wrote into shared memory becomes visible to TMA.
__device__ __forceinline__ void shared_to_tma_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- wgmma

// Orders the register accesses before it with the wgmma that follow.
__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 0;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements into shared memory; lanes 8i .. 8i+7 give the row addresses of matrix i.
__device__ __forceinline__ void store_matrices(unsigned shared, const unsigned (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared), "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3]) : "memory");
}

// The same, each matrix transposed: a lane's address is that of a column.
__device__ __forceinline__ void store_matrices_transposed(unsigned shared, const unsigned (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared), "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3]) : "memory");
}

// ---- integers in registers

template <int WORDS>
__device__ __forceinline__ void load_words(unsigned (&words)[WORDS], unsigned shared) {
  static_assert(WORDS == 4 || WORDS == 2 || WORDS == 1, "no such load");
  if constexpr (WORDS == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(shared));
  } else if constexpr (WORDS == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(shared));
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(shared));
  }
}

// One of a pair's halves twice: what reads it takes the half itself, and nothing is moved.
template <typename T>
__device__ __forceinline__ unsigned twice(T, unsigned pair, int upper) {
  unsigned both;
  if (upper) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(both) : "r"(pair));
  } else {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(both) : "r"(pair));
  }
  return both;
}

// (numbers - zeros) * scales, each operation rounded to the type.
__device__ __forceinline__ unsigned scaled_pair(__half, unsigned numbers, unsigned zeros, unsigned scales) {
  unsigned scaled;
  asm("{ .reg .b32 d; sub.rn.f16x2 d, %1, %2; mul.rn.f16x2 %0, d, %3; }"
      : "=r"(scaled) : "r"(numbers), "r"(zeros), "r"(scales));
  return scaled;
}
__device__ __forceinline__ unsigned scaled_pair(__nv_bfloat16, unsigned numbers, unsigned zeros, unsigned scales) {
  unsigned scaled;
  asm("{ .reg .b32 d; sub.rn.bf16x2 d, %1, %2; mul.rn.bf16x2 %0, d, %3; }"
      : "=r"(scaled) : "r"(numbers), "r"(zeros), "r"(scales));
  return scaled;
}

// ---- warp groups

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Named barriers; 0 is __syncthreads.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace onnxfuse
