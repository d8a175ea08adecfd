// Global memory -> a stage of the ring: cp.async where rows lie on its boundaries, aligned words that are shifted in
// registers where they do not.
#pragma once
#include "common/addressing.cuh"
#include "common/arguments.cuh"
#include "common/checked_access.cuh"
#include "common/narrow_copy.cuh"
#include "common/ptx.cuh"
#include "portable/epilogue.cuh"
#include "portable/shared_tile.cuh"

namespace onnxfuse {

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

// CHUNK neighbours in shared memory are one piece, whose 16-bit elements come one by one: in little code, as in a kernel
// that is CHECKED, which is compiled for every fusion and hardly ever run.
template <typename Tile, bool OUTER_COLUMNS>
struct PieceCopy : TileCopy<Tile, CHUNK, OUTER_COLUMNS> {
  using Pieces = TileCopy<Tile, CHUNK, OUTER_COLUMNS>;
  using Pieces::column, Pieces::element, Pieces::row;

  static __device__ __forceinline__ bool is_written(int pass) {
    return static_cast<int>(threadIdx.x) + pass * THREADS < Pieces::COUNT;
  }

  static __device__ __forceinline__ bool is_inside(int pass, int rows, int columns) {
    return is_written(pass) && row(pass) < rows && column(pass) < columns;
  }

  static __device__ __forceinline__ unsigned target(unsigned shared, int pass) {
    return shared + Tile::offset(row(pass), column(pass));
  }

  // The elements of a piece, of which `columns - column(pass)` lie inside the tensor.
  __device__ __forceinline__ void copy_elements(unsigned shared, int pass, int rows, int columns) const {
    const int count = row(pass) < rows ? columns - column(pass) : 0;
    copy_small<sizeof(Element), CHUNK>([&](int number) {
      const unsigned to = target(shared, pass) + number * sizeof(Element);
      return SmallCopy{to, element(pass, number), number < count, true};
    });
  }

  __device__ __forceinline__ void issue(unsigned shared, int rows, int columns, const Span&) const {
#pragma unroll 1
    for (int pass = 0; pass < Pieces::PASSES; ++pass) {
      if (is_written(pass)) copy_elements(shared, pass, rows, columns);
    }
  }
};

// For rows of 16-bit elements that begin anywhere, which cp.async cannot copy: a piece is cut out of aligned words, and
// those of several pieces are under way at once. A piece that lies in two runs of columns, or whose words reach beyond
// the tensor, is copied element by element.
template <typename Tile, bool OUTER_COLUMNS>
struct ShiftedCopy : PieceCopy<Tile, OUTER_COLUMNS> {
  using Base = PieceCopy<Tile, OUTER_COLUMNS>;
  using Pieces = typename Base::Pieces;
  using Base::column, Base::element, Base::is_inside, Base::row, Base::target;
  // As many as accumulators and the parts' pointers leave registers for.
  static constexpr int MOST = PARTS * FRAGMENTS_M * FRAGMENTS_N <= 16 ? 8 : PARTS < 4 ? 4 : 2;
  static constexpr int BATCHES = (Pieces::PASSES + MOST - 1) / MOST;
  static constexpr int AT_ONCE = (Pieces::PASSES + BATCHES - 1) / BATCHES;
  static constexpr bool ALL_WRITTEN = AT_ONCE * BATCHES * THREADS == Pieces::COUNT;

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
        if (ALL_WRITTEN || Base::is_written(first + i)) store_shared(target(shared, first + i), piece);
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
      Base::copy_elements(shared, pass, rows, columns);
    }
  }
};

template <typename Tile, int WIDTH, bool OUTER_COLUMNS, int BYTES = WIDTH * sizeof(Element)>
struct OperandCopy : TileCopy<Tile, WIDTH, OUTER_COLUMNS> {};
template <typename Tile, int WIDTH, bool OUTER_COLUMNS>
struct OperandCopy<Tile, WIDTH, OUTER_COLUMNS, 2> : ShiftedCopy<Tile, OUTER_COLUMNS> {};

// What a kernel that is CHECKED falls back to.
template <typename Tile, bool OUTER_COLUMNS, int BYTES = sizeof(Element)>
struct SingleCopy : TileCopy<Tile, 1, OUTER_COLUMNS> {};
template <typename Tile, bool OUTER_COLUMNS>
struct SingleCopy<Tile, OUTER_COLUMNS, 2> : PieceCopy<Tile, OUTER_COLUMNS> {};

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
  using Narrow = SingleCopy<Tile, OUTER_COLUMNS>;

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

}  // namespace onnxfuse
