// One block computes out[BLOCK_M, BLOCK_N] = epilogue(acc_0 .. acc_{PARTS-1}) with acc_p = lhs[BLOCK_M, k] *
// rhs_p[k, BLOCK_N] for few rows, as in decoding, where rhs is stored as integers of 4 or 8 bits and a scale for each
// block of k (ir/quantization.py). The time is that of reading rhs once. On sm_80 and later; a row of fp32 is TERMS rows of
// bf16, whose sum it is, as the mma sees it: twice 8 bits are more than TF32 has, three times all of fp32's. Integers of a
// weight are exact in bf16, and its scales are fp32 factors of sums.
//
//   global      integers, scales, zero points of all columns         lhs, BLOCK_M rows        BLOCK_K of each, a step
//                  |  cp.async, as they lie                             |  cp.async             each warp every
//   shared      [stage 0] .. [stage STAGES-1] of this warp           [slot 0] ..                WARPS_K-th step
//                  |  ldmatrix, unpack.cuh                              |
//   registers   whole numbers, all too large by a constant           rows
//                  |  mma.sync
//   registers   block_sums[column][row]                              of one block of k
//                  |  less what the rows make of the constant, times the block's scale
//   registers   acc[column][row]                                     all columns, this warp's share of k
//                  |
//   shared      sums[warp][row][all parts side by side]              a barrier
//                  |  added warp after warp: the same input gives the same bits
//   registers   acc of all parts of one output element in the same thread -> Epilogue -> global
//
// Columns are the M side of the mma, which has 16, and rows of lhs its N side, of 8: with one row, 7 of 8 are wasted
// and not 15 of 16. A warp's own stages need no barrier but its own.
//
// The order of k inside of a product is free. ldmatrix gives lane 4g + t word t of 16 bytes of columns g and g + 8:
// of 4 bits, k 8t .. 8t+7 of 32, of 8 bits, k 4t .. 4t+3 of 16. Those k of row g are neighbours in lhs.
//
// A block computes tiles of BLOCK_N columns of each part one after the other, and loads ahead across them. Rows of lhs
// stay in shared memory where there is one tile of rows and all steps of a warp fit into its LHS_SLOTS. Or they lie in
// registers (lhs.cuh), as they are multiplied: all of a warp's share of k, or the step that is next (STREAMED). Then no
// barrier is for all warps at once: a tile's sums are added behind the next one's first step (sums.cuh). What a block
// reads of rhs at first, it reads before the kernel before it has ended.
//
// Launch and arguments: as the portable kernel's, or a persistent grid. Contract: k and n are those of the weight that it
// was compiled for, whose columns lie side by side; k of lhs is contiguous, and copies of LHS_WIDTH elements are legal
// unless the kernel is CHECKED; integers of a column begin on RHS_BYTES boundaries, scales on SCALES_WIDTH elements, zero
// points on ZERO_POINTS_WIDTH bytes. Loads and outputs are read and written element by element.
#pragma once
#include "quantized_small_m/step.cuh"
#include "quantized_small_m/sums.cuh"

namespace onnxfuse {

// acc += the product of a step of this warp, of those that are kept the `kept_step`-th.
__device__ __forceinline__ void multiply_step(Sums& acc, Ring& ring, KeptRows& kept, const Place& place,
                                              int kept_step) {
  copy_async_wait<STAGES - 2>();
  __syncwarp();  // all lanes' copies have landed, and all have read what is loaded over
  ring.load_ahead(place);
  const Multiplier multiplier(ring.work, ring, place);
  if constexpr (KEPT) {
    kept.settle(kept_step);
    multiplier.run(acc, KeptStep{kept, kept_step});
  } else {
    multiplier.run(acc, SharedRows{ring.lhs_memory(place)});
  }
  ring.advance();
}

// Where sums are added late, one turn more than there are passes, in which the last one's are.
__device__ __forceinline__ void compute_tiles(const OnnxfuseArguments& args, int batch, unsigned char* shared,
                                              Exchange& exchange) {
  constexpr int AT_ONCE = KEPT ? KEPT_STEPS : 1;
  const Work work(args, batch);
  unsigned char* memory = shared + warp() * WARP_BYTES;
  Ring ring(work, memory);
  KeptRows kept(memory + WARP_BYTES - KEPT_BYTES);
  ring.fill();
#pragma unroll 1
  for (int pass = 0; pass < work.passes + LATE; ++pass) {
    const bool exists = !LATE || pass < work.passes;
    Sums acc = {};
#pragma unroll 1
    for (int first = 0; first < STEPS && (exists || first == 0); first += AT_ONCE) {
      if (KEPT && exists) kept.keep(work, pass, first);
#pragma unroll
      for (int step = 0; step < AT_ONCE; ++step) {
        if (exists && first + step < STEPS) multiply_step(acc, ring, kept, {pass, first + step}, step);
        if (LATE && step == 0 && first == 0 && pass > 0) exchange.add(work, pass - 1);
      }
    }
    if constexpr (!LATE) {
      exchange.add_now(acc, work, pass);
    } else if (exists) {
      exchange.leave(acc);
    }
  }
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, onnxfuse::RESIDENT_BLOCKS)
    onnxfuse_gemm(const __grid_constant__ OnnxfuseArguments args) {
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  onnxfuse::let_kernel_behind_start();
  onnxfuse::Exchange exchange(onnxfuse_shared + onnxfuse::WARPS_K * onnxfuse::WARP_BYTES);
  for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) {
    onnxfuse::compute_tiles(args, batch, onnxfuse_shared, exchange);
    exchange.end();
  }
}
