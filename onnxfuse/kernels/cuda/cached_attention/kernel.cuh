// One token of each sequence over a cache of keys and values that gets the token's own, as a language model decodes: query
// and key are turned by their position (Su et al., 2021), key and value go where the cache has room for them, and
//
//     out[b, head] = sum over n of softmax_n(score(query[b, head] * keys[b, head / GROUP, n])) * values[b, head / GROUP, n]
//
// over as many keys as the sequence has, and a sink where heads have one: a score of its own, of which no value is. Heads
// of query and key may have an RMS norm before they are turned (Henry et al., 2020). Memory bounds it: all heads of a
// group multiply what is read once, by mma.sync, whose side of 8 they are. Nothing is staged in shared memory: lanes read
// 16 bytes of a row, so which column of a head is which k of the product follows from who reads it, for the query as well.
//
//   cluster     SPLITS blocks, a group of heads of one sequence; WARPS warps of each take 16 keys in turn
//
//   16 keys     scores[heads, keys] = query * keys      lanes 4r .. 4r+3 read key r: 32 columns a load
//               online softmax                          lanes 4r .. 4r+3 have head r
//               sums[columns, heads] += values * p      lane 4r + t reads keys 2t, 2t+1, 2t+8, 2t+9: 64 columns a load
//
//   the end     the warps' sums meet in shared memory, those of the blocks in that of the first one (st.async)
//
// Launch: THREADS threads, SHARED_BYTES of dynamic shared memory, SPLITS blocks for each group of each sequence.
// Arguments: lhs is the query, rhs[0] and rhs[1] the cache of keys and of values [batch, KV_HEADS, n, HEAD], rhs[2] and
// rhs[3] the token's own; k is how many keys the longest sequence has at most; loads[0] the place of each sequence's last
// key, loads[1] and loads[2] cosines and sines of every position, loads[3] and loads[4] what the norms of query and key
// multiply by, loads[5] the sink of each head; outs[0] [batch, HEADS, HEAD].
#pragma once
#include "common/arguments.cuh"
#include "common/cluster_ptx.cuh"
#include "common/warp_sum.cuh"

namespace onnxfuse {

constexpr int WARP_LANES = 32;
constexpr int ROWS = 8;  // heads of one mma.sync
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int KEYS = 16;  // of a step
constexpr int WIDTH = 8;  // elements of one access
constexpr int KEY_LOADS = (HEAD - 1) / (4 * WIDTH) + 1;    // of a lane, of each key
constexpr int VALUE_LOADS = (HEAD - 1) / (8 * WIDTH) + 1;  // of each value
constexpr int QUERY_PITCH = KEY_LOADS * 4 * WIDTH + WIDTH;
constexpr int SUM_PITCH = HEAD + 8;
constexpr int SHARE = GROUP * HEAD;  // sums of a block; its maxima and row sums stand behind those of all blocks
static_assert(GROUP <= ROWS && HEAD % WIDTH == 0 && THREADS == WARPS * WARP_LANES, "one mma.sync and one access");

constexpr int STATES_OFFSET = GROUP * QUERY_PITCH * 2;
constexpr int SUMS_OFFSET = STATES_OFFSET + WARPS * GROUP * 8;
constexpr int SHARES_OFFSET = SUMS_OFFSET + WARPS * GROUP * SUM_PITCH * 4;
constexpr int SHARE_BYTES = (SHARE + (GROUP + 1) / 2 * 4) * 4;  // the next one begins at 16 bytes
constexpr int SENT_BYTES = (SHARE + 2 * GROUP) * 4;
constexpr int FULL = SHARES_OFFSET + (SPLITS > 1 ? SPLITS * SHARE_BYTES : 0);
constexpr int ROOTS_OFFSET = FULL + (SPLITS > 1 ? 8 : 0);  // of the query's heads, and of the key
static_assert(SHARED_BYTES == ROOTS_OFFSET + (NORMED ? (GROUP + 1) * 4 : 0), "footprint and kernel agree");

constexpr float LOG2_E = 1.4426950408889634f;

using Vector = Packed<Element, WIDTH>;

__device__ __forceinline__ int lane() { return threadIdx.x % WARP_LANES; }

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float element_at(const void* tensor, long long offset) {
  return to_float(load_global<Packed<Element, 1>>(static_cast<const Element*>(tensor) + offset).values[0]);
}

__device__ __forceinline__ unsigned packed_word(float first, float second) {
  Packed<Element, 2> pair;
  store_pair(pair.values, first, second);
  return reinterpret_cast<const unsigned&>(pair);
}

__device__ __forceinline__ const unsigned (&words_of(const Vector& vector))[4] {
  return reinterpret_cast<const unsigned (&)[4]>(vector);
}

// ---- the token: where it stands, and what is turned

// A group of heads of one sequence.
struct Token {
  int batch, group;
  int first, length;  // keys that it looks at, its own the last

  __device__ __forceinline__ explicit Token(const OnnxfuseArguments& args, int tile)
      : batch(tile / KV_HEADS), group(tile % KV_HEADS) {
    const int last = load_global<Packed<int, 1>>(static_cast<const int*>(args.loads[0].pointer) + batch).values[0];
    length = min(max(last, 0), args.k - 1) + 1;  // a longer one would be written elsewhere
    first = WINDOW > 0 ? max(length - WINDOW, 0) : 0;
  }
  __device__ __forceinline__ long long cached(int capacity) const {
    return (static_cast<long long>(batch) * KV_HEADS + group) * capacity * HEAD;
  }
};

__device__ __forceinline__ long long row_of(const OnnxfuseTensor& tensor, const Token& token, int head) {
  return token.batch * tensor.batch_stride + head * HEAD;
}

// 1 over the root of the mean square of each of the group's heads, and of its key.
__device__ __forceinline__ void find_roots(const OnnxfuseArguments& args, unsigned char* memory, const Token& token) {
  for (int row = threadIdx.x / WARP_LANES; row <= GROUP; row += WARPS) {
    const OnnxfuseTensor& tensor = row < GROUP ? args.lhs : args.rhs[2];
    const long long first = row_of(tensor, token, row < GROUP ? token.group * GROUP + row : token.group);
    float squares = 0.0f;
    for (int column = lane(); column < HEAD; column += WARP_LANES) {
      const float own = element_at(tensor.pointer, first + column);
      squares = fmaf(own, own, squares);
    }
    squares = sum_of_lanes<WARP_LANES>(squares);
    if (lane() == 0) reinterpret_cast<float*>(memory + ROOTS_OFFSET)[row] = rsqrtf(squares / HEAD + EPSILON);
  }
  __syncthreads();
}

// A head of the token's query or key, normalised.
struct Head {
  const void* tensor;
  long long first;
  const void* weights;
  float root;

  __device__ __forceinline__ float operator[](int column) const {
    const float own = element_at(tensor, first + column);
    return NORMED ? own * root * element_at(weights, column) : own;
  }
};

// An element of a head behind its rotation.
__device__ __forceinline__ float turned(const OnnxfuseArguments& args, const Head& head, int column, int position) {
  const float own = head[column];
  if (column >= ROTARY) return own;
  constexpr int HALF = ROTARY > 0 ? ROTARY / 2 : 1;
  const bool is_first = INTERLEAVED ? column % 2 == 0 : column < HALF;
  const float other = head[INTERLEAVED ? column ^ 1 : is_first ? column + HALF : column - HALF];
  const long long angle = static_cast<long long>(position) * HALF + (INTERLEAVED ? column / 2 : column % HALF);
  const float sine = element_at(args.loads[2].pointer, angle);
  return fmaf(own, element_at(args.loads[1].pointer, angle), is_first ? -other * sine : other * sine);
}

// Two neighbours of one of the group's heads, or of its key, which is the row behind them.
__device__ __forceinline__ Packed<Element, 2> turned_pair(const OnnxfuseArguments& args, const unsigned char* memory,
                                                          const Token& token, int row, int column) {
  const bool is_key = row == GROUP;
  const OnnxfuseTensor& tensor = is_key ? args.rhs[2] : args.lhs;
  Head head = {tensor.pointer, row_of(tensor, token, is_key ? token.group : token.group * GROUP + row)};
  if constexpr (NORMED) {
    head.weights = args.loads[is_key ? 4 : 3].pointer;
    head.root = reinterpret_cast<const float*>(memory + ROOTS_OFFSET)[row];
  }
  Packed<Element, 2> pair;
  store_pair(pair.values, turned(args, head, column, token.length - 1), turned(args, head, column + 1, token.length - 1));
  return pair;
}

// The query's heads -> shared memory, with zeros behind the last column.
__device__ __forceinline__ void stage_query(const OnnxfuseArguments& args, unsigned char* memory, const Token& token) {
  for (int i = threadIdx.x; i < GROUP * QUERY_PITCH / 2; i += THREADS) {
    const int row = i / (QUERY_PITCH / 2), column = i % (QUERY_PITCH / 2) * 2;
    Packed<Element, 2> pair = {};
    if (column < HEAD) pair = turned_pair(args, memory, token, row, column);
    reinterpret_cast<Packed<Element, 2>*>(memory)[i] = pair;
  }
}

// The token's own key and value -> the cache; threads of this block read them there, past L1.
__device__ __forceinline__ void store_in_cache(const OnnxfuseArguments& args, const unsigned char* memory,
                                               const Token& token) {
  for (int i = threadIdx.x; i < HEAD; i += THREADS) {
    const int column = i % (HEAD / 2) * 2;
    const bool is_key = i < HEAD / 2;
    Packed<Element, 2> pair;
    if (is_key) {
      pair = turned_pair(args, memory, token, GROUP, column);
    } else {
      const auto* value = static_cast<const Element*>(args.rhs[3].pointer) + row_of(args.rhs[3], token, token.group);
      pair = load_global<Packed<Element, 2>>(value + column);
    }
    auto* cache = static_cast<Element*>(args.rhs[is_key ? 0 : 1].pointer) + token.cached(args.n);
    store_global(cache + static_cast<long long>(token.length - 1) * HEAD + column, pair);
  }
}

// ---- 16 keys of one warp

// What a warp knows of the keys so far: lanes 4r .. 4r+3 of head r, and of columns their share of all heads.
struct State {
  float maximum = minus_infinity(), sum = 0.0f;
  float sums[4 * VALUE_LOADS][4] = {};
};

struct Query {
  Vector rows[KEY_LOADS];

  __device__ __forceinline__ explicit Query(const unsigned char* memory) {
    const int row = lane() / 4;
#pragma unroll
    for (int load = 0; load < KEY_LOADS; ++load) {
      rows[load] = {};
      const int column = (load * 4 + lane() % 4) * WIDTH;
      if (row < GROUP) rows[load] = load_packed<Vector>(reinterpret_cast<const Element*>(memory) + row * QUERY_PITCH + column);
    }
  }
};

// Scores of head r with keys 2t, 2t+1, 2t+8 and 2t+9 of the step.
__device__ __forceinline__ void multiply_keys(float (&scores)[4], const Query& query, const Vector (&keys)[2][KEY_LOADS]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float product[4] = {};
#pragma unroll
    for (int load = 0; load < KEY_LOADS; ++load) {
      const unsigned(&row)[4] = words_of(query.rows[load]);
      const unsigned(&key)[4] = words_of(keys[half][load]);
      multiply_fragment(Element(), product, {row[0], 0, row[1], 0}, {key[0], key[1]});
      multiply_fragment(Element(), product, {row[2], 0, row[3], 0}, {key[2], key[3]});
    }
    scores[2 * half] = product[0], scores[2 * half + 1] = product[1];
  }
}

__device__ __forceinline__ int key_of(int i) { return lane() % 4 * 2 + i % 2 + i / 2 * 8; }

__device__ __forceinline__ float score_of(float product) {
  if constexpr (SOFTCAPPED) return SOFTCAP * tanhf(product * (SCALE / SOFTCAP)) * LOG2_E;
  return product * (SCALE * LOG2_E);
}

// The probabilities of 16 keys beside those before, two in each word; returns what the sums are to be scaled by.
__device__ __forceinline__ float exponentiate(unsigned (&probabilities)[2], State& state, float (&scores)[4],
                                              const Token& token, int first_key) {
  float greatest = state.maximum;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = first_key + key_of(i);
    scores[i] = key >= token.first && key < token.length ? score_of(scores[i]) : minus_infinity();
    greatest = fmaxf(greatest, scores[i]);
  }
  greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 1));
  greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 2));
  const float base = greatest > minus_infinity() ? greatest : 0.0f;
  const float rescale = fast_exp2(state.maximum - base);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    scores[i] = fast_exp2(scores[i] - base);
    sum += scores[i];
  }
  probabilities[0] = packed_word(scores[0], scores[1]), probabilities[1] = packed_word(scores[2], scores[3]);
  state.sum = fmaf(state.sum, rescale, sum);
  state.maximum = greatest;
  return rescale;
}

// Of two neighbouring keys the same two columns: -> of either column both keys.
__device__ __forceinline__ unsigned low_halves(unsigned first, unsigned second) {
  return permute_bytes(first, second, 0x5410);
}
__device__ __forceinline__ unsigned high_halves(unsigned first, unsigned second) {
  return permute_bytes(first, second, 0x7632);
}

__device__ __forceinline__ void multiply_values(State& state, const unsigned (&probabilities)[2], float rescale,
                                                const Vector (&values)[4][VALUE_LOADS]) {
  const float of_first = __shfl_sync(0xffffffff, rescale, lane() % 4 * 8);
  const float of_second = __shfl_sync(0xffffffff, rescale, lane() % 4 * 8 + 4);
#pragma unroll
  for (int load = 0; load < VALUE_LOADS; ++load) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float(&sums)[4] = state.sums[load * 4 + i];
      sums[0] *= of_first, sums[1] *= of_second, sums[2] *= of_first, sums[3] *= of_second;
      const unsigned first = words_of(values[0][load])[i], second = words_of(values[1][load])[i];
      const unsigned third = words_of(values[2][load])[i], fourth = words_of(values[3][load])[i];
      const unsigned lhs[4] = {low_halves(first, second), high_halves(first, second), low_halves(third, fourth),
                               high_halves(third, fourth)};
      multiply_fragment(Element(), sums, lhs, probabilities);
    }
  }
}

template <int LOADS_OF_ROW, int LANES>
__device__ __forceinline__ void read_row(Vector (&row)[LOADS_OF_ROW], const Element* cache, int key, int place,
                                         const Token& token) {
  const bool exists = key >= token.first && key < token.length;
#pragma unroll
  for (int load = 0; load < LOADS_OF_ROW; ++load) {
    const int column = (load * LANES + place) * WIDTH;
    row[load] = load_fresh<Vector>(cache + static_cast<long long>(key) * HEAD + column, exists && column < HEAD);
  }
}

__device__ __forceinline__ void attend(State& state, const Query& query, const OnnxfuseArguments& args, const Token& token,
                                       int first_key) {
  const Element* keys_of = static_cast<const Element*>(args.rhs[0].pointer) + token.cached(args.n);
  const Element* values_of = static_cast<const Element*>(args.rhs[1].pointer) + token.cached(args.n);
  Vector keys[2][KEY_LOADS], values[4][VALUE_LOADS];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    read_row<KEY_LOADS, 4>(keys[half], keys_of, first_key + half * 8 + lane() / 4, lane() % 4, token);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) read_row<VALUE_LOADS, 8>(values[i], values_of, first_key + key_of(i), lane() / 4, token);
  float scores[4];
  unsigned probabilities[2];
  multiply_keys(scores, query, keys);
  const float rescale = exponentiate(probabilities, state, scores, token, first_key);
  multiply_values(state, probabilities, rescale, values);
}

// ---- the end: what several warps, and blocks, know of one token

struct Softmax {
  float maximum, sum;
};

__device__ __forceinline__ float4* sums_of(unsigned char* memory, int warp, int head) {
  return reinterpret_cast<float4*>(memory + SUMS_OFFSET + (warp * GROUP + head) * SUM_PITCH * 4);
}
__device__ __forceinline__ Softmax* softmax_of(unsigned char* memory, int warp) {
  return reinterpret_cast<Softmax*>(memory + STATES_OFFSET) + warp * GROUP;
}

__device__ __forceinline__ void store_state(unsigned char* memory, State& state) {
  const int warp = threadIdx.x / WARP_LANES, row = lane() / 4, heads = lane() % 4 * 2;
  state.sum += __shfl_xor_sync(0xffffffff, state.sum, 1);
  state.sum += __shfl_xor_sync(0xffffffff, state.sum, 2);
  if (heads == 0 && row < GROUP) softmax_of(memory, warp)[row] = {state.maximum, state.sum};
#pragma unroll
  for (int i = 0; i < 4 * VALUE_LOADS; ++i) {
    const int column = (i / 4 * 8 + row) * WIDTH + i % 4 * 2;
    if (column >= HEAD) continue;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (heads + side >= GROUP) continue;
      auto* target = reinterpret_cast<float*>(sums_of(memory, warp, heads + side)) + column;
      *reinterpret_cast<float2*>(target) = make_float2(state.sums[i][side], state.sums[i][side + 2]);
    }
  }
}

// Adds up COUNT shares of one head's sums, four columns of them, always in the same order.
//   softmax(i), sums(i): of share i
template <int COUNT, typename OfSoftmax, typename OfSums>
__device__ __forceinline__ float4 added(Softmax& all, const OfSoftmax& softmax, const OfSums& sums) {
  all = {minus_infinity(), 0.0f};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) all.maximum = fmaxf(all.maximum, softmax(i).maximum);
  const float base = all.maximum > minus_infinity() ? all.maximum : 0.0f;
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float weight = fast_exp2(softmax(i).maximum - base);
    const float4 own = sums(i);
    total = {fmaf(weight, own.x, total.x), fmaf(weight, own.y, total.y), fmaf(weight, own.z, total.z),
             fmaf(weight, own.w, total.w)};
    all.sum = fmaf(weight, softmax(i).sum, all.sum);
  }
  return total;
}

// What a head's sums are multiplied by in the end; its sink is one more of the exponentials.
__device__ __forceinline__ float scale_of(const OnnxfuseArguments& args, const Token& token, int head, const Softmax& all) {
  if constexpr (!SINK) return __fdividef(1.0f, all.sum);
  const float sink = element_at(args.loads[5].pointer, token.group * GROUP + head) * LOG2_E;
  const float base = fmaxf(all.maximum, sink), weight = fast_exp2(all.maximum - base);
  return __fdividef(weight, fmaf(weight, all.sum, fast_exp2(sink - base)));
}

__device__ __forceinline__ void store_result(const OnnxfuseArguments& args, const Token& token, int item,
                                             const float4& total, const Softmax& all) {
  const float scale = scale_of(args, token, item / (HEAD / 4), all);
  Packed<Element, 4> result;
  store_pair(result.values, total.x * scale, total.y * scale);
  store_pair(result.values + 2, total.z * scale, total.w * scale);
  const long long row = (static_cast<long long>(token.batch) * HEADS + token.group * GROUP) * HEAD;
  store_global(static_cast<Element*>(args.outs[0].pointer) + row + item * 4, result);
}

// Shares of blocks in the first one's shared memory: sums, behind them the maxima and row sums.
__device__ __forceinline__ int share_offset(int rank) { return SHARES_OFFSET + rank * SHARE_BYTES; }

__device__ __forceinline__ void share(unsigned char* memory, unsigned shared, int item, const float4& total,
                                      const Softmax& all) {
  const int rank = cluster_rank(), head = item / (HEAD / 4);
  const int sums = share_offset(rank) + item * 16, state = share_offset(rank) + SHARE * 4 + head * 8;
  const bool is_first = item % (HEAD / 4) == 0;  // of the head
  if (rank == 0) {
    *reinterpret_cast<float4*>(memory + sums) = total;
    if (is_first) *reinterpret_cast<Softmax*>(memory + state) = all;
    return;
  }
  const unsigned full = peer_address(shared + FULL, 0);
  store_peer(peer_address(shared + sums, 0), total, full);
  if (is_first) store_peer(peer_address(shared + state, 0), make_float2(all.maximum, all.sum), full);
}

__device__ __forceinline__ void add_blocks(const OnnxfuseArguments& args, unsigned char* memory, unsigned shared,
                                           const Token& token) {
  if (threadIdx.x == 0) barrier_arrive_expect(shared + FULL, (SPLITS - 1) * SENT_BYTES);
  barrier_wait(shared + FULL, 0);
  __syncthreads();
  for (int item = threadIdx.x; item < SHARE / 4; item += THREADS) {
    const int head = item / (HEAD / 4);
    Softmax all;
    const float4 total = added<SPLITS>(
        all,
        [&](int rank) { return reinterpret_cast<const Softmax*>(memory + share_offset(rank) + SHARE * 4)[head]; },
        [&](int rank) { return reinterpret_cast<const float4*>(memory + share_offset(rank))[item]; });
    store_result(args, token, item, total, all);
  }
}

__device__ __forceinline__ void add_warps(const OnnxfuseArguments& args, unsigned char* memory, unsigned shared,
                                          const Token& token) {
  for (int item = threadIdx.x; item < SHARE / 4; item += THREADS) {
    const int head = item / (HEAD / 4);
    Softmax all;
    const float4 total = added<WARPS>(
        all, [&](int warp) { return softmax_of(memory, warp)[head]; },
        [&](int warp) { return sums_of(memory, warp, head)[item % (HEAD / 4)]; });
    if constexpr (SPLITS > 1) {
      share(memory, shared, item, total, all);
    } else {
      store_result(args, token, item, total, all);
    }
  }
}

// ---- the whole

__device__ __forceinline__ void decode(const OnnxfuseArguments& args, unsigned char* memory, unsigned shared) {
  const int rank = SPLITS > 1 ? cluster_rank() : 0;
  const Token token(args, static_cast<int>(blockIdx.x) / SPLITS);
  constexpr int STEP = SPLITS * WARPS;
  const int begin = token.first / KEYS, last = (token.length - 1) / KEYS;
  if constexpr (NORMED) find_roots(args, memory, token);
  stage_query(args, memory, token);
  if ((last - begin) % STEP / WARPS == rank) store_in_cache(args, memory, token);
  __syncthreads();
  const Query query(memory);
  State state;
#pragma unroll 1
  for (int step = begin + rank * WARPS + static_cast<int>(threadIdx.x) / WARP_LANES; step <= last; step += STEP) {
    attend(state, query, args, token, step * KEYS);
  }
  store_state(memory, state);
  __syncthreads();
  if constexpr (SPLITS > 1) cluster_wait();  // the first block's barrier is there
  add_warps(args, memory, shared, token);
  if constexpr (SPLITS > 1) {
    if (rank == 0) add_blocks(args, memory, shared, token);
  }
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, onnxfuse::RESIDENTS) ONNXFUSE_CLUSTER
onnxfuse_cached_attention(const __grid_constant__ OnnxfuseArguments args) {
  using namespace onnxfuse;
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  const unsigned shared = shared_address(onnxfuse_shared);
  if constexpr (SPLITS > 1) {
    if (threadIdx.x == 0) {
      barrier_init(shared + FULL, 1);
      barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive();
  }
  wait_for_kernel_before();
  let_kernel_behind_start();
  decode(args, onnxfuse_shared, shared);
}
