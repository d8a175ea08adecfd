// One block computes out[BLOCK_M, BLOCK_N] = epilogue(acc_0 .. acc_{PARTS-1}) with acc_p = lhs[BLOCK_M, k] *
// rhs_p[k, BLOCK_N] for few rows, as in decoding, where rhs is stored as integers of 4 or 8 bits and a scale for each
// block of k (ir/quantization.py). The time is that of reading rhs once. For 16-bit types, on sm_80 and later.
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
//   shared      sums[warp][row][all parts side by side]              the only barrier
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
// stay in shared memory where there is one tile of rows and all steps of a warp fit into its LHS_SLOTS. What it reads of
// rhs at first, it reads before the kernel before it has ended.
//
// Launch and arguments: as the portable kernel's, or a persistent grid. Contract: k of lhs is contiguous, and copies of
// LHS_WIDTH elements are legal unless the kernel is CHECKED; integers of a column begin on RHS_BYTES boundaries, scales
// on SCALES_WIDTH elements, zero points on ZERO_POINTS_WIDTH bytes. Loads and outputs are read and written element by
// element.
#pragma once
#include "common/arguments.cuh"
#include "common/ptx.cuh"
#include "common/addressing.cuh"
#include "common/checked_access.cuh"
#include "common/epilogue_element.cuh"
#include "common/narrow_copy.cuh"
#include "quantized_small_m/unpack.cuh"

namespace onnxfuse {

constexpr int WARP_SIZE = 32;
constexpr int MMA_ROWS = 8;
constexpr int FRAGMENT_COLUMNS = 16;
constexpr int WIDTH = PARTS * BLOCK_N;  // columns of a pass
constexpr int FRAGMENTS = WIDTH / FRAGMENT_COLUMNS;
constexpr int ROW_GROUPS = (BLOCK_M - 1) / MMA_ROWS + 1;

constexpr int PIECE_BYTES = 16;  // of a column: a row of ldmatrix
constexpr int PIECE_K = 8 * PIECE_BYTES / QUANTIZED_BITS;
constexpr int STEP_BYTES = BLOCK_K * QUANTIZED_BITS / 8;  // of a column
constexpr int PIECES = STEP_BYTES / PIECE_BYTES;
constexpr int PIECE_PAIRS = WORD_PAIRS;             // of lhs, in one lane
constexpr int MULTIPLICATIONS = PIECE_PAIRS / 2;    // of one piece
constexpr int BLOCKS = BLOCK_K > QUANTIZED_BLOCK ? BLOCK_K / QUANTIZED_BLOCK : 1;  // of k, in a step
constexpr bool ADDS_EXCESS = HAS_EXCESS && PIECE_K < QUANTIZED_BLOCK;
constexpr int SIDES = PIECE_K > QUANTIZED_BLOCK ? PIECE_K / QUANTIZED_BLOCK : 1;   // blocks of one piece

constexpr bool SCALES_AHEAD = ROW_GROUPS == 1;  // with more sums, registers are short

constexpr int least(int a, int b) { return a < b ? a : b; }
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

  // The bytes from `first` on, of which `valid` exist in a column.
  __device__ __forceinline__ void copy(unsigned shared, int first, int valid) const {
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
      const int index = copy_of(i);
      if (WIDTH * COPIES % WARP_SIZE != 0 && index >= WIDTH * COPIES) break;
      const int along = first + index % COPIES * COPY;
      const unsigned char* from = columns[i] + along;
      if constexpr (IN_WORDS) {
        const int before = reinterpret_cast<unsigned long long>(from) % COPY;
        copy_async_part(shared + index * COPY, from - before, max(min(valid - along + before, COPY), 0));
      } else {
        copy_async<COPY>(shared + index * COPY, from, along < valid);
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
constexpr int WARP_BYTES = STAGES * STAGE_BYTES + LHS_SLOTS * SLOT_BYTES;

// Two adjacent rows' sums of a lane lie apart such that all lanes' first ones are in different banks.
constexpr int SUMS_PITCH = WIDTH + 4;
constexpr int WARP_SUMS = BLOCK_M * SUMS_PITCH;
constexpr int SUMS = WARPS_K * WARP_SUMS;
// One pass's sums are added while another's are stored where that takes little memory.
constexpr int SUM_BUFFERS = BLOCK_M <= MMA_ROWS ? 2 : 1;

static_assert(WIDTH % FRAGMENT_COLUMNS == 0 && PIECES % 2 == 0, "whole fragments and ldmatrix");
static_assert(LHS_SLOTS >= STAGES && STAGES >= 2, "tile");
static_assert(SHARED_BYTES == WARPS_K * WARP_BYTES + SUM_BUFFERS * SUMS * int(sizeof(float)),
              "footprint and kernel agree");

__device__ __forceinline__ int lane() { return threadIdx.x % WARP_SIZE; }
__device__ __forceinline__ int lane_group() { return threadIdx.x % WARP_SIZE / 4; }  // g
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / WARP_SIZE; }

// What the bytes of a row of lhs are swizzled with in shared memory.
__device__ __forceinline__ int swizzle(int row) { return row / SPAN_ROWS % SWIZZLES * LHS_PIECE; }

// What a block computes, tile after tile, and where it lies.
struct Work {
  const OnnxfuseArguments& args;
  int batch;
  int tiles_m;
  int passes;  // tiles of this block
  int steps;   // of this warp
  int blocks;  // of k
  bool is_wide;  // whether copies of LHS_WIDTH are legal

  __device__ __forceinline__ Work(const OnnxfuseArguments& args, int batch) : args(args), batch(batch) {
    tiles_m = (args.m - 1) / BLOCK_M + 1;
    const int tiles = ((args.n - 1) / BLOCK_N + 1) * tiles_m;
    passes = max(tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1, 0) / gridDim.x;
    steps = max((args.k + BLOCK_K - 1) / BLOCK_K - warp() + WARPS_K - 1, 0) / WARPS_K;
    blocks = (args.k + QUANTIZED_BLOCK - 1) / QUANTIZED_BLOCK;
    const long long batches = LHS_OUTER_BATCH ? args.lhs_outer.batch_stride : 0;
    is_wide = is_legal<Element, LHS_WIDTH>(args.lhs.pointer, args.lhs.column_stride,
                                           args.lhs.row_stride | args.lhs.batch_stride | batches | args.k);
  }

  // Tiles of the same columns are neighbours: all but the first find rhs in L2.
  __device__ __forceinline__ int tile(int pass) const { return blockIdx.x + pass * gridDim.x; }
  __device__ __forceinline__ int row(int pass) const { return tile(pass) % tiles_m * BLOCK_M; }
  __device__ __forceinline__ int rows(int pass) const { return min(args.m - row(pass), BLOCK_M); }
  __device__ __forceinline__ int column(int pass) const { return tile(pass) / tiles_m * BLOCK_N; }

  // Columns beyond the tensor repeat its last one: their results are never stored.
  __device__ __forceinline__ int column_of(int pass, int index) const {
    return min(column(pass) + index % BLOCK_N, args.n - 1);
  }
  __device__ __forceinline__ const unsigned char* scales(int pass, int index) const {
    const OnnxfuseScales& part = args.scales[index / BLOCK_N];
    return static_cast<const unsigned char*>(part.scales) +
           column_of(pass, index) * part.scales_pitch * int(sizeof(Element));
  }
  __device__ __forceinline__ const unsigned char* zeros(int pass, int index) const {
    const OnnxfuseScales& part = args.scales[index / BLOCK_N];
    return static_cast<const unsigned char*>(part.zero_points) + column_of(pass, index) * part.zero_points_pitch;
  }
  // Of this warp's steps, the first k; and where a step's scales and zero points begin in those of a column.
  __device__ __forceinline__ int depth(int step) const { return (step * WARPS_K + warp()) * BLOCK_K; }
  __device__ __forceinline__ int first_scale(int step) const {
    return depth(step) / QUANTIZED_BLOCK * int(sizeof(Element));
  }
  __device__ __forceinline__ int first_zero(int step) const { return depth(step) / QUANTIZED_BLOCK * QUANTIZED_BITS / 8; }
};

// A pass's columns of integers.
struct Integers {
  static constexpr int LANES = STEP_BYTES / RHS_BYTES;  // of a column
  static constexpr int COLUMNS = WARP_SIZE / LANES;     // of one copy of all lanes
  static_assert(BLOCK_N % COLUMNS == 0, "whole copies");

  const unsigned char* parts[PARTS];  // this lane's bytes of its first column
  int columns;                        // from there on

  static __device__ __forceinline__ int along() { return lane() % LANES * RHS_BYTES; }

  __device__ __forceinline__ void go_to(const Work& work, int pass) {
    const int first = work.column(pass) + lane() / LANES;
    columns = work.args.n - first;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const OnnxfuseTensor& rhs = work.args.rhs[part];
      parts[part] = static_cast<const unsigned char*>(rhs.pointer) + first * rhs.column_stride + along();
    }
  }

  // What lies beyond n or k is zero.
  __device__ __forceinline__ void copy(const Work& work, unsigned stage, int step) const {
    const int from = work.depth(step) / 8 * QUANTIZED_BITS;
    const int left = from + along() < work.blocks * (QUANTIZED_BLOCK * QUANTIZED_BITS / 8) ? columns : 0;
    const unsigned shared = stage + lane() / LANES * COLUMN_PITCH + along();
#pragma unroll
    for (int first = 0; first < WIDTH; first += COLUMNS) {
      const int part = first / BLOCK_N, column = first % BLOCK_N;
      const unsigned char* global = parts[part] + from + column * work.args.rhs[part].column_stride;
      copy_async<RHS_BYTES>(shared + first * COLUMN_PITCH, global, column < left);
    }
  }
};

// Rows of lhs in copies of ELEMENTS. Rows that the tensor does not have stay what they are: nothing of theirs is stored.
template <int ELEMENTS>
__device__ __forceinline__ void copy_rows(const Work& work, unsigned slot, int pass, int step) {
  constexpr int LANES = BLOCK_K / ELEMENTS, BYTES = ELEMENTS * int(sizeof(Element));
  const int k = work.depth(step), rows = work.rows(pass), first = work.row(pass);
  const auto copy_of = [&](int index) {
    const int row = index / LANES, along = index % LANES * ELEMENTS;
    const auto* from = factor_pointer<Element, LHS_OUTER_BATCH>(work.args.lhs, work.args.lhs_outer, work.batch,
                                                                first + row, k + along);
    const unsigned shared = slot + row * ROW_PITCH + (along * int(sizeof(Element)) ^ swizzle(row));
    return SmallCopy{shared, from, k + along < work.args.k, row < rows};
  };
  if constexpr (BYTES < CP_ASYNC_BYTES) {
    copy_small<BYTES, BLOCK_M * LANES / WARP_SIZE>([&](int i) {
      const SmallCopy copy = copy_of(lane() + i * WARP_SIZE);
      return SmallCopy{copy.shared, copy.global, copy.inside && copy.written, copy.written};
    });
  } else {
#pragma unroll(BLOCK_M * LANES / WARP_SIZE > 4 ? 4 : 1)
    for (int index = lane(); index < rows * LANES; index += WARP_SIZE) {
      const SmallCopy copy = copy_of(index);
      copy_async<BYTES>(copy.shared, copy.global, copy.inside);
    }
  }
}

// A step of this warp, and where in its memory it lies.
struct Place {
  int pass = 0, step = 0, stage = 0, slot = 0;

  __device__ __forceinline__ void advance(int steps, int slots) {
    if (++stage == STAGES) stage = 0;
    if (++slot == slots) slot = 0;
    if (++step == steps) step = 0, ++pass;
  }
};

// This warp's stages and slots, and the loads on their way to them.
struct Ring {
  const Work& work;
  unsigned char* memory;
  bool stays;  // lhs
  int slots;
  Place next;
  Integers integers;
  Scales scales;
  Zeros zeros;

  __device__ __forceinline__ Ring(const Work& work, unsigned char* memory) : work(work), memory(memory) {
    stays = work.steps <= LHS_SLOTS && work.tiles_m == 1;
    slots = stays ? work.steps : LHS_SLOTS;
  }
  __device__ __forceinline__ unsigned char* stage_at(int index) const { return memory + index * STAGE_BYTES; }
  __device__ __forceinline__ unsigned char* slot_at(int index) const {
    return memory + STAGES * STAGE_BYTES + index * SLOT_BYTES;
  }
  __device__ __forceinline__ bool exists(const Place& place) const { return place.pass < work.passes && work.steps > 0; }

  __device__ __forceinline__ void load_rhs(const Place& place) {
    if (!exists(place)) return;
    if (place.step == 0) {
      integers.go_to(work, place.pass);
      scales.go_to([&](int column) { return work.scales(place.pass, column); });
      if constexpr (ZERO_POINTS) zeros.go_to([&](int column) { return work.zeros(place.pass, column); });
    }
    const unsigned shared = shared_address(stage_at(place.stage));
    integers.copy(work, shared, place.step);
    scales.copy(shared + SCALES_OFFSET, work.first_scale(place.step), work.blocks * int(sizeof(Element)));
    if constexpr (ZERO_POINTS) {
      zeros.copy(shared + ZEROS_OFFSET, work.first_zero(place.step), (work.blocks * QUANTIZED_BITS + 7) / 8);
    }
  }
  __device__ __forceinline__ void load_lhs(const Place& place) const {
    if (!exists(place) || (stays && place.pass > 0)) return;
    const unsigned slot = shared_address(slot_at(place.slot));
    if constexpr (CHECKED && LHS_WIDTH > 1) {
      if (!work.is_wide) return copy_rows<1>(work, slot, place.pass, place.step);
    }
    copy_rows<LHS_WIDTH>(work, slot, place.pass, place.step);
  }

  // All stages but one; rhs, which no kernel writes, before the kernel before this one has ended.
  __device__ __forceinline__ void fill() {
    Place first = next;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
      load_rhs(next);
      next.advance(work.steps, slots);
    }
    wait_for_kernel_before();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
      load_lhs(first);
      first.advance(work.steps, slots);
      copy_async_commit();
    }
  }
  // The next step, or nothing behind the last one.
  __device__ __forceinline__ void load() {
    load_rhs(next);
    load_lhs(next);
    next.advance(work.steps, slots);
    copy_async_commit();
  }
};

// k of one piece of a row in the order of unpacked integers.
__device__ __forceinline__ void read_row(unsigned (&pairs)[PIECE_PAIRS], const unsigned char* slot, int row, int piece) {
  const int existing = least(row, BLOCK_M - 1), along = piece * LHS_PIECE;
  const int span = along % BANKS_BYTES ^ swizzle(existing);
  const unsigned char* from = slot + existing * ROW_PITCH + along / BANKS_BYTES * BANKS_BYTES + span;
  const auto words = load_packed<Packed<unsigned, PIECE_PAIRS>>(
      reinterpret_cast<const unsigned*>(from + lane() % 4 * PIECE_PAIRS * 4));
#pragma unroll
  for (int i = 0; i < PIECE_PAIRS; ++i) {
    if constexpr (QUANTIZED_BITS == 4) {
      pairs[i] = permute_bytes(words.values[i / 2], words.values[i / 2 + 2], i % 2 == 0 ? 0x5410 : 0x7632);
    } else {
      pairs[i] = words.values[i];
    }
  }
}

using GroupSums = float[ROW_GROUPS][4];
using Sums = GroupSums[FRAGMENTS];

// sums = start + one piece of 16 columns and all rows; of a block that is half of a piece, the rows of other lanes count
// as zero.
__device__ __forceinline__ void multiply(GroupSums& sums, const GroupSums& start, const unsigned (&first)[WORD_PAIRS],
                                         const unsigned (&second)[WORD_PAIRS],
                                         const unsigned (&rows)[ROW_GROUPS][PIECE_PAIRS], int side) {
  const GroupSums& own_sums = sums;
#pragma unroll
  for (int j = 0; j < MULTIPLICATIONS; ++j) {
    const unsigned columns[4] = {first[2 * j], second[2 * j], first[2 * j + 1], second[2 * j + 1]};
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
      const bool own = SIDES == 1 || lane() % 4 * SIDES / 4 == side;
      const unsigned own_rows[2] = {own ? rows[group][2 * j] : 0, own ? rows[group][2 * j + 1] : 0};
      multiply_onto(Element(), sums[group], j == 0 ? start[group] : own_sums[group], columns, own_rows);
    }
  }
}

// What a block's sums are too large by, if its numbers are multiplied with what unpacking leaves in them: the same for
// all columns but for their zero points, so it is multiplied once for all, by columns of constants.
struct Excess {
  GroupSums sums;  // negative
  GroupSums rows;  // of lhs alone

  // The rows of a piece, the first of a block or not.
  __device__ __forceinline__ void add(const unsigned (&lhs)[ROW_GROUPS][PIECE_PAIRS], int side, bool first) {
    const GroupSums none = {};
    const GroupSums &own_sums = sums, &own_rows = rows;
    unsigned pairs[WORD_PAIRS], ones[WORD_PAIRS];
#pragma unroll
    for (int i = 0; i < WORD_PAIRS; ++i) {
      pairs[i] = negative_excess(i);
      ones[i] = IS_BF16 ? 0x3f803f80 : 0x3c003c00;
    }
    if constexpr (HAS_EXCESS) multiply(sums, first ? none : own_sums, pairs, pairs, lhs, side);
    if constexpr (ZERO_POINTS) multiply(rows, first ? none : own_rows, ones, ones, lhs, side);
  }
};

struct Multiplier {
  const unsigned char* stage;
  const unsigned char* slot;
  int zeros[FRAGMENTS][2];  // where those of a lane's columns lie
  int scales[FRAGMENTS][2];
  Element scales_ahead[FRAGMENTS][2][BLOCKS];  // unused unless SCALES_AHEAD
  int first_block;

  __device__ __forceinline__ Multiplier(const Work& work, const Ring& ring, const Place& place) {
    const int pass = place.pass, step = place.step;
    stage = ring.stage_at(place.stage);
    slot = ring.slot_at(place.slot);
    first_block = work.depth(step) / QUANTIZED_BLOCK;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = f * FRAGMENT_COLUMNS + half * 8 + lane_group();
        const unsigned scale = Scales::IN_WORDS ? low_word(work.scales(pass, column)) + work.first_scale(step) : 0;
        scales[f][half] = SCALES_OFFSET + Scales::offset(column, scale);
        if constexpr (SCALES_AHEAD) read_scales(scales_ahead[f][half], stage + scales[f][half]);
        if constexpr (ZERO_POINTS) {
          const unsigned zero = Zeros::IN_WORDS ? low_word(work.zeros(pass, column)) + work.first_zero(step) : 0;
          zeros[f][half] = ZEROS_OFFSET + Zeros::offset(column, zero);
        }
      }
    }
  }

  static __device__ __forceinline__ unsigned low_word(const void* pointer) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(pointer));
  }
  static __device__ __forceinline__ void read_scales(Element (&scales)[BLOCKS], const unsigned char* from) {
    constexpr int VECTOR = Scales::IN_WORDS ? 1 : Scales::COPY / int(sizeof(Element));
#pragma unroll
    for (int i = 0; i < BLOCKS; i += VECTOR) {
      const auto vector = load_packed<Packed<Element, VECTOR>>(reinterpret_cast<const Element*>(from) + i);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) scales[i + j] = vector.values[j];
    }
  }

  __device__ __forceinline__ Element scale_of(int f, int half, int block) const {
    if constexpr (SCALES_AHEAD) return scales_ahead[f][half][block];
    return reinterpret_cast<const Element*>(stage + scales[f][half])[block];
  }
  __device__ __forceinline__ unsigned zero(int f, int half, int block) const {
    const unsigned char* from = stage + zeros[f][half];
    if constexpr (QUANTIZED_BITS == 8) return from[block];
    const int nibble = (BLOCKS == 1 ? first_block % 2 : 0) + block;
    return from[nibble / 2] >> nibble % 2 * 4 & 15;
  }

  // acc += scale * (sums + excess)
  __device__ __forceinline__ void fold(Sums& acc, const GroupSums& sums, const Excess& excess, int f, int block) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = to_float(scale_of(f, half, block));
      const float zero_point = ZERO_POINTS ? zero_offset(zero(f, half, block)) : 0.0f;
#pragma unroll
      for (int group = 0; group < ROW_GROUPS; ++group) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          float sum = sums[group][e];
          if (ADDS_EXCESS) sum += excess.sums[group][e];
          if (ZERO_POINTS) sum = fmaf(-zero_point, excess.rows[group][e], sum);
          acc[f][group][e] = fmaf(scale, sum, acc[f][group][e]);
        }
      }
    }
  }

  // acc += lhs * rhs of the step.
  __device__ __forceinline__ void run(Sums& acc) const {
    Sums block_sums;
    Excess excess[SIDES];
#pragma unroll(SIDES > 1 && ROW_GROUPS > 1 ? 1 : PIECES)
    for (int piece = 0; piece < PIECES; piece += 2) {
      unsigned words[FRAGMENTS][4];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f) {
        const int column = f * FRAGMENT_COLUMNS + lane() % FRAGMENT_COLUMNS;
        const int at = column * COLUMN_PITCH + (piece + lane() / FRAGMENT_COLUMNS) * PIECE_BYTES;
        load_matrices(words[f], shared_address(stage + at));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned rows[ROW_GROUPS][PIECE_PAIRS];
#pragma unroll
        for (int group = 0; group < ROW_GROUPS; ++group) {
          read_row(rows[group], slot, group * MMA_ROWS + lane_group(), piece + i);
        }
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
          excess[side].add(rows, side, (piece + i) * PIECE_K % QUANTIZED_BLOCK == 0 || SIDES > 1 || piece + i == 0);
        }
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
          add_piece(acc, block_sums[f], excess, words[f][2 * i], words[f][2 * i + 1], rows, f, piece + i);
        }
      }
    }
  }

  __device__ __forceinline__ void add_piece(Sums& acc, GroupSums& block_sums, const Excess (&excess)[SIDES],
                                            unsigned first, unsigned second,
                                            const unsigned (&rows)[ROW_GROUPS][PIECE_PAIRS], int f, int piece) const {
    unsigned pairs[2][WORD_PAIRS];
    unpack(pairs[0], first);
    unpack(pairs[1], second);
    const int k = piece * PIECE_K;
#pragma unroll
    for (int side = 0; side < SIDES; ++side) {
      // Of a block that is no longer than a piece, sums begin with the excess.
      const GroupSums none = {};
      const GroupSums& start = HAS_EXCESS && !ADDS_EXCESS ? excess[side].sums : none;
      const GroupSums& own_sums = block_sums;
      const bool begins = k % QUANTIZED_BLOCK == 0 || SIDES > 1 || piece == 0;
      multiply(block_sums, begins ? start : own_sums, pairs[0], pairs[1], rows, side);
      if ((k + PIECE_K) % QUANTIZED_BLOCK == 0 || SIDES > 1 || piece == PIECES - 1) {
        fold(acc, block_sums, excess[side], f, k / QUANTIZED_BLOCK + side);
      }
    }
  }
};

__device__ __forceinline__ void store_sums(float* sums, const Sums& acc) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = group * MMA_ROWS + lane() % 4 * 2 + e % 2;
        const int column = f * FRAGMENT_COLUMNS + e / 2 * 8 + lane_group();
        if (BLOCK_M % MMA_ROWS == 0 || row < BLOCK_M) sums[row * SUMS_PITCH + column] = acc[f][group][e];
      }
    }
  }
}

// Adds the sums of all warps, always in the same order, and stores what the epilogue makes of them. Another warp begins
// in every pass, so that none is behind the others for long.
__device__ __forceinline__ void finish(const float* sums, const Work& work, int pass) {
  const int rows = work.rows(pass), first_row = work.row(pass), first_column = work.column(pass);
  const int thread = (threadIdx.x + THREADS - pass % WARPS_K * WARP_SIZE) % THREADS;
#pragma unroll 1
  for (int element = thread; element < rows * BLOCK_N; element += THREADS) {
    const int row = element / BLOCK_N, column = element % BLOCK_N;
    if (first_column + column >= work.args.n) continue;
    const Operands operands(work.args, work.batch, first_row + row, first_column + column);
    float acc[PARTS] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS_K; ++warp) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        acc[part] += sums[warp * WARP_SUMS + row * SUMS_PITCH + part * BLOCK_N + column];
      }
    }
    store_outputs(acc, operands, work.args, work.batch, first_row + row, first_column + column);
  }
}

__device__ __forceinline__ void compute_tiles(const OnnxfuseArguments& args, int batch, unsigned char* shared) {
  const Work work(args, batch);
  Ring ring(work, shared + warp() * WARP_BYTES);
  float* sums = reinterpret_cast<float*>(shared + WARPS_K * WARP_BYTES);
  ring.fill();
  Place place;
#pragma unroll 1
  for (int pass = 0; pass < work.passes; ++pass) {
    Sums acc = {};
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      copy_async_wait<STAGES - 2>();
      __syncwarp();  // all lanes' copies have landed, and all have read what is loaded over
      ring.load();
      const Multiplier multiplier(work, ring, place);
      multiplier.run(acc);
      place.advance(work.steps, ring.slots);
    }
    float* own = sums + pass % SUM_BUFFERS * SUMS;
    store_sums(own + warp() * WARP_SUMS, acc);
    __syncthreads();
    finish(own, work, pass);
    if (SUM_BUFFERS == 1) __syncthreads();
  }
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, onnxfuse::RESIDENT_BLOCKS)
    onnxfuse_gemm(const __grid_constant__ OnnxfuseArguments args) {
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  onnxfuse::let_kernel_behind_start();
  for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) {
    onnxfuse::compute_tiles(args, batch, onnxfuse_shared);
    __syncthreads();  // the next product's sums overwrite what the epilogue still reads
  }
}
