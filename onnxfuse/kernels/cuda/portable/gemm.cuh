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
// 1. Of lhs and rhs, 16-bit elements of width 1 pass through registers on their way to the ring (ShiftedCopy).
//
// The generated text before this file defines Element, MATH, LHS_ and RHS_K_CONTIGUOUS, PARTS, the BLOCK_, WARPS_,
// STAGES and _WIDTH constants, the tables Load<I> and Out<I>, and the struct Epilogue.
#pragma once
#include "common/arguments.cuh"
#include "common/ptx.cuh"
#include "common/addressing.cuh"
#include "common/checked_access.cuh"
#include "portable/split_fp32.cuh"
#include "common/narrow_copy.cuh"
#include "portable/epilogue.cuh"

namespace onnxfuse {

constexpr int CHUNK_BYTES = 16;  // what one lane's address of ldmatrix, and the widest cp.async, covers
constexpr int CHUNK = CHUNK_BYTES / sizeof(Element);
constexpr int BANK_CHUNKS = 8;  // 32 banks of 4 bytes: 8 chunks that lie in different banks are read at once

// Rows of output tiles whose blocks run together: they share the columns of rhs and the rows of lhs in L2.
constexpr int GROUP_ROWS = 8;

// An operand's tile in shared memory. SWIZZLED: chunk c of row r lies at c ^ f(r), so that the 8 rows that ldmatrix
// reads at one c, and the copies of one row, fall into different banks. f takes as many values as 8 rows of CHUNKS
// chunks would otherwise meet each bank. Not SWIZZLED: rows are 8 elements longer, and the 4 rows by 8 columns of
// 32-bit elements that one rhs fragment reads fall into different banks.
template <int ROWS_, int COLUMNS_, bool SWIZZLED>
struct SharedTile {
  static constexpr int ROWS = ROWS_;
  static constexpr int COLUMNS = COLUMNS_;
  static constexpr int CHUNKS = COLUMNS / CHUNK;
  static constexpr int EVEN = CHUNKS & -CHUNKS;  // the largest power of two that divides CHUNKS
  static constexpr int SPREAD = EVEN < BANK_CHUNKS ? EVEN : BANK_CHUNKS;
  static constexpr int ROW_BYTES = (COLUMNS + (SWIZZLED ? 0 : 8)) * sizeof(Element);
  static constexpr int BYTES = ROWS * ROW_BYTES;
  static_assert(COLUMNS % CHUNK == 0, "rows are whole chunks");

  // `phase` is row modulo 8; a caller that knows it from its lane alone spares the kernel one register a row.
  static __device__ __forceinline__ int offset(int row, int column, int phase) {
    const int shuffle = SWIZZLED ? phase / (BANK_CHUNKS / SPREAD) % SPREAD : 0;
    return row * ROW_BYTES + ((column / CHUNK) ^ shuffle) * CHUNK_BYTES + column % CHUNK * sizeof(Element);
  }
  static __device__ __forceinline__ int offset(int row, int column) { return offset(row, column, row % 8); }
};

// Both in the order that they have in memory; only ldmatrix can transpose, and only 16-bit elements.
constexpr bool LHS_PADDED = !LHS_K_CONTIGUOUS && sizeof(Element) == 4;
constexpr bool RHS_PADDED = !RHS_K_CONTIGUOUS && sizeof(Element) == 4;
using LhsTile = SharedTile<LHS_K_CONTIGUOUS ? BLOCK_M : BLOCK_K, LHS_K_CONTIGUOUS ? BLOCK_K : BLOCK_M, !LHS_PADDED>;
using RhsTile = SharedTile<RHS_K_CONTIGUOUS ? BLOCK_N : BLOCK_K, RHS_K_CONTIGUOUS ? BLOCK_K : BLOCK_N, !RHS_PADDED>;

constexpr int STAGE_BYTES = LhsTile::BYTES + PARTS * RhsTile::BYTES;
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

// The bytes of a tensor, as addresses: of its first element, and of the first byte behind its last.
struct Span {
  unsigned long long begin;
  unsigned long long end;

  __device__ __forceinline__ Span(const void* first, const Element* last)
      : begin(reinterpret_cast<unsigned long long>(first)), end(reinterpret_cast<unsigned long long>(last + 1)) {}
};

// The copies that one thread makes of an operand's tiles, k tile after k tile. OUTER_COLUMNS: the tensor's contiguous
// axis is walked in two levels, as the k of a merged-heads lhs.
template <typename Tile, int WIDTH, bool OUTER_COLUMNS>
struct TileCopy {
  static constexpr int PER_ROW = Tile::COLUMNS / WIDTH;
  static constexpr int COUNT = Tile::ROWS * PER_ROW;
  // Where threads fill whole rows, a thread stays in one column, and all but its first copy differ by constants only.
  static constexpr bool STRAIGHT = THREADS % PER_ROW == 0;
  static constexpr int PASSES = (COUNT + THREADS - 1) / THREADS;
  // Narrow copies are many, and each holds registers while it is under way.
  static constexpr int UNROLL = WIDTH * sizeof(Element) == CHUNK_BYTES ? PASSES : 2;

  const Element* source;  // this thread's first element of the next tile; with OUTER_COLUMNS, of its row
  long long row_stride;
  const OnnxfuseOuter* outer;
  int passed;  // columns before the next tile; only with OUTER_COLUMNS

  static __device__ __forceinline__ int row(int pass) {
    return STRAIGHT ? threadIdx.x / PER_ROW + pass * (THREADS / PER_ROW) : (threadIdx.x + pass * THREADS) / PER_ROW;
  }
  static __device__ __forceinline__ int column(int pass) {
    return (STRAIGHT ? threadIdx.x : threadIdx.x + pass * THREADS) % PER_ROW * WIDTH;
  }

  __device__ __forceinline__ void start(const Element* tile, long long stride, const OnnxfuseOuter* levels = nullptr) {
    source = tile + row(0) * stride + (OUTER_COLUMNS ? 0 : column(0));
    row_stride = stride;
    outer = levels;
    passed = 0;
  }

  __device__ __forceinline__ void advance(long long elements) {
    if constexpr (OUTER_COLUMNS) {
      passed += elements;
    } else {
      source += elements;
    }
  }

  // Element `number` of a copy.
  __device__ __forceinline__ const Element* element(int pass, int number = 0) const {
    const Element* line = source + (row(pass) - row(0)) * row_stride;
    if constexpr (OUTER_COLUMNS) {
      return line + steps<true>(passed + column(pass) + number, 1, outer->columns, outer->column_stride);
    }
    return line + (column(pass) - column(0) + number);
  }

  // Copies the next tile, of which `rows` and `columns` lie inside the tensor; zeros elsewhere.
  __device__ __forceinline__ void issue(unsigned shared, int rows, int columns, const Span&) const {
#pragma unroll UNROLL
    for (int pass = 0; pass < PASSES; ++pass) {
      if (COUNT % THREADS != 0 && static_cast<int>(threadIdx.x) + pass * THREADS >= COUNT) break;
      const bool inside = row(pass) < rows && column(pass) < columns;
      // A step of whole swizzle periods leaves the phase alone: then all but the first address are constants away.
      const int phase = STRAIGHT && THREADS / PER_ROW % 8 == 0 ? row(0) % 8 : row(pass) % 8;
      const unsigned target = shared + Tile::offset(row(pass), column(pass), phase);
      copy_async<WIDTH * sizeof(Element)>(target, element(pass), inside);
    }
  }
};

using ShiftedWord = Packed<unsigned, 2>;
constexpr int SHIFTED_WORDS = 3;  // that a piece of CHUNK elements which begins anywhere can touch

// The CHUNK elements that begin `offset` bytes behind the first of the words; an element is of 16 bits.
__device__ __forceinline__ Packed<unsigned, 4> shifted(const ShiftedWord (&words)[SHIFTED_WORDS], unsigned offset) {
  unsigned line[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    line[i] = offset & 4 ? words[(i + 1) / 2].values[(i + 1) % 2] : words[i / 2].values[i % 2];
  }
  Packed<unsigned, 4> piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) piece.values[i] = __funnelshift_r(line[i], line[i + 1], offset % 4 * 8);
  return piece;
}

// The first `count` elements; zeros behind them.
__device__ __forceinline__ Packed<unsigned, 4> leading(const Packed<unsigned, 4>& piece, int count) {
  Packed<unsigned, 4> kept;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    kept.values[i] = piece.values[i] & (count > 2 * i + 1 ? 0xffffffff : count > 2 * i ? 0xffff : 0);
  }
  return kept;
}

// For rows of 16-bit elements that begin anywhere, which cp.async cannot copy. CHUNK neighbours in shared memory are
// one piece: it is cut out of aligned words, and those of several pieces are under way at once. A piece that lies in
// two runs of columns, or whose words reach beyond the tensor, is copied element by element.
template <typename Tile, bool OUTER_COLUMNS>
struct ShiftedCopy : TileCopy<Tile, CHUNK, OUTER_COLUMNS> {
  using Pieces = TileCopy<Tile, CHUNK, OUTER_COLUMNS>;
  using Pieces::column, Pieces::element, Pieces::row;
  // As many as accumulators and the parts' pointers leave registers for.
  static constexpr int MOST = PARTS * FRAGMENTS_M * FRAGMENTS_N <= 16 ? 8 : PARTS < 4 ? 4 : 2;
  static constexpr int BATCHES = (Pieces::PASSES + MOST - 1) / MOST;
  static constexpr int AT_ONCE = (Pieces::PASSES + BATCHES - 1) / BATCHES;

  static __device__ __forceinline__ bool is_written(int pass) {
    if (AT_ONCE * BATCHES * THREADS == Pieces::COUNT) return true;
    return static_cast<int>(threadIdx.x) + pass * THREADS < Pieces::COUNT;
  }

  static __device__ __forceinline__ bool is_inside(int pass, int rows, int columns) {
    return is_written(pass) && row(pass) < rows && column(pass) < columns;
  }

  static __device__ __forceinline__ unsigned target(unsigned shared, int pass) {
    return shared + Tile::offset(row(pass), column(pass));
  }

  // element(first + number), by one addition where it can be.
  __device__ __forceinline__ const Element* next(const Element* first_element, int first, int number) const {
    if constexpr (!Pieces::STRAIGHT) return element(first + number);
    return first_element + number * (THREADS / Pieces::PER_ROW) * this->row_stride;
  }

  // Whether words may be read for a piece, of which `columns - column(pass)` elements lie inside the tensor.
  __device__ __forceinline__ bool is_whole(int pass, unsigned long long word, int columns, const Span& span) const {
    bool whole = word >= span.begin && word <= span.end - SHIFTED_WORDS * sizeof(ShiftedWord);
    if constexpr (OUTER_COLUMNS) {
      const int run = this->outer->columns;
      whole = whole && (this->passed + column(pass)) % run + min(columns - column(pass), CHUNK) <= run;
    }
    return whole;
  }

  __device__ __forceinline__ void issue(unsigned shared, int rows, int columns, const Span& span) const {
    bool left = false;
#pragma unroll 1
    for (int first = 0; first < AT_ONCE * BATCHES; first += AT_ONCE) {
      const Element* first_element = element(first);
      ShiftedWord words[AT_ONCE][SHIFTED_WORDS];
      unsigned offsets[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const auto address = reinterpret_cast<unsigned long long>(next(first_element, first, i));
        offsets[i] = address % sizeof(ShiftedWord);
        const unsigned long long word = address - offsets[i];
        const bool inside = is_inside(first + i, rows, columns);
        const bool whole = is_whole(first + i, word, columns, span);
        left |= inside && !whole;
#pragma unroll
        for (int number = 0; number < SHIFTED_WORDS; ++number) {
          const auto* global = reinterpret_cast<const unsigned*>(word + number * sizeof(ShiftedWord));
          words[i][number] = load_cached<ShiftedWord>(global, inside && whole);
        }
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const auto piece = leading(shifted(words[i], offsets[i]), columns - column(first + i));
        if (is_written(first + i)) store_shared(target(shared, first + i), piece);
      }
    }
    if (left) copy_rest(shared, rows, columns, span);
  }

  // The pieces that are not whole.
  __device__ __forceinline__ void copy_rest(unsigned shared, int rows, int columns, const Span& span) const {
#pragma unroll 1
    for (int pass = 0; pass < Pieces::PASSES; ++pass) {
      const auto address = reinterpret_cast<unsigned long long>(element(pass));
      const unsigned long long word = address - address % sizeof(ShiftedWord);
      if (!is_inside(pass, rows, columns) || is_whole(pass, word, columns, span)) continue;
      copy_small<sizeof(Element), CHUNK>([&](int number) {
        const unsigned to = target(shared, pass) + number * sizeof(Element);
        return SmallCopy{to, element(pass, number), number < columns - column(pass), true};
      });
    }
  }
};

template <typename Tile, int WIDTH, bool OUTER_COLUMNS, int BYTES = WIDTH * sizeof(Element)>
struct OperandCopy : TileCopy<Tile, WIDTH, OUTER_COLUMNS> {};
template <typename Tile, int WIDTH, bool OUTER_COLUMNS>
struct OperandCopy<Tile, WIDTH, OUTER_COLUMNS, 2> : ShiftedCopy<Tile, OUTER_COLUMNS> {};

// Copies of WIDTH elements or, in a kernel that is CHECKED, those of width 1 where they are not `legal`.
template <typename Tile, int WIDTH, bool OUTER_COLUMNS, bool BOTH = CHECKED && (WIDTH > 1)>
struct RingCopy : OperandCopy<Tile, WIDTH, OUTER_COLUMNS> {
  using Copies = OperandCopy<Tile, WIDTH, OUTER_COLUMNS>;

  __device__ __forceinline__ void start(const Element* tile, long long stride, bool legal,
                                        const OnnxfuseOuter* levels = nullptr) {
    Copies::start(tile, stride, levels);
  }
};

template <typename Tile, int WIDTH, bool OUTER_COLUMNS>
struct RingCopy<Tile, WIDTH, OUTER_COLUMNS, true> : OperandCopy<Tile, WIDTH, OUTER_COLUMNS> {
  using Wide = OperandCopy<Tile, WIDTH, OUTER_COLUMNS>;
  using Narrow = OperandCopy<Tile, 1, OUTER_COLUMNS>;

  bool wide;

  __device__ __forceinline__ void start(const Element* tile, long long stride, bool legal,
                                        const OnnxfuseOuter* levels = nullptr) {
    Narrow narrow;
    Wide::start(tile, stride, levels);
    narrow.start(tile, stride, levels);
    wide = legal;
    if (!wide) this->source = narrow.source;
  }

  __device__ __forceinline__ void issue(unsigned shared, int rows, int columns, const Span& span) const {
    if (wide) return Wide::issue(shared, rows, columns, span);
    Narrow narrow;
    narrow.source = this->source;
    narrow.row_stride = this->row_stride;
    narrow.outer = this->outer;
    narrow.passed = this->passed;
    narrow.issue(shared, rows, columns, span);
  }
};

__device__ __forceinline__ bool is_lhs_legal(const OnnxfuseArguments& args) {
  const OnnxfuseTensor& lhs = args.lhs;
  const OnnxfuseOuter& outer = args.lhs_outer;
  const long long along = LHS_K_CONTIGUOUS ? lhs.column_stride : lhs.row_stride;
  const long long across = LHS_K_CONTIGUOUS ? lhs.row_stride : lhs.column_stride;
  const long long runs = outer.columns | outer.column_stride;
  const long long run = LHS_OUTER_COLUMNS ? runs : LHS_K_CONTIGUOUS ? args.k : args.m;
  const long long batches = lhs.batch_stride | (LHS_OUTER_BATCH ? outer.batch_stride : 0);
  return is_legal<Element, LHS_WIDTH>(lhs.pointer, along, batches | across | run);
}

__device__ __forceinline__ bool is_rhs_legal(const OnnxfuseArguments& args, int part) {
  const OnnxfuseTensor& rhs = args.rhs[part];
  const long long along = RHS_K_CONTIGUOUS ? rhs.row_stride : rhs.column_stride;
  const long long across = RHS_K_CONTIGUOUS ? rhs.column_stride | args.k : rhs.row_stride | args.n;
  const long long batches = rhs.batch_stride | (RHS_OUTER_BATCH ? args.rhs_outer.batch_stride : 0);
  return is_legal<Element, RHS_WIDTH>(rhs.pointer, along, batches | across);
}

__device__ __forceinline__ Span lhs_span(const OnnxfuseArguments& args) {
  const OnnxfuseTensor& lhs = args.lhs;
  const OnnxfuseOuter& outer = args.lhs_outer;
  const Element* last = factor_pointer<Element, LHS_OUTER_BATCH>(lhs, outer, args.batch - 1, args.m - 1, 0) +
                        steps<LHS_OUTER_COLUMNS>(args.k - 1, lhs.column_stride, outer.columns, outer.column_stride);
  return Span(lhs.pointer, last);
}

__device__ __forceinline__ Span rhs_span(const OnnxfuseArguments& args, int part) {
  const OnnxfuseTensor& rhs = args.rhs[part];
  const Element* last =
      factor_pointer<Element, RHS_OUTER_BATCH>(rhs, args.rhs_outer, args.batch - 1, args.k - 1, args.n - 1);
  return Span(rhs.pointer, last);
}

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
#pragma unroll
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

// One step's operands of a warp, as mma.sync wants them: a thread holds, with g = lane / 4 and t = lane % 4, rows g and
// g + 8 of lhs and column g of rhs.
struct TensorFragments {
  static constexpr int STEP_K = 2 * CHUNK;  // the depth of m16n8k16 (16-bit) and m16n8k8 (TF32)
  static constexpr int SETS = 2;            // the next step's operands are loaded before this one's are multiplied
  unsigned lhs[FRAGMENTS_M][4];
  unsigned rhs[PARTS][FRAGMENTS_N][2];

  __device__ __forceinline__ void load_lhs(unsigned tile, int warp_row, int step, int lane) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
      const int first = warp_row + i * FRAGMENT_ROWS;
      if constexpr (LHS_K_CONTIGUOUS) {
        load_matrices(lhs[i],
                      tile + LhsTile::offset(first + lane % 16, step * STEP_K + lane / 16 * CHUNK, lane % 8));
      } else if constexpr (!LHS_PADDED) {
        const int k = step * STEP_K + lane / 16 * 8 + lane % 8;
        load_matrices_transposed(lhs[i], tile + LhsTile::offset(k, first + lane / 8 % 2 * CHUNK, lane % 8));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int k = step * STEP_K + j / 2 * CHUNK + lane % 4;
          lhs[i][j] = load_shared_word(tile + LhsTile::offset(k, first + j % 2 * 8 + lane / 4));
        }
      }
    }
  }

  // The rhs of fragments j and j + 1 of one part.
  __device__ __forceinline__ void load_rhs(unsigned (&first)[2], unsigned (&second)[2], unsigned tile, int column,
                                           int step, int lane) {
    unsigned matrices[4];
    if constexpr (RHS_K_CONTIGUOUS) {
      const int row = column + lane % 8 + lane / 16 * FRAGMENT_COLUMNS;
      load_matrices(matrices, tile + RhsTile::offset(row, step * STEP_K + lane / 8 % 2 * CHUNK, lane % 8));
    } else if constexpr (!RHS_PADDED) {
      const int row = step * STEP_K + lane % 16;
      load_matrices_transposed(matrices, tile + RhsTile::offset(row, column + lane / 16 * CHUNK, lane % 8));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = step * STEP_K + i % 2 * CHUNK + lane % 4;
        matrices[i] = load_shared_word(tile + RhsTile::offset(row, column + i / 2 * FRAGMENT_COLUMNS + lane / 4));
      }
    }
    first[0] = matrices[0], first[1] = matrices[1], second[0] = matrices[2], second[1] = matrices[3];
  }

  __device__ __forceinline__ void load(unsigned stage, int warp_row, int warp_column, int step) {
    const int lane = threadIdx.x % WARP_SIZE;
    load_lhs(stage, warp_row, step, lane);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; j += 2) {
        const unsigned tile = stage + LhsTile::BYTES + part * RhsTile::BYTES;
        load_rhs(rhs[part][j], rhs[part][j + 1], tile, warp_column + j * FRAGMENT_COLUMNS, step, lane);
      }
    }
  }

  // Rounds late, just before the multiplication, so that the loads above have returned by then.
  __device__ __forceinline__ void round() {
    if constexpr (MATH == Math::tf32) {
      for (auto& fragment : lhs) {
        for (unsigned& value : fragment) round_to_tf32(value);
      }
      for (auto& part : rhs) {
        for (auto& fragment : part) {
          for (unsigned& value : fragment) round_to_tf32(value);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[PARTS][FRAGMENTS_M][FRAGMENTS_N][4]) {
    round();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) multiply_fragment(Element(), acc[part][i][j], lhs[i], rhs[part][j]);
      }
    }
  }
};

// The same for exact fp32, as split_fp32.cuh says: a step's sums go to those of the tile.
struct SplitFragments : TensorFragments {
  static constexpr int SETS = 1;  // no registers are left for a second
  __device__ __forceinline__ void multiply(float (&sum)[PARTS][FRAGMENTS_M][FRAGMENTS_N][4]) {
    unsigned small_rhs[PARTS][FRAGMENTS_N][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) small_rhs[part][j][e] = split(rhs[part][j][e]);
      }
    }
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
      unsigned small_lhs[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) small_lhs[e] = split(lhs[i][e]);
      float step[PARTS][FRAGMENTS_N][4] = {};
      add_products(step, small_lhs, rhs);
      add_products(step, lhs[i], small_rhs);
      add_products(step, lhs[i], rhs);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[part][i][j][e] += step[part][j][e];
        }
      }
    }
  }

  static __device__ __forceinline__ void add_products(float (&step)[PARTS][FRAGMENTS_N][4], const unsigned (&lhs)[4],
                                                      const unsigned (&rhs)[PARTS][FRAGMENTS_N][2]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) multiply_fragment(float(), step[part][j], lhs, rhs[part][j]);
    }
  }
};

// The same for FFMA, with the accumulators where mma.sync would have them: rows g and g + 8, columns 2t and 2t + 1.
struct ScalarFragments {
  static constexpr int SETS = 2;
  static constexpr int STEP_K = 2;  // one 8-byte read a row; more would not leave registers for 128 accumulators
  float lhs[FRAGMENTS_M][2][STEP_K];
  float rhs[PARTS][FRAGMENTS_N][2][STEP_K];

  __device__ __forceinline__ void load_rhs(float (&columns)[2][STEP_K], unsigned tile, int column, int step) {
    if constexpr (RHS_K_CONTIGUOUS) {
#pragma unroll
      for (int side = 0; side < 2; ++side)
        load_shared(columns[side], tile + RhsTile::offset(column + side, step * STEP_K));
    } else {
#pragma unroll
      for (int k = 0; k < STEP_K; ++k) {
        float pair[2];
        load_shared(pair, tile + RhsTile::offset(step * STEP_K + k, column));
        columns[0][k] = pair[0], columns[1][k] = pair[1];
      }
    }
  }

  __device__ __forceinline__ void load(unsigned stage, int warp_row, int warp_column, int step) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int i = 0; i < 2 * FRAGMENTS_M; ++i) {
      const int row = warp_row + i * 8 + lane / 4;
      if constexpr (LHS_K_CONTIGUOUS) {
        load_shared(lhs[i / 2][i % 2], stage + LhsTile::offset(row, step * STEP_K, lane / 4));
      } else {
#pragma unroll
        for (int k = 0; k < STEP_K; ++k) {
          lhs[i / 2][i % 2][k] = __uint_as_float(load_shared_word(stage + LhsTile::offset(step * STEP_K + k, row)));
        }
      }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
        const unsigned tile = stage + LhsTile::BYTES + part * RhsTile::BYTES;
        load_rhs(rhs[part][j], tile, warp_column + j * FRAGMENT_COLUMNS + lane % 4 * 2, step);
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[PARTS][FRAGMENTS_M][FRAGMENTS_N][4]) const {
#pragma unroll
    for (int k = 0; k < STEP_K; ++k) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
          for (int j = 0; j < FRAGMENTS_N; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              acc[part][i][j][e] = fmaf(lhs[i][e / 2][k], rhs[part][j][e % 2][k], acc[part][i][j][e]);
            }
          }
        }
      }
    }
  }
};

template <Math>
struct FragmentsOf {
  using Type = TensorFragments;
};
template <>
struct FragmentsOf<Math::split_fp32> {
  using Type = SplitFragments;
};
template <>
struct FragmentsOf<Math::fp32> {
  using Type = ScalarFragments;
};

__device__ __forceinline__ int next_stage(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }
__device__ __forceinline__ int previous_stage(int stage) { return stage == 0 ? STAGES - 1 : stage - 1; }

// The next fragments are wanted before the next tile. But narrow copies hold registers, which only one set leaves free.
constexpr bool COPIES_FIRST = CHECKED || LHS_WIDTH < CHUNK || RHS_WIDTH < CHUNK;

// Exact fp32 sums each k tile by itself and then the tiles: a chain of k additions would lose log2(k) / 2 bits and
// more.
constexpr bool TWO_LEVELS = MATH == Math::fp32 || MATH == Math::split_fp32;

__device__ __forceinline__ void clear(float (&acc)[PARTS][FRAGMENTS_M][FRAGMENTS_N][4]) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
#pragma unroll
        for (float& value : acc[part][i][j]) value = 0.0f;
      }
    }
  }
}

// acc += sum, and sum = 0.
__device__ __forceinline__ void fold(float (&acc)[PARTS][FRAGMENTS_M][FRAGMENTS_N][4],
                                     float (&sum)[PARTS][FRAGMENTS_M][FRAGMENTS_N][4]) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[part][i][j][e] += sum[part][i][j][e];
      }
    }
  }
  clear(sum);
}

__device__ __forceinline__ bool are_far_from_infinity(const float (&acc)[PARTS][FRAGMENTS_M][FRAGMENTS_N][4]) {
  bool far = true;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) far = far && is_far_from_infinity(acc[part][i][j][e]);
      }
    }
  }
  return far;
}

// acc = lhs * rhs over all of k.
template <typename Fragments>
__device__ __forceinline__ void run_main_loop(float (&acc)[PARTS][FRAGMENTS_M][FRAGMENTS_N][4], Producer& producer,
                                              unsigned ring, int k, int warp_row, int warp_column) {
  constexpr int SETS = Fragments::SETS, STEPS = BLOCK_K / Fragments::STEP_K;
  constexpr int UNROLL = SETS == 1 ? 1 : STEPS;  // from other steps, the compiler would draw loads forward and spill
  static_assert(BLOCK_K % (2 * Fragments::STEP_K) == 0, "two sets of fragments take turns");
  float tile_sum[PARTS][FRAGMENTS_M][FRAGMENTS_N][4] = {};
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

  float acc[PARTS][FRAGMENTS_M][FRAGMENTS_N][4];
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
  for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) {
    onnxfuse::compute_tile(args, batch, onnxfuse_shared);
    __syncthreads();  // the next product's copies may overwrite what the epilogue still read
  }
}
