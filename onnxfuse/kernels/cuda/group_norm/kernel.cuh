// A normalisation of groups of channels: out = epilogue((x - mean) / sqrt(variance + EPSILON), loads[channel] ...), where
// mean and variance are those of the pixels of some channels of an image. How many there are, and of how many pixels, the
// strides of what channels have say, so that all layers of a model have one kernel.
//
// Memory bounds it: a group is read once where it is small, and twice where it is not, the second time from its end on:
// what was read last is in the caches still. Sums are of numbers less a pivot, the mean of a few of the group's: of what
// lies about it the square of the mean is little, and the difference that is the variance keeps its places.
//
//   cluster     SPLITS blocks, a group in turn
//   a thread    vectors of WIDTH pixels of one channel, every SPLITS * THREADS-th of the group; the first HELD of them
//               stay in registers
//
//   read, sum up --- warps' sums in shared memory --- blocks' sums in that of all blocks (st.async) --- write
//
// Launch: THREADS threads, SHARED_BYTES of dynamic shared memory, clusters or blocks as many as are wanted.
// Arguments: loads[0] is x, m groups of all images, n pixels of all channels of a group; the others have a number for
// each channel of an image, side by side, or one for all.
#pragma once
#include "common/arguments.cuh"
#include "common/cluster_ptx.cuh"
#include "common/element.cuh"
#include "common/ptx.cuh"
#include "common/warp_sum.cuh"

namespace onnxfuse {

constexpr int WARP_LANES = 32;
constexpr int WARPS = THREADS / WARP_LANES;
constexpr int RESIDENTS = 2;  // clusters of four then have room for as many blocks as there are multiprocessors
constexpr int STEP = SPLITS * THREADS;  // vectors from one of a thread's to its next one
// Loads on their way at once, of those that are not held, as they are summed up and as they are written: four of the
// latter spill.
constexpr int SUMMED = 4, WRITTEN = 2;

using Type = typename Load<0>::Type;
using Result = typename Out<0>::Type;
constexpr int WIDEST = 16 / (sizeof(Type) > sizeof(Result) ? sizeof(Type) : sizeof(Result));

constexpr int SENT_OFFSET = WARPS * 8;
constexpr int FULL_OFFSET = SENT_OFFSET + 2 * SPLITS * 8;
static_assert(SHARED_BYTES == (SPLITS > 1 ? FULL_OFFSET + 2 * 8 : SENT_OFFSET), "footprint and kernel agree");

// The first load that has a number for each channel; 0 where none has.
template <int INDEX = 1>
constexpr int first_of_channels() {
  if constexpr (INDEX >= LOADS) {
    return 0;
  } else if constexpr (Load<INDEX>::KIND != Kind::scalar) {
    return INDEX;
  } else {
    return first_of_channels<INDEX + 1>();
  }
}
constexpr int OF_CHANNELS = first_of_channels();

__device__ __forceinline__ int lane() { return threadIdx.x % WARP_LANES; }

// How the numbers of channels lie, of which those of a group's follow those of the group before: sizes of an image, read
// off their strides and runs. Where channels have no numbers an image is a group of one channel.
struct Channels {
  int groups = 1, of_group = 0;  // of an image; 0 where it has one group
  int pixels;                    // of a channel: so many columns have the same number

  __device__ __forceinline__ explicit Channels(const OnnxfuseArguments& args) : pixels(args.n) {
    if constexpr (OF_CHANNELS > 0) {
      const OnnxfuseTensor& numbers = args.loads[OF_CHANNELS];
      const OnnxfuseOuter& runs = args.loads_outer[OF_CHANNELS];
      groups = runs.rows;
      of_group = static_cast<int>(numbers.row_stride);
      pixels = numbers.column_stride == 0 ? runs.columns : 1;
    }
  }
};

// The groups that a cluster has in turn, which of its image each is; a division before the kernel before this one ends,
// and none later.
struct Turns {
  int group, step, groups, taken = 0;

  __device__ __forceinline__ Turns(const Channels& channels, int first, int clusters)
      : group(first % channels.groups), step(clusters % channels.groups), groups(channels.groups) {}
  __device__ __forceinline__ void advance() {
    group += step;
    if (group >= groups) group -= groups;
    ++taken;
  }
};

// Of numbers less the pivot.
struct Sums {
  float sum = 0.0f, squares = 0.0f;

  __device__ __forceinline__ void add(float value) {
    sum += value;
    squares = fmaf(value, value, squares);
  }
  __device__ __forceinline__ void add(const float2& other) { sum += other.x, squares += other.y; }
};

// The group that a cluster has in turn.
struct Group {
  const Type* x;
  Result* out;
  int elements, pixels;  // of all channels, of one
  int first_channel;     // of the image
  int rank, turn;

  __device__ __forceinline__ Group(const OnnxfuseArguments& args, const Channels& channels, const Turns& turns, int row,
                                   int rank)
      : x(static_cast<const Type*>(args.loads[0].pointer) + static_cast<long long>(row) * args.n),
        out(static_cast<Result*>(args.outs[0].pointer) + static_cast<long long>(row) * args.n),
        elements(args.n),
        pixels(channels.pixels),
        first_channel(turns.group * channels.of_group),
        rank(rank),
        turn(turns.taken) {}
  __device__ __forceinline__ int first_vector() const { return rank * THREADS + static_cast<int>(threadIdx.x); }
};

// The mean of numbers all over the group, the same in all threads of a cluster.
__device__ __forceinline__ float pivot_of(const Group& group) {
  const int place = static_cast<int>(static_cast<long long>(group.elements) * lane() / WARP_LANES);
  return sum_of_lanes<WARP_LANES>(to_float(load_global<Packed<Type, 1>>(group.x + place).values[0])) / WARP_LANES;
}

template <int WIDTH>
__device__ __forceinline__ void add_vector(Sums& sums, const Packed<Type, WIDTH>& vector, float pivot) {
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) sums.add(to_float(vector.values[i]) - pivot);
}

// ---- sums of a group, in all of its threads and in the same order

__device__ __forceinline__ Sums sums_of_block(const Sums& own, unsigned char* memory) {
  auto* of_warps = reinterpret_cast<float2*>(memory);
  const float2 of_warp = make_float2(sum_of_lanes<WARP_LANES>(own.sum), sum_of_lanes<WARP_LANES>(own.squares));
  __syncthreads();  // the sums before these are read
  if (lane() == 0) of_warps[threadIdx.x / WARP_LANES] = of_warp;
  __syncthreads();
  Sums all;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) all.add(of_warps[warp]);
  return all;
}

// Each block sends its sums to all others. What comes in one turn lies apart from that of the next: a block may send for
// that while another still reads.
__device__ __forceinline__ Sums sums_of_cluster(const Sums& own, const Group& group, unsigned char* memory,
                                                unsigned shared) {
  const int place = group.turn % 2, phase = group.turn / 2 % 2, peer = static_cast<int>(threadIdx.x);
  const unsigned full = shared + FULL_OFFSET + place * 8, sent = shared + SENT_OFFSET + (place * SPLITS + group.rank) * 8;
  if (threadIdx.x == 0) barrier_arrive_expect(full, (SPLITS - 1) * 8);
  __syncthreads();  // what this block says of its turn the others know when they have its sums
  if (peer < SPLITS && peer != group.rank) {
    store_peer(peer_address(sent, peer), make_float2(own.sum, own.squares), peer_address(full, peer));
  }
  barrier_wait(full, phase);
  const auto* of_blocks = reinterpret_cast<const float2*>(memory + SENT_OFFSET) + place * SPLITS;
  Sums all;
#pragma unroll
  for (int block = 0; block < SPLITS; ++block) {
    all.add(block == group.rank ? make_float2(own.sum, own.squares) : of_blocks[block]);
  }
  return all;
}

// ---- what is written

struct Moments {
  float mean, scale;
};

// What a channel's elements are combined with; the first operand is x itself.
struct Parameters {
  float operands[LOADS + 1];

  __device__ __forceinline__ Parameters(const OnnxfuseArguments& args, int channel) {
    static_for<1, LOADS>([&](auto index) {
      constexpr int I = decltype(index)::value;
      const int place = Load<I>::KIND == Kind::scalar ? 0 : channel;
      const auto* numbers = static_cast<const typename Load<I>::Type*>(args.loads[I].pointer);
      operands[I] = to_float(load_global<Packed<typename Load<I>::Type, 1>>(numbers + place).values[0]);
    });
  }
};

template <int WIDTH>
__device__ __forceinline__ void write_vector(const OnnxfuseArguments& args, const Group& group,
                                             const Packed<Type, WIDTH>& vector, int place, const Moments& moments) {
  const int channel = OF_CHANNELS > 0 ? static_cast<unsigned>(place * WIDTH) / static_cast<unsigned>(group.pixels) : 0;
  const Parameters parameters(args, group.first_channel + channel);
  Packed<Result, WIDTH> result;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    const float normals[1] = {(to_float(vector.values[i]) - moments.mean) * moments.scale};
    float values[OUTS];
    Epilogue::apply(normals, parameters.operands, values);
    Result rounded[2];
    store_pair(rounded, values[0], values[0]);
    result.values[i] = rounded[0];
  }
  store_global(group.out + static_cast<long long>(place) * WIDTH, result);
}

// ---- a group

template <int WIDTH>
__device__ __forceinline__ void normalise(const OnnxfuseArguments& args, const Group& group, unsigned char* memory,
                                          unsigned shared) {
  using Vector = Packed<Type, WIDTH>;
  const int vectors = group.elements / WIDTH, first = group.first_vector();
  const auto vector_at = [&](int place) { return load_global<Vector>(group.x + static_cast<long long>(place) * WIDTH); };
  Vector held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    if (first + i * STEP < vectors) held[i] = vector_at(first + i * STEP);
  }
  const float pivot = pivot_of(group);
  Sums sums;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    if (first + i * STEP < vectors) add_vector(sums, held[i], pivot);
  }
#pragma unroll SUMMED
  for (int place = first + HELD * STEP; place < vectors; place += STEP) add_vector(sums, vector_at(place), pivot);

  sums = sums_of_block(sums, memory);
  if constexpr (SPLITS > 1) sums = sums_of_cluster(sums, group, memory, shared);
  const float count = static_cast<float>(group.elements), mean = sums.sum / count;
  const float variance = fmaxf(fmaf(-mean, mean, sums.squares / count), 0.0f);
  const Moments moments = {pivot + mean, rsqrtf(variance + EPSILON)};

#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    if (first + i * STEP < vectors) write_vector(args, group, held[i], first + i * STEP, moments);
  }
  const int last = first + (vectors - 1 - first) / STEP * STEP;
#pragma unroll WRITTEN
  for (int place = last; place >= first + HELD * STEP; place -= STEP) {
    write_vector(args, group, vector_at(place), place, moments);
  }
}

__device__ __forceinline__ bool is_wide(const OnnxfuseArguments& args, const Channels& channels) {
  const auto addresses = reinterpret_cast<unsigned long long>(args.loads[0].pointer) |
                         reinterpret_cast<unsigned long long>(args.outs[0].pointer);
  return channels.pixels % WIDEST == 0 && addresses % 16 == 0;
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, onnxfuse::RESIDENTS) ONNXFUSE_CLUSTER
    onnxfuse_group_norm(const __grid_constant__ OnnxfuseArguments args) {
  using namespace onnxfuse;
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  const unsigned shared = shared_address(onnxfuse_shared);
  if constexpr (SPLITS > 1) {
    if (threadIdx.x < 2) barrier_init(shared + FULL_OFFSET + static_cast<int>(threadIdx.x) * 8, 1);
    if (threadIdx.x < 2) barrier_init_fence();
    __syncwarp();
    cluster_arrive();
  }
  const int rank = SPLITS > 1 ? cluster_rank() : 0, clusters = static_cast<int>(gridDim.x) / SPLITS;
  const int first = static_cast<int>(blockIdx.x) / SPLITS;
  const Channels channels(args);
  const bool wide = is_wide(args, channels);
  Turns turns(channels, first, clusters);
  wait_for_kernel_before();
  let_kernel_behind_start();
  if constexpr (SPLITS > 1) cluster_wait();
#pragma unroll 1
  for (int row = first; row < args.m; row += clusters, turns.advance()) {
    const Group group(args, channels, turns, row, rank);
    if (wide) {
      normalise<WIDEST>(args, group, onnxfuse_shared, shared);
    } else {
      normalise<1>(args, group, onnxfuse_shared, shared);
    }
  }
}
