// The epilogue of the sm_90a kernel: the same ways and the same unit of work (2 adjacent columns of 2 rows that lie 8
// apart) as portable/epilogue.cuh, on the accumulators of wgmma. A warp owns 16 rows of each wgmma; it stages them one
// slab of SLAB_COLUMNS columns after the other in shared memory of its own, so the only barrier is the warp's own.
//
//   scalar, row, column    global -> fp32 vector in shared memory, by a warp of its own, some tiles ahead
//   tile                   global -> staging areas of a group, by a warp of its own, a tile or two slabs ahead
//   transposed             a tile or out whose contiguous axis is m: the staging area holds columns
//   tile, IN_PLACE         by TMA; the slab of out replaces it where it lies, and TMA stores that (slabs.cuh)
//   out                    registers -> staging area -> global, by TMA while the next slab is computed; where TMA
//                          cannot address the tensor, by this warp, as wide as the tensor allows
#pragma once
#include "common/arguments.cuh"
#include "common/epilogue_pair.cuh"
#include "common/narrow_copy.cuh"
#include "common/addressing.cuh"
#include "hopper/ptx.cuh"

namespace onnxfuse {

constexpr int WARP_SIZE = 32;
constexpr int WARP_ROWS = 16;      // rows of one wgmma in a warp
constexpr int GROUP_WGMMA_ROWS = 64;
constexpr int FRAGMENT_COLUMNS = 8;
constexpr int SUBTILES = GROUP_M / GROUP_WGMMA_ROWS;  // wgmma along m of one consumer group
constexpr int WIDTH = PARTS * BLOCK_N;                // columns of one wgmma
constexpr int ACCUMULATORS = WIDTH / 2;               // registers of one wgmma in a thread
constexpr int SLABS_N = (BLOCK_N + SLAB_COLUMNS - 1) / SLAB_COLUMNS;
constexpr bool SLABS_FILL = BLOCK_N % SLAB_COLUMNS == 0;  // else the last slab ends with 8 columns that are not the tile's
constexpr int SLABS = SUBTILES * SLABS_N;
constexpr bool IN_PLACE = IN_PLACE_LOAD >= 0;       // out lies where this tile operand was
constexpr bool SENDS_OFTEN = SPLITS > 1 && !LAST_WAVE_SPLIT;  // sums of tile after tile to the same place
constexpr int SLAB_BLOCKS = SENDS_OFTEN ? SPLITS : 1;  // that each have the slabs of some of a group's warps
constexpr bool HAS_SLABS = TILE_LOADS > 0 || SERVED;  // producer warps hand buffers to the consumers

// Rows that threads copy are 8 elements longer than the data: then the 8 rows of a fragment start in different banks.
// Those of single bytes are 16 longer, because every row begins on a 16-byte boundary.
constexpr int STAGED_PITCH = SLAB_COLUMNS + 8;
template <typename T>
constexpr int staged_pitch() {
  return sizeof(T) == 1 ? SLAB_COLUMNS + 16 : STAGED_PITCH;
}

// Rows that TMA stores are as long as the box, and swizzled where their length is a span of TMA's swizzles; the other
// lengths (48, 80, ...) spread the 8 rows over the banks well enough.
constexpr int BOX_BYTES = SLAB_COLUMNS * 2;
constexpr int BOX_CHUNKS = BOX_BYTES == 32 || BOX_BYTES == 64 || BOX_BYTES == 128 ? BOX_BYTES / 16 : 1;
constexpr int BOX_ROWS = SERVED ? GROUP_WGMMA_ROWS : WARP_ROWS;  // of a group's slab, or a warp's part of it

// Offset of 8 elements that begin at `column`, a multiple of 8.
__device__ __forceinline__ int box_offset(int row, int column) {
  const int chunk = column / 8;
  return row * BOX_BYTES + (BOX_CHUNKS > 1 ? chunk ^ row / (8 / BOX_CHUNKS) % BOX_CHUNKS : chunk) * 16;
}

// The kernel's second argument. Of rhs, those of all parts' first columns and, with two pieces, those of the others;
// `outs` holds maps of the outputs that TMA stores only and, with IN_PLACE, behind them that of the tile operand.
struct Maps {
  TensorMap lhs;
  TensorMap rhs[RHS_PIECES * PARTS];
  TensorMap outs[OUTS + IN_PLACE];
};
constexpr int MAPS = sizeof(Maps) / sizeof(TensorMap);

// With SWAPPED the kernel's rows are the columns of the output: what the arguments call [m, n] it sees as [n, m].
__device__ __forceinline__ int rows_of(const OnnxfuseArguments& args) { return SWAPPED ? args.n : args.m; }
__device__ __forceinline__ int columns_of(const OnnxfuseArguments& args) { return SWAPPED ? args.m : args.n; }
__device__ __forceinline__ OnnxfuseTensor swapped(const OnnxfuseTensor& tensor) {
  return {tensor.pointer, tensor.batch_stride, tensor.column_stride, tensor.row_stride};
}
__device__ __forceinline__ OnnxfuseOuter swapped(const OnnxfuseOuter& outer) {
  return {outer.column_stride, outer.row_stride, outer.batch_stride, outer.columns, outer.rows, outer.batches};
}
template <typename T>
__device__ __forceinline__ decltype(auto) seen(const T& walked) {
  if constexpr (SWAPPED) {
    return swapped(walked);
  } else {
    return (walked);
  }
}

// Where a tile of the output, or a consumer group's part of it, begins. In shared memory it precedes the vectors.
struct alignas(16) OutTile {
  int batch, row, column, unused;
};
static_assert(sizeof(OutTile) == TILE_BYTES, "footprint and kernel agree");

// 16 rows x SLAB_COLUMNS of the output, and how much of the tensor is left from there on.
struct Slab {
  long long batch, row, column;
  int rows, columns;

  __device__ __forceinline__ Slab(const OnnxfuseArguments& args, const OutTile& tile, int index, int warp) {
    const int first_row = tile.row + index / SLABS_N * GROUP_WGMMA_ROWS + warp * WARP_ROWS;
    const int first_column = tile.column + index % SLABS_N * SLAB_COLUMNS;
    batch = tile.batch, row = first_row, column = first_column;
    rows = rows_of(args) - first_row, columns = columns_of(args) - first_column;
    if constexpr (!SLABS_FILL) columns = min(columns, BLOCK_N - index % SLABS_N * SLAB_COLUMNS);
  }
};

// One vector operand, times `scale` -> fp32 in shared memory, by one warp. Elements outside of the tensor become 0; what
// they give is never stored.
template <typename Access>
__device__ __forceinline__ void stage_vector(float* vector, const typename Access::Type* global, long long stride,
                                             int length, int valid, float scale = 1.0f) {
  using Vector = Packed<typename Access::Type, Access::WIDTH>;
#pragma unroll 1
  for (int element = threadIdx.x % WARP_SIZE * Access::WIDTH; element < length; element += WARP_SIZE * Access::WIDTH) {
    Vector packed = {};
    if (element < valid) packed = load_global<Vector>(global + element * (Access::WIDTH > 1 ? 1 : stride));
#pragma unroll
    for (int i = 0; i < Access::WIDTH; ++i) vector[element + i] = to_float(packed.values[i]) * scale;
  }
}

// All scalar, row and column operands of a block's tile.
__device__ __forceinline__ void stage_vectors(unsigned char* vectors, const OnnxfuseArguments& args,
                                              const OutTile& tile) {
  static_for<0, LOADS>([&](auto index) {
    using Access = Load<decltype(index)::value>;
    const OnnxfuseTensor& tensor = seen(args.loads[decltype(index)::value]);
    const OnnxfuseOuter& outer = seen(args.loads_outer[decltype(index)::value]);
    float* vector = reinterpret_cast<float*>(vectors + Access::OFFSET);
    if constexpr (Access::KIND == Kind::scalar) {
      stage_vector<Access>(vector, element_of<Access>(tensor, outer, tile.batch, 0, 0), 0, 1, 1);
    } else if constexpr (Access::KIND == Kind::row) {
      const auto* global = element_of<Access>(tensor, outer, tile.batch, 0, tile.column);
      const float scale = HALVED_LOADS >> decltype(index)::value & 1 ? 0.5f : 1.0f;
      stage_vector<Access>(vector, global, tensor.column_stride, BLOCK_N, columns_of(args) - tile.column, scale);
    } else if constexpr (Access::KIND == Kind::column) {
      const auto* global = element_of<Access>(tensor, outer, tile.batch, tile.row, 0);
      stage_vector<Access>(vector, global, tensor.row_stride, BLOCK_M, rows_of(args) - tile.row);
    }
  });
}

// Where an element of a slab lies in a staging area that threads copy. Transposed columns are 16 bytes longer than the
// data.
template <typename Access>
struct Staged {
  using T = typename Access::Type;
  static constexpr int PITCH = Access::TRANSPOSED ? WARP_ROWS + 16 / int(sizeof(T)) : staged_pitch<T>();
  static constexpr int ELEMENTS = (Access::TRANSPOSED ? SLAB_COLUMNS : WARP_ROWS) * PITCH;

  static __device__ __forceinline__ int offset(int row, int column) {
    return Access::TRANSPOSED ? column * PITCH + row : row * PITCH + column;
  }
};

// The same as SlabCopy for tensors that are transposed or walked in two levels.
template <typename Access>
struct WalkedCopy {
  using T = typename Access::Type;
  static constexpr int LINE = Access::TRANSPOSED ? WARP_ROWS : SLAB_COLUMNS;
  static constexpr int ACCESSES = WARP_ROWS * SLAB_COLUMNS / Access::WIDTH;

  template <typename Area, typename Body>
  static __device__ __forceinline__ void for_each(const Slab& slab, Area* staged, const OnnxfuseTensor& tensor,
                                                  const OnnxfuseOuter& outer, const Body& body) {
#pragma unroll 2
    for (int access = threadIdx.x % WARP_SIZE; access < ACCESSES; access += WARP_SIZE) {
      const int line = access / (LINE / Access::WIDTH);
      const int along = access % (LINE / Access::WIDTH) * Access::WIDTH;
      const int row = Access::TRANSPOSED ? along : line;
      const int column = Access::TRANSPOSED ? line : along;
      T* global = element_of<Access>(tensor, outer, slab.batch, slab.row + row, slab.column + column);
      body(staged + Staged<Access>::offset(row, column), global, row < slab.rows && column < slab.columns);
    }
  }
};

// The copies of one lane between a slab in shared memory and a tensor: whole rows a pass where a row has at most as
// many accesses as a warp has lanes, so that all passes differ by constants only.
template <typename Access>
struct SlabCopy {
  using T = typename Access::Type;
  static constexpr int PER_ROW = SLAB_COLUMNS / Access::WIDTH;
  static constexpr int ROWS = PER_ROW <= WARP_SIZE ? WARP_SIZE / PER_ROW : 1;
  static constexpr int ROW_LANES = PER_ROW <= WARP_SIZE ? PER_ROW : WARP_SIZE;
  static constexpr int PASSES = (WARP_ROWS + ROWS - 1) / ROWS;

  // body(staged, global, inside) for every access of the slab's rows, which begin at `staged` and `tensor`; `inside` is
  // false where the slab or the tensor ends.
  template <typename Area, typename Body>
  static __device__ __forceinline__ void for_each(const Slab& slab, Area* staged, const OnnxfuseTensor& tensor,
                                                  const OnnxfuseOuter& outer, const Body& body) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int first_row = lane / ROW_LANES;
    const int rows = (lane < ROWS * ROW_LANES ? min(slab.rows, WARP_ROWS) : 0) - first_row;
    const long long step = ROWS * tensor.row_stride;
#pragma unroll 1
    for (int column = lane % ROW_LANES * Access::WIDTH; column < SLAB_COLUMNS; column += WARP_SIZE * Access::WIDTH) {
      const int limit = column < slab.columns ? rows : 0;
      T* global = element_of<Access>(tensor, outer, slab.batch, slab.row + first_row, slab.column);
      global += column * (Access::WIDTH > 1 ? 1 : tensor.column_stride);
      Area* shared = staged + first_row * staged_pitch<T>() + column;
#pragma unroll (PASSES <= 8 ? PASSES : 2)
      for (int pass = 0; pass < PASSES; ++pass, global += step) {
        body(shared + pass * ROWS * staged_pitch<T>(), global, pass * ROWS < limit);
      }
      if (PER_ROW <= WARP_SIZE) break;
    }
  }
};

template <typename Access, bool PLAIN = !Access::TRANSPOSED && !Access::OUTER_ROWS && !Access::OUTER_COLUMNS>
struct CopyOf {
  using Type = SlabCopy<Access>;
};
template <typename Access>
struct CopyOf<Access, false> {
  using Type = WalkedCopy<Access>;
};

// One slab of every tile operand -> the staging areas of every SLAB_BLOCKS-th of a group's warps, asynchronously where
// cp.async moves as little. `staging` is that of the first one, number `first`.
__device__ __forceinline__ void load_slab(unsigned char* staging, const OnnxfuseArguments& args, const OutTile& tile,
                                          int index, int first) {
#pragma unroll 1
  for (int warp = first; warp < WARP_GROUP / WARP_SIZE; warp += SLAB_BLOCKS, staging += SLAB_BLOCKS * STAGING_BYTES) {
    const Slab slab(args, tile, index, warp);
    static_for<0, LOADS>([&](auto number) {
      using Access = Load<decltype(number)::value>;
      using T = typename Access::Type;
      if constexpr (Access::KIND == Kind::tile) {
        constexpr int NUMBER = decltype(number)::value;
        const OnnxfuseTensor& tensor = seen(args.loads[NUMBER]);
        const OnnxfuseOuter& outer = seen(args.loads_outer[NUMBER]);
        T* staged = reinterpret_cast<T*>(staging + Access::OFFSET) + index % LOAD_BUFFERS * Staged<Access>::ELEMENTS;
        if constexpr (Access::WIDTH * sizeof(T) < CP_ASYNC_BYTES) {
          const auto shared = [&](int row, int column) {
            return shared_address(staged + Staged<Access>::offset(row, column));
          };
          if constexpr (is_ragged<Access>()) {
            if (tensor.column_stride == 1) {
              const T* first = element_of<Access>(tensor, outer, slab.batch, slab.row, slab.column);
              const auto* begin = static_cast<const T*>(tensor.pointer);
              const T* last = element_of<Access>(tensor, outer, args.batch - 1, rows_of(args) - 1, columns_of(args) - 1);
              copy_ragged_tile<WARP_ROWS, SLAB_COLUMNS>(first, tensor.row_stride, begin, last + 1, slab.rows, shared);
              return;
            }
          }
          copy_small_tile<Access, WARP_ROWS, SLAB_COLUMNS>(tensor, outer, slab.batch, slab.row, slab.column, slab.rows,
                                                           slab.columns, shared);
        } else {
          const auto copy = [](T* shared, const T* global, bool inside) {
            if (inside) copy_async<Access::WIDTH * sizeof(T)>(shared_address(shared), global, true);
          };
          CopyOf<Access>::Type::for_each(slab, staged, tensor, outer, copy);
        }
      }
    });
  }
}

// The parity of a slab's barrier: how often its buffer was used before, in this group's tile number `count`.
__device__ __forceinline__ int slab_parity(int count, int index) {
  const int uses = (SLABS - 1 - index % LOAD_BUFFERS) / LOAD_BUFFERS + 1;
  return count * uses + index / LOAD_BUFFERS & 1;
}

// The staging area of every output that TMA cannot store -> global memory.
__device__ __forceinline__ void store_slab(const unsigned char* staging, const OnnxfuseArguments& args,
                                           const Slab& slab) {
  static_for<0, OUTS>([&](auto number) {
    using Access = Out<decltype(number)::value>;
    using T = typename Access::Type;
    if constexpr (!Access::TMA_STORED) {
      constexpr int NUMBER = decltype(number)::value;
      const T* staged = reinterpret_cast<const T*>(staging + Access::OFFSET);
      const auto store = [](const T* shared, T* global, bool inside) {
        if (inside) store_global(global, load_packed<Packed<T, Access::WIDTH>>(shared));
      };
      CopyOf<Access>::Type::for_each(slab, staged, seen(args.outs[NUMBER]), seen(args.outs_outer[NUMBER]), store);
    }
  });
}

// A slab whose rows lie in several runs, by the warp: TMA clips what lies behind a tensor's end, but a box that it
// stores may not begin before the first row, so it cannot store the part of a slab that belongs to a later run.
template <typename Access>
__device__ __forceinline__ void copy_box(const unsigned char* staged, const OnnxfuseTensor& tensor,
                                         const OnnxfuseOuter& outer, const Slab& slab) {
  constexpr int CHUNK = 8;  // elements of 16 bytes
  constexpr int CHUNKS = SLAB_COLUMNS / CHUNK;
#pragma unroll 1
  for (int chunk = threadIdx.x % WARP_SIZE; chunk < WARP_ROWS * CHUNKS; chunk += WARP_SIZE) {
    const int row = chunk / CHUNKS, column = chunk % CHUNKS * CHUNK;
    if (row >= slab.rows || column >= slab.columns) continue;
    const auto* from = reinterpret_cast<const typename Access::Type*>(staged + box_offset(row, column));
    store_global(element_of<Access>(tensor, outer, slab.batch, slab.row + row, slab.column + column),
                 load_packed<Packed<typename Access::Type, CHUNK>>(from));
  }
}

// A slab of an output that is walked in two levels, which lies in one run of columns.
template <typename Access>
__device__ __forceinline__ void store_runs(const TensorMap& map, const unsigned char* staged,
                                           const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, const Slab& slab) {
  const int column = slab.column, row = slab.row;
  const int column_run = Access::OUTER_COLUMNS ? column / outer.columns : 0;
  const int row_run = Access::OUTER_ROWS ? row / outer.rows : 0;
  const int first_row = row - row_run * outer.rows;
  if (Access::OUTER_ROWS && first_row + min(slab.rows, WARP_ROWS) > outer.rows) {
    copy_box<Access>(staged, tensor, outer, slab);
  } else if (is_elected()) {
    store_box(map, shared_address(staged), column - column_run * outer.columns, first_row, column_run, row_run,
              slab.batch);
  }
}

// The staging areas of the other outputs -> global memory, by one of the warp's threads where TMA can.
__device__ __forceinline__ void store_boxes(const unsigned char* staging, const OnnxfuseArguments& args,
                                            const Maps& maps, const Slab& slab, int buffer) {
  const bool leader = is_elected();
  static_for<0, OUTS>([&](auto number) {
    constexpr int NUMBER = decltype(number)::value;
    using Access = Out<NUMBER>;
    if constexpr (Access::TMA_STORED) {
      const unsigned char* staged = staging + Access::OFFSET + buffer * WARP_ROWS * BOX_BYTES;
      const TensorMap& map = maps.outs[NUMBER];
      if constexpr (Access::OUTER_ROWS || Access::OUTER_COLUMNS) {
        store_runs<Access>(map, staged, args.outs[NUMBER], args.outs_outer[NUMBER], slab);
      } else {
        if (leader) store_box(map, shared_address(staged), slab.column, slab.row, slab.batch);
      }
    }
  });
  if (leader) store_commit();
}

// What the functor needs for 16 rows x 16 columns: 4 pairs a thread, [fragment along n][half along m].
constexpr int UNIT_COLUMNS = 2 * FRAGMENT_COLUMNS;
using UnitOperands = float2[2][2][LOADS + 1];

// Whether columns from `column` on are a tile's: of the last unit those of the second fragment may not be.
__device__ __forceinline__ constexpr bool is_in_tile(int column) { return SLABS_FILL || column < BLOCK_N; }

// Of each tile operand whose rows begin anywhere, what lies before this thread's rows where they are staged. They are 8
// apart, as a multiple of rows is from slab to slab, so that it is the same for all rows of a group's tile.
struct Shifts {
  int of[LOADS + 1];
};

__device__ __forceinline__ Shifts shifts_of(const OnnxfuseArguments& args, const OutTile& tile) {
  Shifts shifts;
  static_for<0, LOADS>([&](auto index) {
    constexpr int INDEX = decltype(index)::value;
    using Access = Load<INDEX>;
    if constexpr (Access::KIND == Kind::tile && is_ragged<Access>()) {
      const OnnxfuseTensor& tensor = seen(args.loads[INDEX]);
      const auto* row = element_of<Access>(tensor, seen(args.loads_outer[INDEX]), tile.batch,
                                           tile.row + threadIdx.x % WARP_SIZE / 4, tile.column);
      shifts.of[INDEX] = tensor.column_stride == 1 ? shift_of(row) : 0;
    }
  });
  return shifts;
}

// Two neighbours of a warp's slab of a tile operand, from `lane_column` of the fragment at `column` on; what begins
// anywhere lies `shift` elements later.
template <typename Access>
__device__ __forceinline__ float2 read_staged(const unsigned char* staging, int row, int column, int lane_column,
                                              int buffer, int shift) {
  using T = typename Access::Type;
  const T* staged = reinterpret_cast<const T*>(staging + Access::OFFSET);
  const T* first = staged + buffer * Staged<Access>::ELEMENTS + Staged<Access>::offset(row, column + lane_column);
  if constexpr (IN_PLACE) {
    const int offset = buffer * BOX_ROWS * BOX_BYTES + box_offset(row, column);
    first = reinterpret_cast<const T*>(staging + offset) + lane_column;
  } else if constexpr (Access::TRANSPOSED) {
    return make_float2(to_float(first[0]), to_float(first[Staged<Access>::PITCH]));
  } else if constexpr (is_ragged<Access>()) {
    return make_float2(to_float(first[shift]), to_float(first[shift + 1]));
  }
  const auto pair = load_packed<Packed<T, 2>>(first);
  return make_float2(to_float(pair.values[0]), to_float(pair.values[1]));
}

// Operands of the unit whose first column, counted from the group's tile, is `first_column` and from the slab `column`.
__device__ __forceinline__ void read_operands(UnitOperands& operands, const unsigned char* vectors,
                                              const unsigned char* staging, int first_row, int first_column,
                                              int column, int buffer, const Shifts& shifts) {
  const int lane_row = threadIdx.x % WARP_SIZE / 4;
  const int lane_column = threadIdx.x % 4 * 2;
  static_for<0, LOADS>([&](auto index) {
    constexpr int INDEX = decltype(index)::value;
    using Access = Load<INDEX>;
    const float* vector = reinterpret_cast<const float*>(vectors + Access::OFFSET);
#pragma unroll
    for (int fragment = 0; fragment < 2; ++fragment) {
      if (!is_in_tile(first_column + fragment * FRAGMENT_COLUMNS)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2& operand = operands[fragment][half][INDEX];
        const int row = half * 8 + lane_row;
        const int fragment_column = fragment * FRAGMENT_COLUMNS + lane_column;
        if constexpr (Access::KIND == Kind::tile) {
          const int shift = is_ragged<Access>() ? shifts.of[INDEX] : 0;
          operand = read_staged<Access>(staging, row, column + fragment * FRAGMENT_COLUMNS, lane_column, buffer, shift);
        } else if constexpr (Access::KIND == Kind::row) {
          operand = *reinterpret_cast<const float2*>(vector + first_column + fragment_column);
        } else {
          const float value = vector[Access::KIND == Kind::column ? first_row + row : 0];
          operand = make_float2(value, value);
        }
      }
    }
  });
}

// One output's pairs of a unit -> staging area: one instruction for 16-bit elements.
template <typename Access>
__device__ __forceinline__ void stage_unit(unsigned char* staged, int column, const float2 (&pairs)[2][2]) {
  using T = typename Access::Type;
  const int lane = threadIdx.x % WARP_SIZE;
  T* padded = reinterpret_cast<T*>(staged);
  if constexpr (sizeof(T) == 2) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_pair(T(), pairs[i / 2][i % 2].x, pairs[i / 2][i % 2].y);
    if constexpr (Access::TRANSPOSED) {
      const int first = column + lane / 16 * FRAGMENT_COLUMNS + lane % 8;
      const int offset = Staged<Access>::offset(lane / 8 % 2 * 8, first) * 2;
      store_matrices_transposed(shared_address(staged + offset), words);
    } else {
      const int row = lane % 16;
      const int first = column + lane / 16 * FRAGMENT_COLUMNS;
      const int offset = Access::TMA_STORED ? box_offset(row, first) : (row * STAGED_PITCH + first) * 2;
      store_matrices(shared_address(staged + offset), words);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i % 2 * 8 + lane / 4;
      const float2 pair = pairs[i / 2][i % 2];
      T* first = padded + Staged<Access>::offset(row, column + i / 2 * FRAGMENT_COLUMNS + lane % 4 * 2);
      if constexpr (Access::TRANSPOSED) {
        first[0] = pair.x;
        first[Staged<Access>::PITCH] = pair.y;
      } else {
        store_pair(first, pair.x, pair.y);
      }
    }
  }
}

// The register that holds a part's column `column`, the first of a unit: the columns of a piece lie side by side for
// all parts, one piece behind the other.
__device__ __forceinline__ constexpr int accumulator_of(int part, int column) {
  return column < RHS_COLUMNS ? (part * RHS_COLUMNS + column) / 2
                              : (PARTS * RHS_COLUMNS + part * (BLOCK_N - RHS_COLUMNS) + column - RHS_COLUMNS) / 2;
}

// The functor on one unit, and the results into the staging area.
__device__ __forceinline__ void run_unit(const float (&acc)[ACCUMULATORS], const UnitOperands& operands,
                                         unsigned char* staging, int first_column, int column, int buffer) {
  float2 results[2][2][OUTS];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!is_in_tile(first_column + i / 2 * FRAGMENT_COLUMNS)) continue;
    float2 pairs[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int first = accumulator_of(part, first_column) + i / 2 * 4 + i % 2 * 2;
      pairs[part] = make_float2(acc[first], acc[first + 1]);
    }
    apply_to_pair(pairs, operands[i / 2][i % 2], results[i / 2][i % 2]);
  }
  if constexpr (IN_PLACE) __syncwarp();  // all lanes have read what is overwritten
  static_for<0, OUTS>([&](auto index) {
    constexpr int INDEX = decltype(index)::value;
    const float2 pairs[2][2] = {{results[0][0][INDEX], results[0][1][INDEX]},
                                {results[1][0][INDEX], results[1][1][INDEX]}};
    const int offset = Out<INDEX>::OFFSET + (Out<INDEX>::TMA_STORED ? buffer * BOX_ROWS * BOX_BYTES : 0);
    stage_unit<Out<INDEX>>(staging + offset, column, pairs);
  });
}

// Shared memory of a warp's epilogue.
struct EpilogueMemory {
  const unsigned char* vectors;  // row, column and scalar operands of the block's tile
  unsigned char* staging;        // of the warp
  unsigned slabs_full;           // barriers of the group's tile operands
  unsigned slabs_empty;
};

// The slab's tile operands have come, and the staging buffer of its outputs is free.
__device__ __forceinline__ void await_slab(const EpilogueMemory& memory, int count, int index, bool leader) {
  if constexpr (HAS_SLABS) barrier_wait(memory.slabs_full + index % LOAD_BUFFERS * 8, slab_parity(count, index));
  if constexpr (TMA_STORED_OUTS > 0 && !SERVED) {
    // The buffer's last store was OUT_BUFFERS slabs ago, or fewer where tiles have an odd number of them.
    const bool follows = OUT_BUFFERS == 2 && (index > 0 || SLABS % 2 == 0);
    if (leader && follows) store_wait<1>();
    if (leader && !follows) store_wait<0>();
  }
  __syncwarp();
}

// Accumulators -> outputs of the group's tile number `count`. `first_row` is the group's place in the block's tile.
//
// With OPERANDS_AHEAD, a unit's operands are read before the last one's results are written; the compiler would not swap
// them, because it cannot tell that they do not overlap. Pays where the epilogue outlasts the main loop.
__device__ __forceinline__ void run_epilogue(const float (&acc)[SUBTILES][ACCUMULATORS],
                                             const OnnxfuseArguments& args, const Maps& maps, const OutTile& tile,
                                             int first_row, const EpilogueMemory& memory, int count) {
  const int warp = threadIdx.x % WARP_GROUP / WARP_SIZE;
  const int warp_row = first_row + warp * WARP_ROWS;
  const bool leader = is_elected();
  const Shifts shifts = shifts_of(args, tile);
#pragma unroll
  for (int index = 0; index < SLABS; ++index) {
    const int slab_column = index % SLABS_N * SLAB_COLUMNS;
    const int row = index / SLABS_N * GROUP_WGMMA_ROWS + warp_row;
    const int buffer = index % (SERVED ? LOAD_BUFFERS : OUT_BUFFERS);
    await_slab(memory, count, index, leader);
    UnitOperands operands[2];
    const auto read = [&](UnitOperands& target, int column) {
      const int load_buffer = TILE_LOADS > 0 ? index % LOAD_BUFFERS : 0;
      read_operands(target, memory.vectors, memory.staging, row, slab_column + column, column, load_buffer,
                    shifts);
    };
    read(operands[0], 0);
#pragma unroll
    for (int column = 0; column < SLAB_COLUMNS; column += UNIT_COLUMNS) {
      const int current = OPERANDS_AHEAD ? column / UNIT_COLUMNS % 2 : 0;
      const int next = column + UNIT_COLUMNS;
      if (!OPERANDS_AHEAD && column > 0) read(operands[0], column);
      if (OPERANDS_AHEAD && next < SLAB_COLUMNS) read(operands[current ^ 1], next);
      run_unit(acc[index / SLABS_N], operands[current], memory.staging, slab_column + column, column, buffer);
    }
    if constexpr (TMA_STORED_OUTS > 0) shared_to_tma_fence();
    __syncwarp();
    if (HAS_SLABS && leader) barrier_arrive(memory.slabs_empty + index % LOAD_BUFFERS * 8);
    if constexpr (SERVED) continue;
    const Slab slab(args, tile, index, warp);
    if constexpr (TMA_STORED_OUTS < OUTS) store_slab(memory.staging, args, slab);
    if constexpr (TMA_STORED_OUTS > 0) store_boxes(memory.staging, args, maps, slab, buffer);
  }
}

}  // namespace onnxfuse
