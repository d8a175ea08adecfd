// The way of the epilogue's tensors between global memory and the registers of an mma fragment.
//
//   scalar, row, column    global -> fp32 vector in shared memory, once a block, while the pipeline fills
//   tile                   global -> this warp's staging area, as wide as the tensor allows -> 2 elements a read
//   out                    2 elements a write -> this warp's staging area -> global, as wide as the tensor allows
//
// The unit of work is what one thread holds of an mma fragment: 2 adjacent columns of 2 rows that lie 8 apart. From
// there, accesses of global memory would be 4 or 8 bytes long; the detour through shared memory makes them 16.
// A warp stages only its own part of the tile, so no other barrier than the warp's own is needed.
#pragma once
#include "arguments.cuh"
#include "ptx.cuh"

namespace onnxfuse {

constexpr int WARP_SIZE = 32;
constexpr int FRAGMENT_ROWS = 16;
constexpr int FRAGMENT_COLUMNS = 8;
constexpr int FRAGMENTS_M = BLOCK_M / WARPS_M / FRAGMENT_ROWS;
constexpr int FRAGMENTS_N = BLOCK_N / WARPS_N / FRAGMENT_COLUMNS;
constexpr int WARP_ROWS = FRAGMENTS_M * FRAGMENT_ROWS;
constexpr int WARP_COLUMNS = FRAGMENTS_N * FRAGMENT_COLUMNS;

// Staged rows are 8 elements longer than the data: then the 8 rows of a fragment start 4 banks (16-bit) or 8 banks
// (32-bit) apart, and a warp's 2-element accesses meet no bank conflict.
constexpr int STAGED_PITCH = WARP_COLUMNS + 8;
constexpr int STAGED_ROWS = SLABS * FRAGMENT_ROWS;

// Where a warp's part of the output tile lies, and how much of the tensor is left from there on.
struct WarpTile {
  int batch;
  int row;
  int column;
  int rows;
  int columns;
};

template <typename T>
__device__ __forceinline__ T* element_pointer(const OnnxfuseTensor& tensor, long long batch, long long row,
                                              long long column) {
  return static_cast<T*>(tensor.pointer) + batch * tensor.batch_stride + row * tensor.row_stride +
         column * tensor.column_stride;
}

// One vector operand -> fp32 in shared memory. Elements outside of the tensor become 0; what they give is never stored.
template <typename Access>
__device__ __forceinline__ void stage_vector(float* vector, const typename Access::Type* global, long long stride,
                                             int length, int valid) {
  using Vector = Packed<typename Access::Type, Access::WIDTH>;
#pragma unroll 1
  for (int element = threadIdx.x * Access::WIDTH; element < length; element += THREADS * Access::WIDTH) {
    Vector packed = {};
    if (element < valid) packed = load_global<Vector>(global + element * (Access::WIDTH > 1 ? 1 : stride));
#pragma unroll
    for (int i = 0; i < Access::WIDTH; ++i) vector[element + i] = to_float(packed.values[i]);
  }
}

// All scalar, row and column operands of the block's tile.
__device__ __forceinline__ void stage_vectors(unsigned char* vectors, const OnnxfuseArguments& args, int batch, int row,
                                              int column) {
  static_for<0, LOADS>([&](auto index) {
    using Access = Load<decltype(index)::value>;
    const OnnxfuseTensor& tensor = args.loads[decltype(index)::value];
    float* vector = reinterpret_cast<float*>(vectors + Access::OFFSET);
    if constexpr (Access::KIND == Kind::scalar) {
      stage_vector<Access>(vector, element_pointer<typename Access::Type>(tensor, batch, 0, 0), 0, 1, 1);
    } else if constexpr (Access::KIND == Kind::row) {
      const auto* global = element_pointer<typename Access::Type>(tensor, batch, 0, column);
      stage_vector<Access>(vector, global, tensor.column_stride, BLOCK_N, args.n - column);
    } else if constexpr (Access::KIND == Kind::column) {
      const auto* global = element_pointer<typename Access::Type>(tensor, batch, row, 0);
      stage_vector<Access>(vector, global, tensor.row_stride, BLOCK_M, args.m - row);
    }
  });
}

// STAGED_ROWS rows of one tile operand -> this warp's staging area, asynchronously.
template <typename Access>
__device__ __forceinline__ void stage_tile(typename Access::Type* staged, const OnnxfuseTensor& tensor,
                                           const WarpTile& tile, int first_row) {
  using T = typename Access::Type;
  constexpr int WIDTH = Access::WIDTH;
  constexpr int PER_ROW = WARP_COLUMNS / WIDTH;
  const T* global = element_pointer<T>(tensor, tile.batch, tile.row + first_row, tile.column);
#pragma unroll 8
  for (int copy = threadIdx.x % WARP_SIZE; copy < STAGED_ROWS * PER_ROW; copy += WARP_SIZE) {
    const int row = copy / PER_ROW;
    const int column = copy % PER_ROW * WIDTH;
    const bool inside = first_row + row < tile.rows && column < tile.columns;
    const T* source = global + row * tensor.row_stride + column * (WIDTH > 1 ? 1 : tensor.column_stride);
    copy_async<WIDTH * sizeof(T)>(shared_address(staged + row * STAGED_PITCH + column), source, inside);
  }
}

// The staging area of one output -> STAGED_ROWS rows of global memory.
template <typename Access>
__device__ __forceinline__ void store_tile(const typename Access::Type* staged, const OnnxfuseTensor& tensor,
                                           const WarpTile& tile, int first_row) {
  using T = typename Access::Type;
  constexpr int WIDTH = Access::WIDTH;
  constexpr int PER_ROW = WARP_COLUMNS / WIDTH;
  T* global = element_pointer<T>(tensor, tile.batch, tile.row + first_row, tile.column);
#pragma unroll 8
  for (int copy = threadIdx.x % WARP_SIZE; copy < STAGED_ROWS * PER_ROW; copy += WARP_SIZE) {
    const int row = copy / PER_ROW;
    const int column = copy % PER_ROW * WIDTH;
    if (first_row + row >= tile.rows || column >= tile.columns) continue;
    T* target = global + row * tensor.row_stride + column * (WIDTH > 1 ? 1 : tensor.column_stride);
    store_global(target, load_packed<Packed<T, WIDTH>>(staged + row * STAGED_PITCH + column));
  }
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
      const auto* staged = reinterpret_cast<const typename Access::Type*>(staging + Access::OFFSET);
      const auto pair = load_packed<Packed<typename Access::Type, 2>>(staged + row * STAGED_PITCH + column);
      operand = make_float2(to_float(pair.values[0]), to_float(pair.values[1]));
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
  float first_acc[PARTS], second_acc[PARTS], first_operands[LOADS + 1], second_operands[LOADS + 1];
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    first_acc[part] = acc[part].x;
    second_acc[part] = acc[part].y;
  }
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    first_operands[load] = operands[load].x;
    second_operands[load] = operands[load].y;
  }
  float first_results[OUTS], second_results[OUTS];
  Epilogue::apply(first_acc, first_operands, first_results);
  Epilogue::apply(second_acc, second_operands, second_results);
  static_for<0, OUTS>([&](auto index) {
    using Access = Out<decltype(index)::value>;
    auto* staged = reinterpret_cast<typename Access::Type*>(staging + Access::OFFSET);
    store_pair(staged + row * STAGED_PITCH + column, first_results[decltype(index)::value],
               second_results[decltype(index)::value]);
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
    static_for<0, LOADS>([&](auto index) {
      using Access = Load<decltype(index)::value>;
      if constexpr (Access::KIND == Kind::tile) {
        auto* staged = reinterpret_cast<typename Access::Type*>(staging + Access::OFFSET);
        stage_tile<Access>(staged, args.loads[decltype(index)::value], tile, first_row);
      }
    });
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
    static_for<0, OUTS>([&](auto index) {
      using Access = Out<decltype(index)::value>;
      const auto* staged = reinterpret_cast<const typename Access::Type*>(staging + Access::OFFSET);
      store_tile<Access>(staged, args.outs[decltype(index)::value], tile, first_row);
    });
    __syncwarp();
  }
}

}  // namespace onnxfuse
