// The way of the epilogue's tensors between global memory and the registers of an mma fragment.
//
//   scalar, row, column    global -> fp32 vector in shared memory, once a block, while the pipeline fills
//   tile                   global -> this warp's staging area, as wide as the tensor allows -> 2 elements a read
//   out                    2 elements a write -> this warp's staging area -> global, as wide as the tensor allows
//   transposed             a tile or out whose contiguous axis is m: accesses go down the columns, and the staging area
//                          holds columns, so that they are wide as well
//
// The unit of work is what one thread holds of an mma fragment: 2 adjacent columns of 2 rows that lie 8 apart. From
// there, accesses of global memory would be 4 or 8 bytes long; the detour through shared memory makes them 16.
// A warp stages only its own part of the tile, so no other barrier than the warp's own is needed.
#pragma once
#include "common/arguments.cuh"
#include "common/ptx.cuh"
#include "common/epilogue_pair.cuh"
#include "common/narrow_copy.cuh"
#include "common/addressing.cuh"
#include "common/checked_access.cuh"

namespace onnxfuse {

constexpr int WARP_SIZE = 32;
constexpr int FRAGMENT_ROWS = 16;
constexpr int FRAGMENT_COLUMNS = 8;
constexpr int FRAGMENTS_M = BLOCK_M / WARPS_M / FRAGMENT_ROWS;
constexpr int FRAGMENTS_N = BLOCK_N / WARPS_N / FRAGMENT_COLUMNS;
constexpr int WARP_ROWS = FRAGMENTS_M * FRAGMENT_ROWS;
constexpr int WARP_COLUMNS = FRAGMENTS_N * FRAGMENT_COLUMNS;

// Staged rows are 8 elements longer than the data: then the 8 rows of a fragment start 4 banks (16-bit) or 8 banks
// (32-bit) apart, and a warp's 2-element accesses meet no bank conflict. Those of single bytes are 16 longer, because
// every row begins on a 16-byte boundary.
constexpr int STAGED_PITCH = WARP_COLUMNS + 8;
template <typename T>
constexpr int staged_pitch() {
  return sizeof(T) == 1 ? WARP_COLUMNS + 16 : STAGED_PITCH;
}
constexpr int STAGED_ROWS = SLABS * FRAGMENT_ROWS;

// The staging area of one tile or output. Transposed columns are 16 bytes longer than the data: then the columns that a
// warp's lanes write at once start in different banks.
template <typename Access>
struct Staged {
  using T = typename Access::Type;
  static constexpr int LINE = Access::TRANSPOSED ? STAGED_ROWS : WARP_COLUMNS;  // elements along the contiguous axis
  static constexpr int LINES = Access::TRANSPOSED ? WARP_COLUMNS : STAGED_ROWS;
  static constexpr int PER_LINE = LINE / Access::WIDTH;
  static constexpr int PITCH = Access::TRANSPOSED ? STAGED_ROWS + 16 / int(sizeof(T)) : staged_pitch<T>();

  static __device__ __forceinline__ T* at(const unsigned char* staging, int row, int column) {
    T* staged = reinterpret_cast<T*>(const_cast<unsigned char*>(staging) + Access::OFFSET);
    return staged + (Access::TRANSPOSED ? column * PITCH + row : row * PITCH + column);
  }
};

// Where a warp's part of the output tile lies, and how much of the tensor is left from there on.
struct WarpTile {
  int batch;
  int row;
  int column;
  int rows;
  int columns;
};

// One vector operand -> fp32 in shared memory. Elements outside of the tensor become 0; what they give is never stored.
template <typename Access, typename Address>
__device__ __forceinline__ void stage_vector(float* vector, const Address& address, int length, int valid) {
  using Vector = Packed<typename Access::Type, Access::WIDTH>;
#pragma unroll 1
  for (int element = threadIdx.x * Access::WIDTH; element < length; element += THREADS * Access::WIDTH) {
    Vector packed = {};
    if (element < valid) packed = load_global<Vector>(address(element));
#pragma unroll
    for (int i = 0; i < Access::WIDTH; ++i) vector[element + i] = to_float(packed.values[i]);
  }
}

// All scalar, row and column operands of the block's tile.
__device__ __forceinline__ void stage_vectors(unsigned char* vectors, const OnnxfuseArguments& args, int batch, int row,
                                              int column) {
  static_for<0, LOADS>([&](auto index) {
    constexpr int INDEX = decltype(index)::value;
    using Access = Load<INDEX>;
    float* vector = reinterpret_cast<float*>(vectors + Access::OFFSET);
    const auto at = [&](int row, int column) {
      return element_of<Access>(args.loads[INDEX], args.loads_outer[INDEX], batch, row, column);
    };
    if constexpr (Access::KIND == Kind::scalar) {
      stage_vector<Access>(vector, [&](int) { return at(0, 0); }, 1, 1);
    } else if constexpr (Access::KIND == Kind::row) {
      with_way<Access>(args, args.loads[INDEX], args.loads_outer[INDEX], [&](auto way) {
        const auto address = [&](int element) { return at(0, column + element); };
        stage_vector<decltype(way)>(vector, address, BLOCK_N, args.n - column);
      });
    } else if constexpr (Access::KIND == Kind::column) {
      stage_vector<Access>(vector, [&](int element) { return at(row + element, 0); }, BLOCK_M, args.m - row);
    }
  });
}

// body(row, column, global, inside) for every access of this lane to STAGED_ROWS rows of a tile or an output, counted
// from the warp's tile and its row `first_row`; `inside` is false where the tensor ends.
template <typename Access, typename Body>
__device__ __forceinline__ void for_each_access(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer,
                                                const WarpTile& tile, int first_row, const Body& body) {
  using Area = Staged<Access>;
  using T = typename Access::Type;
  constexpr bool ONE_LEVEL = !Access::OUTER_ROWS && !Access::OUTER_COLUMNS;
  T* origin = element_of<Access>(tensor, outer, tile.batch, tile.row + first_row, tile.column);
#pragma unroll 8
  for (int access = threadIdx.x % WARP_SIZE; access < Area::LINES * Area::PER_LINE; access += WARP_SIZE) {
    const int line = access / Area::PER_LINE;
    const int along = access % Area::PER_LINE * Access::WIDTH;
    const int row = Access::TRANSPOSED ? along : line;
    const int column = Access::TRANSPOSED ? line : along;
    const bool inside = first_row + row < tile.rows && column < tile.columns;
    T* global = origin;
    if constexpr (ONE_LEVEL) {
      global += row * (Access::TRANSPOSED && Access::WIDTH > 1 ? 1 : tensor.row_stride);
      global += column * (!Access::TRANSPOSED && Access::WIDTH > 1 ? 1 : tensor.column_stride);
    } else {
      global = element_of<Access>(tensor, outer, tile.batch, tile.row + first_row + row, tile.column + column);
    }
    body(row, column, global, inside);
  }
}

// STAGED_ROWS rows of a tile operand -> this warp's staging area, asynchronously where cp.async moves as little.
template <typename Access>
__device__ __forceinline__ void stage_tile(unsigned char* staging, const OnnxfuseTensor& tensor,
                                           const OnnxfuseOuter& outer, const WarpTile& tile, int first_row) {
  using T = typename Access::Type;
  const auto shared = [&](int row, int column) { return shared_address(Staged<Access>::at(staging, row, column)); };
  if constexpr (Access::WIDTH * sizeof(T) < CP_ASYNC_BYTES) {
    copy_small_tile<Access, STAGED_ROWS, WARP_COLUMNS>(tensor, outer, tile.batch, tile.row + first_row, tile.column,
                                                       tile.rows - first_row, tile.columns, shared);
  } else {
    const auto copy = [&](int row, int column, const T* global, bool inside) {
      copy_async<Access::WIDTH * sizeof(T)>(shared(row, column), global, inside);
    };
    for_each_access<Access>(tensor, outer, tile, first_row, copy);
  }
}

// The same of every tile operand.
__device__ __forceinline__ void stage_tiles(unsigned char* staging, const OnnxfuseArguments& args, const WarpTile& tile,
                                            int first_row) {
  static_for<0, LOADS>([&](auto index) {
    constexpr int INDEX = decltype(index)::value;
    if constexpr (Load<INDEX>::KIND == Kind::tile) {
      const OnnxfuseTensor& tensor = args.loads[INDEX];
      const OnnxfuseOuter& outer = args.loads_outer[INDEX];
      with_way<Load<INDEX>>(args, tensor, outer, [&](auto way) {
        stage_tile<decltype(way)>(staging, tensor, outer, tile, first_row);
      });
    }
  });
}

// The staging area of every output -> STAGED_ROWS rows of global memory.
__device__ __forceinline__ void store_tiles(const unsigned char* staging, const OnnxfuseArguments& args,
                                            const WarpTile& tile, int first_row) {
  static_for<0, OUTS>([&](auto index) {
    constexpr int INDEX = decltype(index)::value;
    with_way<Out<INDEX>>(args, args.outs[INDEX], args.outs_outer[INDEX], [&](auto way) {
      using Access = decltype(way);
      using T = typename Access::Type;
      const auto store = [&](int row, int column, T* global, bool inside) {
        if (!inside) return;
        store_global(global, load_packed<Packed<T, Access::WIDTH>>(Staged<Access>::at(staging, row, column)));
      };
      for_each_access<Access>(args.outs[INDEX], args.outs_outer[INDEX], tile, first_row, store);
    });
  });
}

// Fills operands[I] for the operands of one kind, 2 adjacent columns each. `column` counts from the warp's tile, and so
// does `row`, but for tiles, where it counts from the first staged row.
template <Kind KIND>
__device__ __forceinline__ void read_operands(float2 (&operands)[LOADS + 1], const unsigned char* vectors,
                                              unsigned char* staging, int row, int column) {
  static_for<0, LOADS>([&](auto index) {
    using Access = Load<decltype(index)::value>;
    float2& operand = operands[decltype(index)::value];
    if constexpr (Access::KIND == KIND && KIND == Kind::tile) {
      if constexpr (Access::TRANSPOSED) {
        operand = make_float2(to_float(*Staged<Access>::at(staging, row, column)),
                              to_float(*Staged<Access>::at(staging, row, column + 1)));
      } else {
        const auto pair = load_packed<Packed<typename Access::Type, 2>>(Staged<Access>::at(staging, row, column));
        operand = make_float2(to_float(pair.values[0]), to_float(pair.values[1]));
      }
    } else if constexpr (Access::KIND == KIND) {
      const float* vector = reinterpret_cast<const float*>(vectors + Access::OFFSET);
      const int warp = threadIdx.x / WARP_SIZE;
      if constexpr (KIND == Kind::row) {
        operand = *reinterpret_cast<const float2*>(vector + warp % WARPS_N * WARP_COLUMNS + column);
      } else {
        const float value = vector[KIND == Kind::column ? warp / WARPS_N * WARP_ROWS + row : 0];
        operand = make_float2(value, value);
      }
    }
  });
}

// The epilogue on 2 adjacent columns of one row, and the results into the staging area.
__device__ __forceinline__ void apply_epilogue(const float2 (&acc)[PARTS], const float2 (&operands)[LOADS + 1],
                                               unsigned char* staging, int row, int column) {
  float2 results[OUTS];
  apply_to_pair(acc, operands, results);
  static_for<0, OUTS>([&](auto index) {
    constexpr int INDEX = decltype(index)::value;
    using Access = Out<INDEX>;
    if constexpr (Access::TRANSPOSED) {
      Packed<typename Access::Type, 2> pair;
      store_pair(pair.values, results[INDEX].x, results[INDEX].y);
      *Staged<Access>::at(staging, row, column) = pair.values[0];
      *Staged<Access>::at(staging, row, column + 1) = pair.values[1];
    } else {
      store_pair(Staged<Access>::at(staging, row, column), results[INDEX].x, results[INDEX].y);
    }
  });
}

// Accumulators -> outputs, in passes of SLABS fragments along m: as many as the staging area holds at once.
// Expects a barrier before, behind which nobody uses the memory that `staging` (this warp's own) lies in.
__device__ __forceinline__ void run_epilogue(const float (&acc)[PARTS][FRAGMENTS_M][FRAGMENTS_N][4],
                                             const OnnxfuseArguments& args, const WarpTile& tile,
                                             const unsigned char* vectors, unsigned char* staging) {
  const int lane_row = threadIdx.x % WARP_SIZE / 4;
  const int lane_column = threadIdx.x % 4 * 2;
  float2 operands[LOADS + 1];
  read_operands<Kind::scalar>(operands, vectors, staging, 0, 0);
#pragma unroll
  for (int slab = 0; slab < FRAGMENTS_M; slab += SLABS) {
    const int first_row = slab * FRAGMENT_ROWS;
    stage_tiles(staging, args, tile, first_row);
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < FRAGMENTS_N; ++j) {
      const int column = j * FRAGMENT_COLUMNS + lane_column;
      read_operands<Kind::row>(operands, vectors, staging, 0, column);
#pragma unroll
      for (int half = 0; half < 2 * SLABS; ++half) {
        const int i = slab + half / 2;
        const int row = half * 8 + lane_row;
        read_operands<Kind::column>(operands, vectors, staging, first_row + row, column);
        read_operands<Kind::tile>(operands, vectors, staging, row, column);
        float2 pairs[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          pairs[part] = make_float2(acc[part][i][j][half % 2 * 2], acc[part][i][j][half % 2 * 2 + 1]);
        }
        apply_epilogue(pairs, operands, staging, row, column);
      }
    }
    __syncwarp();
    store_tiles(staging, args, tile, first_row);
    __syncwarp();
  }
}

}  // namespace onnxfuse
