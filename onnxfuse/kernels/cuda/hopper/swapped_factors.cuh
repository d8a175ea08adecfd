// How wgmma reads a stage of `swapped_stage.cuh`: both factors from shared memory.
#pragma once
#include "hopper/swapped_stage.cuh"

namespace onnxfuse {

// acc = weight * lhs over all of the block's k.
__device__ __forceinline__ void run_main_loop(float (&acc)[SUBTILES][ACCUMULATORS], RingPosition& ring,
                                              unsigned shared, int first_row, const OnnxfuseArguments&,
                                              const Work& work) {
  multiply_stages(ring, shared, work.steps, [&](unsigned stage, int step) {
    const unsigned own = stage + ACTIVATION_BYTES + first_row * ROW_BYTES;
    const unsigned long long rows = LHS_DESCRIPTOR | descriptor_address(own);
    const unsigned long long columns = K_CONTIGUOUS_DESCRIPTOR | descriptor_address(stage);
    multiply_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / STEP_K; ++i) {
      static_for<0, SUBTILES * PARTS>([&](auto unit) {
        constexpr int SUBTILE = decltype(unit)::value / PARTS, PART = decltype(unit)::value % PARTS;
        constexpr int OFFSET = (PART * PART_BYTES + SUBTILE * GROUP_WGMMA_ROWS * ROW_BYTES) / 16;
        multiply<PART * BLOCK_N / 2, BLOCK_N>(acc[SUBTILE], rows + OFFSET + i * LHS_STEP,
                                              columns + i * K_CONTIGUOUS_STEP, step + i > 0);
      });
    }
  });
}

}  // namespace onnxfuse
