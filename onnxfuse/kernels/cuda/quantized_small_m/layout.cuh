// What a block of the kernel for few rows of quantized computes, and where it lies in shared memory.
#pragma once
#include "common/arguments.cuh"
#include "common/ptx.cuh"
#include "common/addressing.cuh"
#include "common/checked_access.cuh"
#include "quantized_small_m/unpack.cuh"

namespace onnxfuse {

constexpr int WARP_SIZE = 32;
constexpr int MMA_ROWS = 8;
constexpr int FRAGMENT_COLUMNS = 16;
constexpr int WIDTH = PARTS * BLOCK_N;  // columns of a pass
constexpr int FRAGMENTS = WIDTH / FRAGMENT_COLUMNS;
constexpr int TERM_ROWS = BLOCK_M * TERMS;  // of the mma: neighbours are the terms of one row
constexpr int ROW_GROUPS = (TERM_ROWS - 1) / MMA_ROWS + 1;

constexpr int PIECE_BYTES = 16;  // of a column: a row of ldmatrix
constexpr int PIECE_K = 8 * PIECE_BYTES / QUANTIZED_BITS;
constexpr int STEP_BYTES = BLOCK_K * QUANTIZED_BITS / 8;  // of a column
constexpr int PIECES = STEP_BYTES / PIECE_BYTES;
constexpr int PIECE_PAIRS = WORD_PAIRS;             // of lhs, in one lane
constexpr int MULTIPLICATIONS = PIECE_PAIRS / 2;    // of one piece
constexpr int BLOCKS = BLOCK_K > QUANTIZED_BLOCK ? BLOCK_K / QUANTIZED_BLOCK : 1;  // of k, in a step
constexpr int BLOCK_PIECES = PIECES > BLOCKS ? PIECES / BLOCKS : 1;
constexpr int SIDES = PIECE_K > QUANTIZED_BLOCK ? PIECE_K / QUANTIZED_BLOCK : 1;  // blocks of one piece

// Rows of lhs that are kept in registers, those of KEPT_STEPS steps, may be spread: each lies in SPREAD of the mma's
// columns, zero in all but one of as many blocks, so that the sums of all of these blocks are scaled at once.
constexpr bool KEPT = KEPT_STEPS > 0;
constexpr int SPREAD_K = SPREAD * QUANTIZED_BLOCK;
constexpr int SPREADS = BLOCKS / SPREAD;  // in a step
constexpr int KEPT_PIECES = SPREADS * BLOCK_PIECES;

// Sums begin with what they will be too large by, where it is known by then; otherwise it is added at last.
constexpr bool ADDS_EXCESS = HAS_EXCESS && PIECE_K < QUANTIZED_BLOCK && !KEPT;
constexpr bool SCALES_AHEAD = ROW_GROUPS == 1;  // with more sums, registers are short

// k and n of the weight are known when the kernel is compiled, so where a step's bytes begin is a constant, and so is
// most of what would be asked for every copy. All warps have as many steps; what lies beyond k is zero.
constexpr int STEPS = (WEIGHT_DEPTH - 1) / (BLOCK_K * WARPS_K) + 1;
constexpr bool WHOLE_DEPTH = WEIGHT_DEPTH % (BLOCK_K * WARPS_K) == 0;
constexpr bool WHOLE_COLUMNS = WEIGHT_COLUMNS % BLOCK_N == 0;
constexpr int DEPTH_BLOCKS = (WEIGHT_DEPTH - 1) / QUANTIZED_BLOCK + 1;
constexpr int COLUMN_BYTES = DEPTH_BLOCKS * (QUANTIZED_BLOCK * QUANTIZED_BITS / 8);
constexpr int COLUMN_SCALES_BYTES = DEPTH_BLOCKS * int(sizeof(Element));
constexpr int COLUMN_ZEROS_BYTES = (DEPTH_BLOCKS * QUANTIZED_BITS + 7) / 8;

constexpr int least(int a, int b) { return a < b ? a : b; }

__device__ __forceinline__ const unsigned char* column_at(const void* first, int column, int pitch) {
  return static_cast<const unsigned char*>(first) + static_cast<long long>(column) * pitch;
}

constexpr int in_pieces(int bytes) { return (bytes + 15) / 16 * 16; }

// What each column has beside its integers in a step, BYTES that begin on boundaries of ALIGNMENT bytes: copied as they
// lie or, where cp.async moves no so little, as the whole words that they lie in.
template <int BYTES, int ALIGNMENT>
struct Beside {
  static constexpr int ALIGNED = least(16, least(BYTES, ALIGNMENT));
  static constexpr bool IN_WORDS = ALIGNED < 4;
  static constexpr int COPY = IN_WORDS ? 4 : ALIGNED;
  static constexpr int COPIES = IN_WORDS ? (4 - ALIGNED + BYTES + 3) / 4 : BYTES / COPY;
  static constexpr int PITCH = COPIES * COPY;
  static constexpr int OF_LANE = (WIDTH * COPIES - 1) / WARP_SIZE + 1;

  const unsigned char* columns[OF_LANE];  // where each begins

  static __device__ __forceinline__ int copy_of(int i) { return threadIdx.x % WARP_SIZE + i * WARP_SIZE; }

  // start(i) is where what belongs to column i of a pass begins.
  template <typename Start>
  __device__ __forceinline__ void go_to(const Start& start) {
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) columns[i] = start(least(copy_of(i) / COPIES, WIDTH - 1));
  }

  // The bytes from `first` on, of which VALID exist in a column.
  template <int VALID>
  __device__ __forceinline__ void copy(unsigned shared, int first) const {
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
      const int index = copy_of(i);
      if (WIDTH * COPIES % WARP_SIZE != 0 && index >= WIDTH * COPIES) break;
      const int along = first + index % COPIES * COPY;
      const unsigned char* from = columns[i] + along;
      if constexpr (IN_WORDS) {
        const int before = reinterpret_cast<unsigned long long>(from) % COPY;
        copy_async_part(shared + index * COPY, from - before, max(min(VALID - along + before, COPY), 0));
      } else {
        copy_async<COPY>(shared + index * COPY, from, WHOLE_DEPTH || along < VALID);
      }
    }
  }

  // Where a column's bytes lie in shared memory, if they begin at an address.
  static __device__ __forceinline__ int offset(int column, unsigned address) {
    return column * PITCH + (IN_WORDS ? address % COPY : 0);
  }
};

using Scales = Beside<BLOCKS * int(sizeof(Element)), SCALES_WIDTH * int(sizeof(Element))>;
constexpr int ZERO_BYTES = BLOCKS * QUANTIZED_BITS > 8 ? BLOCKS * QUANTIZED_BITS / 8 : 1;
using Zeros = Beside<ZERO_BYTES, ZERO_POINTS_WIDTH>;

// Rows of ldmatrix are 16 bytes longer than the data: then no banks conflict. Of lhs, which a piece of integers meets in
// LHS_PIECE bytes of a row, those pieces are swizzled within 128 bytes instead: all of it may stay in shared memory.
constexpr int COLUMN_PITCH = STEP_BYTES + PIECE_BYTES;
constexpr int ROW_PITCH = BLOCK_K * int(sizeof(Element));
constexpr int LHS_PIECE = PIECE_K * int(sizeof(Element));
constexpr int BANKS_BYTES = 128;
constexpr int SPAN_ROWS = ROW_PITCH < BANKS_BYTES ? BANKS_BYTES / ROW_PITCH : 1;  // in the banks' bytes
constexpr int SWIZZLES = BANKS_BYTES / LHS_PIECE / SPAN_ROWS;
constexpr int SCALES_OFFSET = WIDTH * COLUMN_PITCH;
constexpr int ZEROS_OFFSET = SCALES_OFFSET + in_pieces(WIDTH * Scales::PITCH);
constexpr int STAGE_BYTES = ZEROS_OFFSET + (ZERO_POINTS ? in_pieces(WIDTH * Zeros::PITCH) : 0);
constexpr int SLOT_BYTES = BLOCK_M * ROW_PITCH;
// Of a group of rows of kept lhs and a block, a lane's sums with the constants of the excess, and with ones.
constexpr int STARTS = STREAMED ? 0 : KEPT_STEPS * SPREADS * ROW_GROUPS;
constexpr int STARTS_BYTES = HAS_EXCESS ? STARTS * 4 * 16 : 0;
constexpr int KEPT_BYTES = STARTS_BYTES + (ZERO_POINTS ? STARTS * 4 * 8 : 0);
constexpr int WARP_BYTES = STAGES * STAGE_BYTES + LHS_SLOTS * SLOT_BYTES + KEPT_BYTES;

// Two adjacent rows' sums of a lane lie apart such that all lanes' first ones are in different banks.
constexpr int SUMS_PITCH = WIDTH + 4;
constexpr int WARP_SUMS = TERM_ROWS * SUMS_PITCH;
constexpr int SUMS = WARPS_K * WARP_SUMS;
// One pass's sums are added while another's are stored where that takes little memory.
constexpr int SUM_BUFFERS = TERM_ROWS <= (KEPT ? 2 : 1) * MMA_ROWS ? 2 : 1;
constexpr int SUMS_BYTES = SUM_BUFFERS * SUMS * int(sizeof(float));
// Added late, behind the next tile's first step: this pays where no rows of lhs are read from shared memory meanwhile.
constexpr bool LATE = KEPT;
constexpr int BARRIER_BYTES = 8, BARRIERS = LATE ? 2 : 0;

static_assert(WIDTH % FRAGMENT_COLUMNS == 0 && PIECES % 2 == 0, "whole fragments and ldmatrix");
static_assert((KEPT || LHS_SLOTS >= STAGES) && STAGES >= 2, "tile");
static_assert(!KEPT || SIDES == 1, "whole blocks are kept");
static_assert(!STREAMED || (KEPT_STEPS == 1 && TERMS == 1), "one step at a time, of numbers as they are multiplied");
static_assert(TERMS == 1 || sizeof(Element) == 4, "terms of fp32");
static_assert(SPREAD == 1 || (KEPT && TERM_ROWS * SPREAD <= MMA_ROWS && BLOCKS % SPREAD == 0), "columns of the mma");
static_assert(SHARED_BYTES == WARPS_K * WARP_BYTES + SUMS_BYTES + BARRIERS * BARRIER_BYTES,
              "footprint and kernel agree");

__device__ __forceinline__ int lane() { return threadIdx.x % WARP_SIZE; }
__device__ __forceinline__ int lane_group() { return threadIdx.x % WARP_SIZE / 4; }  // g
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / WARP_SIZE; }

// What the bytes of a row of lhs are swizzled with in shared memory.
__device__ __forceinline__ int swizzle(int row) { return row / SPAN_ROWS % SWIZZLES * LHS_PIECE; }

// Of the output, the first row and column.
struct Tile {
  int row, column;
};

// What a block computes, tile after tile, and where it lies.
struct Work {
  const OnnxfuseArguments& args;
  int batch;
  int tiles_m;
  int passes;  // tiles of this block
  bool is_wide;  // whether copies of LHS_WIDTH are legal

  __device__ __forceinline__ Work(const OnnxfuseArguments& args, int batch) : args(args), batch(batch) {
    tiles_m = (args.m - 1) / BLOCK_M + 1;
    const int tiles = ((args.n - 1) / BLOCK_N + 1) * tiles_m;
    passes = max(tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1, 0) / gridDim.x;
    const long long batches = LHS_OUTER_BATCH ? args.lhs_outer.batch_stride : 0;
    is_wide = is_legal<Element, LHS_WIDTH>(args.lhs.pointer, args.lhs.column_stride,
                                           args.lhs.row_stride | args.lhs.batch_stride | batches | args.k);
  }

  // The tile of a pass. Those of the same columns are neighbours: all but the first find rhs in L2. Mostly there is one
  // tile down, and a division takes as long as 30 other instructions.
  __device__ __forceinline__ Tile tile(int pass) const {
    const unsigned number = blockIdx.x + pass * gridDim.x;
    if (tiles_m == 1) return {0, static_cast<int>(number) * BLOCK_N};
    const unsigned column = number / tiles_m;
    return {static_cast<int>(number - column * tiles_m) * BLOCK_M, static_cast<int>(column) * BLOCK_N};
  }
  __device__ __forceinline__ int rows(const Tile& tile) const { return min(args.m - tile.row, BLOCK_M); }

  // Of k, a warp's step where lhs is streamed: in another order than the blocks beside it, as all of them would ask L2 for
  // the same rows at once.
  __device__ __forceinline__ int turned(const Tile& tile, int step) const {
    return STREAMED ? static_cast<int>(static_cast<unsigned>(step + tile.column / BLOCK_N) % STEPS) : step;
  }

  // Columns beyond the tensor repeat its last one: their results are never stored.
  __device__ __forceinline__ int column_of(const Tile& tile, int index) const {
    const int column = tile.column + index % BLOCK_N;
    return WHOLE_COLUMNS ? column : min(column, WEIGHT_COLUMNS - 1);
  }
  __device__ __forceinline__ const unsigned char* scales(const Tile& tile, int index) const {
    const OnnxfuseScales& part = args.scales[index / BLOCK_N];
    return column_at(part.scales, column_of(tile, index), COLUMN_SCALES_BYTES);
  }
  __device__ __forceinline__ const unsigned char* zeros(const Tile& tile, int index) const {
    const OnnxfuseScales& part = args.scales[index / BLOCK_N];
    return column_at(part.zero_points, column_of(tile, index), COLUMN_ZEROS_BYTES);
  }
  // Of this warp's steps, the first k; and where a step's scales and zero points begin in those of a column.
  static __device__ __forceinline__ int depth(int step) { return (step * WARPS_K + warp()) * BLOCK_K; }
  static __device__ __forceinline__ int first_block(int step) {
    return BLOCK_K < QUANTIZED_BLOCK ? depth(step) / QUANTIZED_BLOCK : (step * WARPS_K + warp()) * BLOCKS;
  }
  static __device__ __forceinline__ int first_scale(int step) { return first_block(step) * int(sizeof(Element)); }
  static __device__ __forceinline__ int first_zero(int step) {
    constexpr int BITS = BLOCKS * QUANTIZED_BITS;
    constexpr bool WHOLE = BLOCK_K >= QUANTIZED_BLOCK && BITS % 8 == 0;
    return WHOLE ? (step * WARPS_K + warp()) * (BITS / 8) : first_block(step) * QUANTIZED_BITS / 8;
  }
};

}  // namespace onnxfuse
