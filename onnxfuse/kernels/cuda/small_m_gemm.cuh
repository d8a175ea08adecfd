// One block computes out[16, BLOCK_N] = epilogue(acc_0 .. acc_{PARTS-1}) with acc_p = lhs[16, k] * rhs_p[k, BLOCK_N] for
// few rows, as in decoding: the time is that of reading rhs once, so rhs goes straight from memory into the registers
// that mma.sync wants, 16 bytes a lane and a load, and nothing waits for anybody else until k is done. For 16-bit types,
// on sm_80 and later.
//
//   global      rhs, BLOCK_K of all columns     lhs, BLOCK_K of 16 rows     each warp its own blocks of k, WARPS_K apart
//                  |  past L1                      |  through L1
//   registers   [stage 0] .. [stage STAGES-1]                               loads run STAGES - 1 blocks of k ahead
//                  |  mma.sync
//   registers   acc[fragment][4]                                            all columns, this warp's share of k
//                  |
//   shared      sums[warp][16][all parts side by side]                      the only barrier
//                  |  added warp after warp: the same input gives the same bits
//   registers   acc of all parts of one output element in the same thread -> Epilogue -> global
//
// The order of k inside of a product is free, and so is the order of columns. Both are chosen such that what a lane has
// loaded is what it multiplies, without a shuffle. Lane 4g + t multiplies column g of a fragment and four k of sixteen:
//
//   lhs[m, k]   lane 4g + t loads k 8t .. 8t+7 of rows g and g + 8: four k for a first mma and four for a second
//   rhs[n, k]   lane 4g + t loads k 8t .. 8t+7 of column g: the same four and four, once for every fragment
//   rhs[k, n]   lane 4g + t loads columns 8g .. 8g+7 of rows 8t .. 8t+7: column g of fragment j is column 8g + j
//
// Launch and arguments: as the portable kernel's. Contract: pointers, strides and the extents of lhs and rhs along their
// contiguous axes are multiples of 8 elements; loads and outputs are read and written element by element.
//
// The generated text before this file defines Element, RHS_K_CONTIGUOUS, PARTS, the BLOCK_ constants, WARPS_K, STAGES,
// RESIDENT_BLOCKS, SUMS_PITCH, SHARED_BYTES, the tables Load<I> and Out<I>, and the struct Epilogue.
#pragma once
#include "arguments.cuh"
#include "ptx.cuh"

namespace onnxfuse {

constexpr int WARP_SIZE = 32;
constexpr int CHUNK = 8;           // elements of one 16-byte load
constexpr int MULTIPLICATIONS = 2; // mma that one chunk of each operand feeds
constexpr int STEP_K = 4 * CHUNK;  // a row's four lanes, one chunk each
constexpr int STEPS = BLOCK_K / STEP_K;
constexpr int FRAGMENT_COLUMNS = 8;
constexpr int PART_CHUNKS = BLOCK_N / CHUNK;
constexpr int GROUP_CHUNKS = 8;  // of rhs[k, n]: the chunks of eight lanes side by side, columns of eight fragments

// Columns of all parts side by side; of rhs[k, n] in whole groups, whose surplus columns repeat the last chunk.
constexpr int GROUPS = (PARTS * PART_CHUNKS + GROUP_CHUNKS - 1) / GROUP_CHUNKS;
constexpr int FRAGMENTS = RHS_K_CONTIGUOUS ? PARTS * PART_CHUNKS : GROUPS * GROUP_CHUNKS;
constexpr int WARP_SUMS = BLOCK_M * SUMS_PITCH;

static_assert(BLOCK_M == 16, "the rows of one mma");
static_assert(BLOCK_N % CHUNK == 0 && BLOCK_K % STEP_K == 0, "whole chunks");
static_assert(SUMS_PITCH >= FRAGMENTS * FRAGMENT_COLUMNS && SUMS_PITCH % 2 == 0, "footprint and kernel agree");
static_assert(SHARED_BYTES == WARPS_K * WARP_SUMS * sizeof(float), "footprint and kernel agree");

// Eight neighbours, as the four registers that they are.
struct alignas(16) Chunk {
  using Type = Element;
  unsigned pairs[CHUNK / 2];
};

template <typename T>
__device__ __forceinline__ T* element_pointer(const OnnxfuseTensor& tensor, long long batch, long long row,
                                              long long column) {
  return static_cast<T*>(tensor.pointer) + batch * tensor.batch_stride + row * tensor.row_stride +
         column * tensor.column_stride;
}

__device__ __forceinline__ int lane_group() { return threadIdx.x % WARP_SIZE / 4; }  // g
__device__ __forceinline__ int lane_depth() { return threadIdx.x % 4 * CHUNK; }      // 8t

// Rows and columns beyond the tensor repeat its last ones: their results are never stored.
struct LhsStream {
  const Element* rows[2];

  __device__ __forceinline__ LhsStream(const OnnxfuseArguments& args, int batch, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int inside = min(row + lane_group() + half * 8, args.m - 1);
      rows[half] = element_pointer<const Element>(args.lhs, batch, inside, lane_depth());
    }
  }
  __device__ __forceinline__ const Element* chunk(int half, int k) const { return rows[half] + k; }
};

template <bool K_CONTIGUOUS>
struct RhsStream {  // rhs[n, k]
  const Element* columns[FRAGMENTS];

  __device__ __forceinline__ RhsStream(const OnnxfuseArguments& args, int batch, int column) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
      const int inside = min(column + f % PART_CHUNKS * CHUNK + lane_group(), args.n - 1);
      columns[f] = element_pointer<const Element>(args.rhs[f / PART_CHUNKS], batch, lane_depth(), inside);
    }
  }
  __device__ __forceinline__ const Element* chunk(int f, int k) const { return columns[f] + k; }

  static __device__ __forceinline__ void fragment(unsigned (&pairs)[2], const Chunk (&chunks)[FRAGMENTS], int f,
                                                  int half) {
    pairs[0] = chunks[f].pairs[2 * half];
    pairs[1] = chunks[f].pairs[2 * half + 1];
  }
  static __device__ __forceinline__ void store(float* row, const float (&acc)[FRAGMENTS][4], int half) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
      store_pair(row + f * FRAGMENT_COLUMNS + threadIdx.x % 4 * 2, acc[f][2 * half], acc[f][2 * half + 1]);
    }
  }
};

template <>
struct RhsStream<false> {  // rhs[k, n]
  const Element* columns[GROUPS];
  long long row_stride[GROUPS];

  __device__ __forceinline__ RhsStream(const OnnxfuseArguments& args, int batch, int column) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const int chunk = min(group * GROUP_CHUNKS + lane_group(), PARTS * PART_CHUNKS - 1);
      const OnnxfuseTensor& tensor = args.rhs[chunk / PART_CHUNKS];
      const int inside = min(column + chunk % PART_CHUNKS * CHUNK, args.n - CHUNK);
      columns[group] = element_pointer<const Element>(tensor, batch, lane_depth(), inside);
      row_stride[group] = tensor.row_stride;
    }
  }
  __device__ __forceinline__ const Element* chunk(int f, int k) const {
    const long long stride = row_stride[f / GROUP_CHUNKS];
    return columns[f / GROUP_CHUNKS] + k * stride + f % GROUP_CHUNKS * stride;
  }

  // Element j of two chunks, neighbours along k, side by side.
  static __device__ __forceinline__ unsigned pair(const Chunk& first, const Chunk& second, int j) {
    const unsigned low = first.pairs[j / 2], high = second.pairs[j / 2];
    return j % 2 == 0 ? (low & 0xffff) | high << 16 : low >> 16 | (high & 0xffff0000);
  }
  static __device__ __forceinline__ void fragment(unsigned (&pairs)[2], const Chunk (&chunks)[FRAGMENTS], int f,
                                                  int half) {
    const Chunk* rows = chunks + f / GROUP_CHUNKS * GROUP_CHUNKS + 4 * half;
    pairs[0] = pair(rows[0], rows[1], f % GROUP_CHUNKS);
    pairs[1] = pair(rows[2], rows[3], f % GROUP_CHUNKS);
  }
  static __device__ __forceinline__ void store(float* row, const float (&acc)[FRAGMENTS][4], int half) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f += 2) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int chunk = f / GROUP_CHUNKS * GROUP_CHUNKS + threadIdx.x % 4 * 2 + side;
        store_pair(row + chunk * CHUNK + f % GROUP_CHUNKS, acc[f][2 * half + side], acc[f + 1][2 * half + side]);
      }
    }
  }
};

// BLOCK_K of both operands in one lane's registers.
struct Stage {
  Chunk lhs[STEPS][2];
  Chunk rhs[STEPS][FRAGMENTS];

  __device__ __forceinline__ void load(const LhsStream& lhs_stream, const RhsStream<RHS_K_CONTIGUOUS>& rhs_stream, int k,
                                       int depth) {
    // Fragment by fragment: the steps of one column of rhs[n, k] share a 128-byte line.
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int at = k + step * STEP_K;
        rhs[step][f] = load_streamed<Chunk>(rhs_stream.chunk(f, at), at + lane_depth() < depth);
      }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = k + step * STEP_K;
        lhs[step][half] = load_cached<Chunk>(lhs_stream.chunk(half, at), at + lane_depth() < depth);
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[FRAGMENTS][4]) const {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int half = 0; half < MULTIPLICATIONS; ++half) {
        const unsigned* first = lhs[step][0].pairs + 2 * half;
        const unsigned* second = lhs[step][1].pairs + 2 * half;
        const unsigned rows[4] = {first[0], second[0], first[1], second[1]};
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
          unsigned columns[2];
          RhsStream<RHS_K_CONTIGUOUS>::fragment(columns, rhs[step], f, half);
          multiply_fragment(Element(), acc[f], rows, columns);
        }
      }
    }
  }
};

// acc += lhs * rhs over this warp's blocks of k; blocks beyond k are zeros.
__device__ __forceinline__ void run_main_loop(float (&acc)[FRAGMENTS][4], const LhsStream& lhs,
                                              const RhsStream<RHS_K_CONTIGUOUS>& rhs, int depth) {
  constexpr int STRIDE = WARPS_K * BLOCK_K;
  Stage stages[STAGES];
  int k = static_cast<int>(threadIdx.x) / WARP_SIZE * BLOCK_K;
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) stages[stage].load(lhs, rhs, k + stage * STRIDE, depth);
  while (k < depth) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      stages[(stage + STAGES - 1) % STAGES].load(lhs, rhs, k + (STAGES - 1) * STRIDE, depth);
      stages[stage].multiply(acc);
      k += STRIDE;
    }
  }
}

template <typename Access>
__device__ __forceinline__ float read_operand(const OnnxfuseTensor& tensor, int batch, int row, int column) {
  const bool by_row = Access::KIND == Kind::column || Access::KIND == Kind::tile;
  const bool by_column = Access::KIND == Kind::row || Access::KIND == Kind::tile;
  const auto* element =
      element_pointer<typename Access::Type>(tensor, batch, by_row ? row : 0, by_column ? column : 0);
  return to_float(load_global<Packed<typename Access::Type, 1>>(element).values[0]);
}

template <typename T>
__device__ __forceinline__ Packed<T, 1> from_float(float value) {
  Packed<T, 2> pair;
  store_pair(pair.values, value, value);
  return {{pair.values[0]}};
}

// One element of every output.
__device__ __forceinline__ void store_outputs(const float (&acc)[PARTS], const OnnxfuseArguments& args, int batch,
                                              int row, int column) {
  float operands[LOADS + 1], results[OUTS];
  static_for<0, LOADS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    operands[I] = read_operand<Load<I>>(args.loads[I], batch, row, column);
  });
  Epilogue::apply(acc, operands, results);
  static_for<0, OUTS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    using T = typename Out<I>::Type;
    store_global(element_pointer<T>(args.outs[I], batch, row, column), from_float<T>(results[I]));
  });
}

// Adds the sums of all warps, always in the same order, and stores what the epilogue makes of them.
__device__ __forceinline__ void finish(const float* sums, const OnnxfuseArguments& args, int batch, int first_row,
                                       int first_column) {
  const int rows = min(args.m - first_row, BLOCK_M);
#pragma unroll 1
  for (int element = threadIdx.x; element < rows * BLOCK_N; element += THREADS) {
    const int row = element / BLOCK_N, column = element % BLOCK_N;
    if (first_column + column >= args.n) continue;
    float acc[PARTS] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS_K; ++warp) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        acc[part] += sums[warp * WARP_SUMS + row * SUMS_PITCH + part * BLOCK_N + column];
      }
    }
    store_outputs(acc, args, batch, first_row + row, first_column + column);
  }
}

__device__ __forceinline__ void compute_tile(const OnnxfuseArguments& args, int batch, float* sums) {
  // Tiles of the same columns are neighbours: all but the first find rhs in L2.
  const int tiles_m = (args.m - 1) / BLOCK_M + 1;
  const int row = static_cast<int>(blockIdx.x) % tiles_m * BLOCK_M;
  const int column = static_cast<int>(blockIdx.x) / tiles_m * BLOCK_N;

  float acc[FRAGMENTS][4] = {};
  run_main_loop(acc, LhsStream(args, batch, row), RhsStream<RHS_K_CONTIGUOUS>(args, batch, column), args.k);

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own_row = lane_group() + half * 8;
    float* target = sums + threadIdx.x / WARP_SIZE * WARP_SUMS + own_row * SUMS_PITCH;
    if (row + own_row < args.m) RhsStream<RHS_K_CONTIGUOUS>::store(target, acc, half);
  }
  __syncthreads();
  finish(sums, args, batch, row, column);
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, onnxfuse::RESIDENT_BLOCKS)
    onnxfuse_gemm(const __grid_constant__ OnnxfuseArguments args) {
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) {
    onnxfuse::compute_tile(args, batch, reinterpret_cast<float*>(onnxfuse_shared));
    __syncthreads();  // the next product's sums overwrite what the epilogue still reads
  }
}
