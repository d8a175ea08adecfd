// Stands in for hopper/ptx.cuh: the same functions in C++. A shared-memory address holds the block's rank above 24 bits of
// offset.
namespace onnxfuse {

constexpr int WARP_GROUP = 128;

struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// What a tensor map of the emulator points to; strides in bytes, that of the contiguous axis included.
struct HostMap {
  unsigned char* tensor;
  long long element, rank, swizzle;
  long long extents[5], strides[5], box[5];
};

inline const HostMap& host_map(const TensorMap& map) { return *reinterpret_cast<const HostMap*>(map.opaque[0]); }

inline void barrier_arrive_copied(unsigned barrier) { update(host_barrier(barrier), 2, 0); }
inline bool is_elected() { return threadIdx.x % 32 == 0; }

// ---- TMA

inline unsigned swizzled(unsigned address, long long span) {
  return span == 0 ? address : address ^ (address >> 7 & (span / 16 - 1)) << 4;
}

// body(shared address, element of the tensor or null outside of it) for every element of a box.
template <typename Body>
void for_each_of_box(const HostMap& map, unsigned shared, const int (&place)[5], const Body& body) {
  // Of a row it begins on 16 bytes, or an H200 calls the instruction illegal.
  if (place[0] * map.element % 16 != 0) emulator::fail("a box begins between 16-byte boundaries of its rows");
  for (long long y = 0; y < map.box[1]; ++y) {
    for (long long x = 0; x < map.box[0]; ++x) {
      const long long at[5] = {place[0] + x, place[1] + y, place[2], place[3], place[4]};
      unsigned char* element = map.tensor;
      bool inside = true;
      for (int axis = 0; axis < map.rank; ++axis) {
        inside = inside && at[axis] >= 0 && at[axis] < map.extents[axis];
        element += at[axis] * map.strides[axis];
      }
      const unsigned offset = static_cast<unsigned>((y * map.box[0] + x) * map.element);
      body(swizzled(shared + offset, map.swizzle), inside ? element : nullptr);
    }
  }
}

inline void land_box(unsigned shared, const HostMap& map, unsigned barrier, int x, int y, int z, int u) {
  for_each_of_box(map, shared, {x, y, z, u, 0}, [&](unsigned target, unsigned char* element) {
    if (element != nullptr) emulator::check_landing(element, map.element);
    if (element != nullptr) memcpy(emulator::shared(target, map.element), element, map.element);
    if (element == nullptr) memset(emulator::shared(target, map.element), 0, map.element);
  });
  update(host_barrier(barrier), 0, -static_cast<int>(map.box[0] * map.box[1] * map.element));
}

inline void load_box(unsigned shared, const TensorMap& map, unsigned barrier, int x, int y, int z, int u) {
  const HostMap& host = host_map(map);
  emulator::check_order(host.tensor);
  emulator::cluster.later([=, &host] { land_box(shared, host, barrier, x, y, z, u); });
}
inline void load_box(unsigned shared, const TensorMap& map, unsigned barrier, int x, int y, int z) {
  if (host_map(map).rank > 3) emulator::fail("a box of rank 3 is loaded from a map of rank 4");
  load_box(shared, map, barrier, x, y, z, 0);
}

inline void load_box_to_all(unsigned shared, const TensorMap& map, unsigned barrier, int x, int y, int z,
                            unsigned short blocks) {
  for (int rank = 0; rank < 16; ++rank) {
    if (blocks >> rank & 1) load_box(peer_address(shared, rank), map, peer_address(barrier, rank), x, y, z);
  }
}

inline void store_box(const TensorMap& map, unsigned shared, int x, int y, int z, int u, int v) {
  const HostMap& host = host_map(map);
  if (x < 0 || y < 0 || z < 0 || u < 0 || v < 0) emulator::fail("a box is stored that begins before its tensor");
  for_each_of_box(host, shared, {x, y, z, u, v}, [&](unsigned source, unsigned char* element) {
    if (element == nullptr) return;
    emulator::check_global(element, host.element, true);
    memcpy(element, emulator::shared(source, host.element), host.element);
  });
}
inline void store_box(const TensorMap& map, unsigned shared, int x, int y, int z) {
  store_box(map, shared, x, y, z, 0, 0);
}

inline void prefetch_map(const TensorMap&) {}
inline void store_commit() {}
template <int PENDING>
void store_wait() {}
inline void shared_to_tma_fence() {}

// ---- wgmma

inline void multiply_fence() {}
inline void multiply_commit() {}
// A wgmma is one instruction of four warps: all of them have read a stage when one may give it back.
template <int PENDING>
void multiply_wait() {
  constexpr int BEHIND_NAMED = 16;
  emulator::wait(emulator::cluster.named(BEHIND_NAMED + threadIdx.x / WARP_GROUP, WARP_GROUP));
}
inline void pause() {}

// Where an element of an operand lies: `outer` along m or n, `k` along k. PTX ISA, "Matrix Descriptor".
inline unsigned operand_address(unsigned long long descriptor, bool k_contiguous, int bytes, int outer, int k) {
  const auto field = [&](int bit) { return static_cast<unsigned>(descriptor >> bit & 0x3fff) << 4; };
  const unsigned span = 256u >> (descriptor >> 62), columns = span / bytes;
  const unsigned place = k_contiguous ? outer / 8 * field(32) + outer % 8 * span + k * bytes
                                      : outer / columns * field(16) + k / 8 * field(32) + k % 8 * span +
                                            outer % columns * bytes;
  return own_address(swizzled(field(0) + place, span));
}

template <typename T>
float operand(unsigned long long descriptor, bool k_contiguous, int outer, int k) {
  T value;
  memcpy(static_cast<void*>(&value),
         emulator::shared(operand_address(descriptor, k_contiguous, sizeof(T), outer, k), sizeof(T)), sizeof(T));
  return to_float(value);
}

// One thread's share of acc[64, COLUMNS], registers from FIRST on, (+)= lhs[64, 32 bytes] * rhs[32 bytes, COLUMNS].
template <int FIRST, int COLUMNS, int REGISTERS>
void multiply(float (&acc)[REGISTERS], unsigned long long lhs, unsigned long long rhs, int accumulate) {
  constexpr int STEP = 32 / sizeof(Element);
  const int lane = threadIdx.x % 32, first_row = threadIdx.x % WARP_GROUP / 32 * 16 + lane / 4;
  float rows[2][STEP];
  for (int k = 0; k < 2 * STEP; ++k) {
    rows[k / STEP][k % STEP] = operand<Element>(lhs, LHS_K_CONTIGUOUS, first_row + k / STEP * 8, k % STEP);
  }
  for (int i = 0; i < COLUMNS / 2; i += 4) {
    float* own = acc + FIRST + i;
    for (int column = 0; column < 2; ++column) {
      float sums[2] = {accumulate ? own[column] : 0, accumulate ? own[2 + column] : 0};
      for (int k = 0; k < STEP; ++k) {
        const float value = operand<Element>(rhs, RHS_K_CONTIGUOUS, i * 2 + lane % 4 * 2 + column, k);
        for (int half = 0; half < 2; ++half) sums[half] += rows[half][k] * value;
      }
      own[column] = sums[0], own[2 + column] = sums[1];
    }
  }
}

// One thread's share of acc[64, 2 * REGISTERS] (+)= lhs[64, 32 bytes] * rhs[32 bytes, ...], with `lhs(half, k)` of its rows.
template <typename Lhs, int REGISTERS>
void multiply_rows(float (&acc)[REGISTERS], const Lhs& lhs, unsigned long long rhs, bool k_contiguous, int accumulate) {
  constexpr int STEP = 32 / sizeof(Element);
  float rows[2][STEP];
  for (int k = 0; k < 2 * STEP; ++k) rows[k / STEP][k % STEP] = lhs(k / STEP, k % STEP);
  for (int i = 0; i < REGISTERS; i += 4) {
    for (int column = 0; column < 2; ++column) {
      float sums[2] = {accumulate ? acc[i + column] : 0, accumulate ? acc[i + 2 + column] : 0};
      for (int k = 0; k < STEP; ++k) {
        const float value = operand<Element>(rhs, k_contiguous, i * 2 + threadIdx.x % 4 * 2 + column, k);
        for (int half = 0; half < 2; ++half) sums[half] += rows[half][k] * value;
      }
      acc[i + column] = sums[0], acc[i + 2 + column] = sums[1];
    }
  }
}

// Those of the attention kernel: both operands by descriptor; lhs in registers.
template <int REGISTERS>
void multiply_scores(float (&acc)[REGISTERS], unsigned long long lhs, unsigned long long rhs, int accumulate) {
  const int first_row = threadIdx.x % WARP_GROUP / 32 * 16 + threadIdx.x % 32 / 4;
  const auto element = [&](int half, int k) { return operand<Element>(lhs, true, first_row + half * 8, k); };
  multiply_rows(acc, element, rhs, true, accumulate);
}
template <int REGISTERS>
void multiply_values(float (&acc)[REGISTERS], const unsigned* lhs, unsigned long long rhs, int accumulate,
                     bool k_contiguous = sizeof(Element) == 4) {
  emulator::Warp& warp = emulator::warp();
  const int lane = threadIdx.x % 32;
  memcpy(warp.values[lane], lhs, 16);
  __syncwarp();
  const auto element = [&](int half, int k) {
    constexpr int HELD = 4 / sizeof(Element);  // neighbours along k in one register
    Element held[HELD];
    const int holder = lane / 4 * 4 + k / HELD % 4;
    const unsigned word = warp.values[holder][half + k / (4 * HELD) * 2] & (HELD == 1 ? 0xffffe000 : 0xffffffff);
    memcpy(static_cast<void*>(held), &word, 4);  // tensor cores cut fp32 to TF32
    return to_float(held[k % HELD]);
  };
  multiply_rows(acc, element, rhs, k_contiguous, accumulate);
  __syncwarp();
}

// Of a weight in registers: those from FIRST on of acc[64, columns of a tile] (+)= lhs[64, 32 bytes] * rhs.
template <int FIRST, int COLUMNS, int REGISTERS>
void multiply(float (&acc)[REGISTERS], const unsigned (&lhs)[4], unsigned long long rhs, int accumulate) {
  multiply_values(reinterpret_cast<float (&)[COLUMNS / 2]>(acc[FIRST]), lhs, rhs, accumulate, true);
}

template <int WORDS>
void load_words(unsigned (&words)[WORDS], unsigned shared) {
  memcpy(words, emulator::shared(shared, WORDS * 4), WORDS * 4);
}

template <typename T>
unsigned twice(T, unsigned pair, int upper) {
  return (upper ? pair >> 16 : pair & 0xffff) * 0x10001;
}

template <typename T>
unsigned scaled_pair(T, unsigned numbers, unsigned zeros, unsigned scales) {
  T number[2], zero[2], scale[2], pair[2], scaled[2];
  memcpy(static_cast<void*>(number), &numbers, 4);
  memcpy(static_cast<void*>(zero), &zeros, 4);
  memcpy(static_cast<void*>(scale), &scales, 4);
  store_pair(pair, to_float(number[0]) - to_float(zero[0]), to_float(number[1]) - to_float(zero[1]));
  store_pair(scaled, to_float(pair[0]) * to_float(scale[0]), to_float(pair[1]) * to_float(scale[1]));
  unsigned result;
  memcpy(&result, scaled, 4);
  return result;
}

template <bool TRANSPOSED>
void store_matrices_to(unsigned shared, const unsigned (&matrices)[4]) {
  emulator::Warp& warp = emulator::warp();
  const int lane = threadIdx.x % 32;
  warp.values[lane][0] = shared;
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) {
      const unsigned short bits = matrices[i] >> 16 * half;
      const int row = lane / 4, column = lane % 4 * 2 + half;
      unsigned char* line = emulator::shared(warp.values[i * 8 + (TRANSPOSED ? column : row)][0], 16);
      memcpy(line + (TRANSPOSED ? row : column) * 2, &bits, 2);
    }
  }
  __syncwarp();
}
inline void store_matrices(unsigned shared, const unsigned (&matrices)[4]) {
  store_matrices_to<false>(shared, matrices);
}
inline void store_matrices_transposed(unsigned shared, const unsigned (&matrices)[4]) {
  store_matrices_to<true>(shared, matrices);
}

// ---- warp groups

template <int REGISTERS>
void take_registers() {}
template <int REGISTERS>
void give_registers() {}

inline void named_arrive(int barrier, int threads) { emulator::arrive(emulator::cluster.named(barrier, threads)); }
inline void named_sync(int barrier, int threads) { emulator::wait(emulator::cluster.named(barrier, threads)); }

}  // namespace onnxfuse
