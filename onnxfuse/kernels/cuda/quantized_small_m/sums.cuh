// The sums of all warps: stored side by side, added, and given to the epilogue.
#pragma once
#include "common/epilogue_element.cuh"
#include "quantized_small_m/step.cuh"

namespace onnxfuse {

// Of spread rows, the sums of a row's own lanes together.
__device__ __forceinline__ float gathered(float first, float second) {
  float sum = first + second;
#pragma unroll
  for (int lanes = 1; lanes < SPREAD / 2; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  return sum;
}

__device__ __forceinline__ void store_sums(float* sums, const Sums& acc) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
#pragma unroll
      for (int e = 0; e < 4; e += SPREAD > 1 ? 2 : 1) {
        const GroupSums& own = acc[f];
        const float sum = SPREAD > 1 ? gathered(own[group][e], own[group][e | 1]) : own[group][e];
        const int row = group * MMA_ROWS + (lane() % 4 * 2 + e % 2) / SPREAD;
        const int column = f * FRAGMENT_COLUMNS + e / 2 * 8 + lane_group();
        const bool first = SPREAD == 1 || lane_block() == 0;
        if (first && (TERM_ROWS % MMA_ROWS == 0 || row < TERM_ROWS)) sums[row * SUMS_PITCH + column] = sum;
      }
    }
  }
}

// Adds the sums of all warps, always in the same order, and stores what the epilogue makes of them. Another warp begins
// in every pass, so that none is behind the others for long.
__device__ __forceinline__ void finish(const float* sums, const Work& work, unsigned pass) {
  const Tile tile = work.tile(pass);
  const int rows = work.rows(tile);
  const int thread = (threadIdx.x + THREADS - pass % WARPS_K * WARP_SIZE) % THREADS;
#pragma unroll 1
  for (int element = thread; element < rows * BLOCK_N; element += THREADS) {
    const int row = element / BLOCK_N, column = element % BLOCK_N;
    if (tile.column + column >= work.args.n) continue;
    const Operands operands(work.args, work.batch, tile.row + row, tile.column + column);
    float acc[PARTS] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS_K; ++warp) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int term = 0; term < TERMS; ++term) {
          acc[part] += sums[warp * WARP_SUMS + (row * TERMS + term) * SUMS_PITCH + part * BLOCK_N + column];
        }
      }
    }
    store_outputs(acc, operands, work.args, work.batch, tile.row + row, tile.column + column);
  }
}

// Where warps leave their sums, one tile after the other, for all of them to add. Where they are added LATE, none waits
// for the others: a tile's sums are added behind the first step of the next one.
struct Exchange {
  float* memory;
  unsigned barriers;
  unsigned tiles = 0;  // whose sums this warp has left

  // All threads together.
  explicit __device__ __forceinline__ Exchange(unsigned char* shared)
      : memory(reinterpret_cast<float*>(shared)), barriers(shared_address(shared + SUMS_BYTES)) {
    if constexpr (!LATE) return;
    if (threadIdx.x == 0) {
      for (int i = 0; i < BARRIERS; ++i) mbarrier_init(barriers + i * BARRIER_BYTES, WARPS_K);
    }
    __syncthreads();
  }

  __device__ __forceinline__ float* buffer(unsigned tile) const { return memory + tile % SUM_BUFFERS * SUMS; }
  // Complete when all sums of a tile are there; and, where it is the only buffer, when all of them are added. Of two,
  // one is free when all have left their sums in the other.
  __device__ __forceinline__ unsigned full(unsigned tile) const {
    return barriers + tile % SUM_BUFFERS * BARRIER_BYTES;
  }
  __device__ __forceinline__ unsigned empty() const { return barriers + BARRIER_BYTES; }

  static __device__ __forceinline__ void arrive(unsigned barrier) {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void leave(const Sums& acc) {
    if (SUM_BUFFERS == 1 && tiles > 0) mbarrier_wait(empty(), (tiles - 1) % 2);
    store_sums(buffer(tiles) + warp() * WARP_SUMS, acc);
    arrive(full(tiles));
    ++tiles;
  }
  // Stores and adds at once, all warps together.
  __device__ __forceinline__ void add_now(const Sums& acc, const Work& work, int pass) const {
    float* own = memory + pass % SUM_BUFFERS * SUMS;
    store_sums(own + warp() * WARP_SUMS, acc);
    __syncthreads();
    finish(own, work, pass);
    if (SUM_BUFFERS == 1) __syncthreads();
  }
  // Of a product: the next one's loads overwrite what other lanes may still read, or its sums what other warps may.
  static __device__ __forceinline__ void end() {
    if constexpr (LATE) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  // The newest tile's, which was that of a pass.
  __device__ __forceinline__ void add(const Work& work, int pass) const {
    const unsigned tile = tiles - 1;
    mbarrier_wait(full(tile), tile / SUM_BUFFERS % 2);
    finish(buffer(tile), work, pass);
    if (SUM_BUFFERS == 1) arrive(empty());
  }
};

}  // namespace onnxfuse
