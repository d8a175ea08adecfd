// One block computes out[BLOCK_M, BLOCK_N] = epilogue(acc_0 .. acc_{PARTS-1}) with acc_p = lhs[BLOCK_M, k] *
// rhs_p[k, BLOCK_N]. Runs on sm_80 and later, with operands from a ring of stages in shared memory: mma.sync on the
// tensor cores; for exact fp32, three of them on the halves of each factor, or FFMA.
//
//   global    tile t+3        tile t+4                 copies run STAGES - 1 tiles ahead, one cp.async group a tile
//                |  cp.async
//   ring      [stage 0][stage 1][stage 2][stage 3]     a stage: lhs[BLOCK_M, BLOCK_K], then the rhs tile of every part
//                          |  ldmatrix
//   registers   fragments of step s+1 | step s         loaded one step ahead of the multiplication, if two sets fit
//                                          |  mma.sync
//   registers   acc[part][i][j][4]                     all parts of one output element in the same thread
//                          |  epilogue.cuh             staged through the ring's memory, which is free by then
//   global    outs
//
// One barrier a tile does two duties: behind it the next stage is complete for every thread, and the stage that was
// read before it is free to be overwritten.
//
// Launch: grid (ceil(m / BLOCK_M) * ceil(n / BLOCK_N), 1, min(batch, 65535)), block THREADS, dynamic shared memory
// SHARED_BYTES.
//
// Contract: LHS_WIDTH and RHS_WIDTH divide the extents of lhs and rhs along their contiguous axes, and the WIDTH of a
// load or output divides n; all of them divide the strides and the pointers. So an access lies either inside or
// outside. A kernel that is CHECKED looks for itself, and treats a tensor for which that does not hold as one of width
// 1. Of lhs and rhs, 16-bit elements of width 1 pass through registers on their way to the ring (ShiftedCopy,
// PieceCopy where the kernel is CHECKED).
//
// The generated text before this file defines Element, MATH, LHS_ and RHS_K_CONTIGUOUS, PARTS, the BLOCK_, WARPS_,
// STAGES and _WIDTH constants, the tables Load<I> and Out<I>, and the struct Epilogue.
#pragma once
#include "common/arguments.cuh"
#include "common/ptx.cuh"
#include "common/addressing.cuh"
#include "portable/epilogue.cuh"
#include "portable/fragments.cuh"
#include "portable/operand_copy.cuh"
#include "portable/shared_tile.cuh"
#include "portable/split_fp32.cuh"

namespace onnxfuse {

// Rows of output tiles whose blocks run together: they share the columns of rhs and the rows of lhs in L2.
constexpr int GROUP_ROWS = 8;

constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int ALL_STAGING_BYTES = STAGING_BYTES * WARPS_M * WARPS_N;

static_assert(BLOCK_M % (WARPS_M * FRAGMENT_ROWS) == 0, "a warp owns whole fragments");
static_assert(BLOCK_N % (WARPS_N * 2 * FRAGMENT_COLUMNS) == 0, "one ldmatrix brings the rhs of two fragments");
static_assert(STAGES >= 2, "a pipeline has two stages at least");
static_assert(FRAGMENTS_M % SLABS == 0, "passes of the epilogue are equal");
static_assert(SHARED_BYTES == VECTORS_OFFSET + VECTORS_BYTES, "footprint and kernel agree");
static_assert(VECTORS_OFFSET == (RING_BYTES > ALL_STAGING_BYTES ? RING_BYTES : ALL_STAGING_BYTES),
              "footprint and kernel agree");

// The output tile of a block: GROUP_ROWS tiles down, then one to the right, and so on; then the next group of rows.
struct BlockTile {
  int row;
  int column;

  __device__ __forceinline__ BlockTile(int m, int n) {
    const int tiles_m = (m - 1) / BLOCK_M + 1;
    const int tiles_n = (n - 1) / BLOCK_N + 1;
    const int block = blockIdx.x;
    const int group = block / (GROUP_ROWS * tiles_n);
    const int in_group = block % (GROUP_ROWS * tiles_n);
    const int height = min(tiles_m - group * GROUP_ROWS, GROUP_ROWS);
    row = (group * GROUP_ROWS + in_group % height) * BLOCK_M;
    column = in_group / height * BLOCK_N;
  }
};

// What is hardly ever run is compiled in as little code as possible.
constexpr int STAGES_UNROLLED = CHECKED ? 1 : STAGES - 1;

// Everything that fills the ring: lhs and the rhs of every part, advancing along k.
struct Producer {
  RingCopy<LhsTile, LHS_WIDTH, LHS_OUTER_COLUMNS> lhs;
  RingCopy<RhsTile, RHS_WIDTH, false> rhs[PARTS];
  int rows;     // of lhs, from the block's first on
  int columns;  // of rhs
  int depth;    // of k, from the next tile on
  const OnnxfuseArguments& arguments;

  __device__ __forceinline__ Producer(const OnnxfuseArguments& args, const BlockTile& block, int batch)
      : rows(args.m - block.row), columns(args.n - block.column), depth(args.k), arguments(args) {
    lhs.start(factor_pointer<Element, LHS_OUTER_BATCH>(args.lhs, args.lhs_outer, batch, block.row, 0),
              LHS_K_CONTIGUOUS ? args.lhs.row_stride : args.lhs.column_stride, is_lhs_legal(args), &args.lhs_outer);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const OnnxfuseTensor& tensor = args.rhs[part];
      rhs[part].start(factor_pointer<Element, RHS_OUTER_BATCH>(tensor, args.rhs_outer, batch, 0, block.column),
                      RHS_K_CONTIGUOUS ? tensor.column_stride : tensor.row_stride, is_rhs_legal(args, part));
    }
  }

  // Fills all stages but one.
  __device__ __forceinline__ void start(unsigned ring) {
#pragma unroll STAGES_UNROLLED
    for (int stage = 0; stage < STAGES - 1; ++stage) issue(ring + stage * STAGE_BYTES);
  }

  __device__ __forceinline__ void issue(unsigned stage) {
    if (depth > 0) {
      lhs.issue(stage, LHS_K_CONTIGUOUS ? rows : depth, LHS_K_CONTIGUOUS ? depth : rows, lhs_span(arguments));
      lhs.advance(LHS_K_CONTIGUOUS ? BLOCK_K : BLOCK_K * lhs.row_stride);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const unsigned tile = stage + LhsTile::BYTES + part * RhsTile::BYTES;
        rhs[part].issue(tile, RHS_K_CONTIGUOUS ? columns : depth, RHS_K_CONTIGUOUS ? depth : columns,
                        rhs_span(arguments, part));
        rhs[part].advance(RHS_K_CONTIGUOUS ? BLOCK_K : BLOCK_K * rhs[part].row_stride);
      }
      depth -= BLOCK_K;
    }
    copy_async_commit();  // also where nothing is left to copy: the pipeline counts groups
  }
};

__device__ __forceinline__ int next_stage(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }
__device__ __forceinline__ int previous_stage(int stage) { return stage == 0 ? STAGES - 1 : stage - 1; }

// The next fragments are wanted before the next tile. But narrow copies hold registers, which only one set leaves free.
constexpr bool COPIES_FIRST = CHECKED || LHS_WIDTH < CHUNK || RHS_WIDTH < CHUNK;

// Exact fp32 sums each k tile by itself and then the tiles: a chain of k additions would lose log2(k) / 2 bits and
// more.
constexpr bool TWO_LEVELS = MATH == Math::fp32 || MATH == Math::split_fp32;

__device__ __forceinline__ void clear(Accumulators& acc) {
  for_each_fragment([&](int part, int i, int j) {
#pragma unroll
    for (float& value : acc[part][i][j]) value = 0.0f;
  });
}

// acc += sum, and sum = 0.
__device__ __forceinline__ void fold(Accumulators& acc, Accumulators& sum) {
  for_each_accumulator([&](int part, int i, int j, int e) { acc[part][i][j][e] += sum[part][i][j][e]; });
  clear(sum);
}

__device__ __forceinline__ bool are_far_from_infinity(const Accumulators& acc) {
  bool far = true;
  for_each_fragment([&](int part, int i, int j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) far = far && is_far_from_infinity(acc[part][i][j][e]);
  });
  return far;
}

// acc = lhs * rhs over all of k.
template <typename Fragments>
__device__ __forceinline__ void run_main_loop(Accumulators& acc, Producer& producer, unsigned ring, int k,
                                              int warp_row, int warp_column) {
  constexpr int SETS = Fragments::SETS, STEPS = BLOCK_K / Fragments::STEP_K;
  constexpr int UNROLL = SETS == 1 ? 1 : STEPS;  // from other steps, the compiler would draw loads forward and spill
  static_assert(BLOCK_K % (2 * Fragments::STEP_K) == 0, "two sets of fragments take turns");
  Accumulators tile_sum = {};
  clear(acc);
  Fragments fragments[SETS];
  int read = 0;  // the stage whose steps are multiplied; the next copies fill the one before
  copy_async_wait<STAGES - 2>();
  __syncthreads();
  if (SETS == 2) fragments[0].load(ring, warp_row, warp_column, 0);
  for (int remaining = k; remaining > 0; remaining -= BLOCK_K) {
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
      if (SETS == 1) {
        if (step == 0) producer.issue(ring + previous_stage(read) * STAGE_BYTES);
        fragments[0].load(ring + read * STAGE_BYTES, warp_row, warp_column, step);
      }
      if (step == STEPS - 1) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        read = next_stage(read);
      }
      if (SETS == 2) {
        if (step == 0 && COPIES_FIRST) producer.issue(ring + previous_stage(read) * STAGE_BYTES);
        fragments[(step + 1) % SETS].load(ring + read * STAGE_BYTES, warp_row, warp_column, (step + 1) % STEPS);
        if (step == 0 && !COPIES_FIRST) producer.issue(ring + previous_stage(read) * STAGE_BYTES);
      }
      fragments[step % SETS].multiply(TWO_LEVELS ? tile_sum : acc);
    }
    if (TWO_LEVELS) fold(acc, tile_sum);
  }
  copy_async_wait<0>();
  __syncthreads();  // the ring is free: no copy is under way, and every warp has read its last fragment
}

__device__ __forceinline__ void compute_tile(const OnnxfuseArguments& args, int batch, unsigned char* shared) {
  const BlockTile block(args.m, args.n);
  const int warp = threadIdx.x / WARP_SIZE;
  const int warp_row = warp / WARPS_N * WARP_ROWS;
  const int warp_column = warp % WARPS_N * WARP_COLUMNS;
  const unsigned ring = shared_address(shared);

  Producer producer(args, block, batch);
  producer.start(ring);
  stage_vectors(shared + VECTORS_OFFSET, args, batch, block.row, block.column);

  Accumulators acc;
  run_main_loop<FragmentsOf<MATH>::Type>(acc, producer, ring, args.k, warp_row, warp_column);
  if constexpr (MATH == Math::split_fp32) {
    if (__syncthreads_or(!are_far_from_infinity(acc))) {
      Producer again(args, block, batch);
      again.start(ring);
      run_main_loop<ScalarFragments>(acc, again, ring, args.k, warp_row, warp_column);
    }
  }

  const WarpTile tile{batch, block.row + warp_row, block.column + warp_column, args.m - block.row - warp_row,
                      args.n - block.column - warp_column};
  run_epilogue(acc, args, tile, shared + VECTORS_OFFSET, shared + warp * STAGING_BYTES);
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, 1)
    onnxfuse_gemm(const __grid_constant__ OnnxfuseArguments args) {
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  onnxfuse::wait_for_kernel_before();
  onnxfuse::let_kernel_behind_start();
  for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) {
    onnxfuse::compute_tile(args, batch, onnxfuse_shared);
    __syncthreads();  // the next product's copies may overwrite what the epilogue still read
  }
}
