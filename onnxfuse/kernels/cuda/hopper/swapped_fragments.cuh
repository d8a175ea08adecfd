// How wgmma reads a stage of `swapped_stage.cuh` whose weight has elements of 32 bits with n contiguous: those it takes from
// shared memory have k contiguous, but the M side may come from registers, which threads fill as they like. While the tensor
// cores multiply one chunk of k, the threads read the next.
//
//   a thread's fragment   of 8 k: rows g and g + 8 of k = t and t + 4, with t the lane in its quad and g the quad
//   banks                 16 rows of a k are half of a swizzled span, so the quads of one half of the warp read k = t while
//                         those of the other read k = t + 4, and then the other way round: all 32 banks, each once
#pragma once
#include "hopper/swapped_stage.cuh"

namespace onnxfuse {

constexpr int CHUNK_STEPS = 2;                          // wgmma along k of a chunk
constexpr int CHUNKS = BLOCK_K / (CHUNK_STEPS * STEP_K);
constexpr int UNITS = SUBTILES * PARTS;                 // wgmma of one k of a group
constexpr int SPAN_BYTES = BLOCK_K * ROW_BYTES;         // a span of rows and all k of the stage

static_assert(!LHS_K_CONTIGUOUS && sizeof(Element) == 4 && STEP_K == 8, "a register holds one element");

struct Fragments {
  unsigned words[CHUNK_STEPS][UNITS][4];
};

// Where a thread's elements lie in a part of the weight: of rows g and g + 8, those of the k that it reads first and second.
struct OwnPlaces {
  unsigned places[2][2];
  bool turned;  // k = t + 4 comes first

  __device__ __forceinline__ explicit OwnPlaces(int first_row) {
    const int lane = threadIdx.x % WARP_SIZE, quad = lane / 4;
    turned = quad >= 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2, k = lane % 4 + (i % 2 != turned) * 4;
      const int row = first_row + threadIdx.x % WARP_GROUP / WARP_SIZE * WARP_ROWS + quad + half * 8;
      const int chunk = row % LHS_ATOM / 4 ^ k;
      places[half][i % 2] = row / LHS_ATOM * SPAN_BYTES + k * ROW_BYTES + chunk * 16 + row % 4 * 4;
    }
  }
};

// A chunk of a thread's rows, of the weight's first part from `weight` on.
template <int CHUNK>
__device__ __forceinline__ void read_chunk(Fragments& target, unsigned weight, const OwnPlaces& own) {
#pragma unroll
  for (int step = 0; step < CHUNK_STEPS; ++step) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      const int part = unit % PARTS * PART_BYTES, rows = unit / PARTS * GROUP_WGMMA_ROWS * ROW_BYTES;
      const unsigned first = weight + part + rows + (CHUNK * CHUNK_STEPS + step) * STEP_K * ROW_BYTES;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned one = load_shared_word(first + own.places[half][0]);
        const unsigned other = load_shared_word(first + own.places[half][1]);
        target.words[step][unit][half] = own.turned ? other : one;
        target.words[step][unit][2 + half] = own.turned ? one : other;
      }
    }
  }
}

// acc += weight * lhs, of a chunk.
template <int CHUNK>
__device__ __forceinline__ void multiply_chunk(float (&acc)[SUBTILES][ACCUMULATORS], const Fragments& fragments,
                                               unsigned stage, int accumulate) {
#pragma unroll
  for (int step = 0; step < CHUNK_STEPS; ++step) {
    const int number = CHUNK * CHUNK_STEPS + step;
    const unsigned long long columns = (K_CONTIGUOUS_DESCRIPTOR | descriptor_address(stage)) + number * K_CONTIGUOUS_STEP;
    static_for<0, UNITS>([&](auto unit) {
      constexpr int UNIT = decltype(unit)::value;
      multiply<UNIT % PARTS * BLOCK_N / 2, BLOCK_N>(acc[UNIT / PARTS], fragments.words[step][UNIT], columns,
                                                   accumulate | number);
    });
  }
  multiply_commit();
}

// acc = weight * lhs over all of the block's k.
__device__ __forceinline__ void run_main_loop(float (&acc)[SUBTILES][ACCUMULATORS], RingPosition& ring,
                                              unsigned shared, int first_row, const OnnxfuseArguments&,
                                              const Work& work) {
  const OwnPlaces own(first_row);
  const bool tells = tells_block();
  Fragments fragments[2];
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    barrier_wait(shared + FULL_OFFSET + ring.stage * 8, ring.parity);
    const unsigned stage = shared + ring.stage * STAGE_BYTES;
    static_for<0, CHUNKS>([&](auto chunk) {
      constexpr int CHUNK = decltype(chunk)::value;
      read_chunk<CHUNK>(fragments[CHUNK % 2], stage + ACTIVATION_BYTES, own);
      multiply_fence();
      multiply_chunk<CHUNK>(acc, fragments[CHUNK % 2], stage, step);
      multiply_wait<1>();
      if (CHUNK == 0 && step > 0) release(shared, previous, tells);
    });
    previous = ring.stage;
    ring.next();
  }
}

}  // namespace onnxfuse
