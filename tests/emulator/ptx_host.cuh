// Stands in for common/ptx.cuh: the same functions in C++. Every access to global memory is checked for bounds and alignment,
// and ldmatrix for bank conflicts. Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16" and "... m16n8k8".
namespace onnxfuse {

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - onnxfuse_shared);
}

template <int BYTES>
unsigned short load_small(const void* global, bool inside) {
  unsigned short value = 0;
  if (inside) emulator::check_global(global, BYTES, false);
  if (inside) memcpy(&value, global, BYTES);
  return value;
}

template <int BYTES>
void store_small(unsigned shared, unsigned short value) {
  memcpy(emulator::shared(shared, BYTES), &value, BYTES);
}

template <int BYTES>
void copy_async(unsigned shared, const void* global, bool inside) {
  if (shared % BYTES || (inside && reinterpret_cast<uintptr_t>(global) % BYTES)) emulator::fail("a misaligned copy");
  emulator::PendingCopy copy{shared, {}, BYTES};
  if (inside) emulator::check_global(global, BYTES, false);
  if (inside) memcpy(copy.bytes, global, BYTES);
  emulator::copy_later(copy);
}

inline void copy_async_part(unsigned shared, const void* global, int bytes) {
  emulator::PendingCopy copy{shared, {}, 4};
  if (reinterpret_cast<uintptr_t>(global) % 4) emulator::fail("misaligned word");
  if (bytes < 0 || bytes > 4) emulator::fail("a copy of no part of a word");
  for (int i = 0; i < bytes; ++i) emulator::check_global(static_cast<const unsigned char*>(global) + i, 1, false);
  memcpy(copy.bytes, global, bytes);
  emulator::copy_later(copy);
}

inline void copy_async_commit() { emulator::close_group(); }

template <int PENDING>
void copy_async_wait() {
  emulator::land_groups(PENDING);
}

template <typename Vector>
Vector load_global(const typename Vector::Type* global) {
  emulator::check_global(global, sizeof(Vector), false);
  Vector packed;
  memcpy(static_cast<void*>(&packed), global, sizeof(Vector));
  return packed;
}

template <typename Vector>
Vector load_streamed(const typename Vector::Type* global, bool inside) {
  Vector packed = {};
  if (!inside) return packed;
  emulator::check_global(global, sizeof(Vector), false);
  memcpy(static_cast<void*>(&packed), global, sizeof(Vector));
  return packed;
}
template <typename Vector>
Vector load_cached(const typename Vector::Type* global, bool inside) {
  return load_streamed<Vector>(global, inside);
}

template <typename Vector>
Vector load_fresh(const typename Vector::Type* global, bool inside) {
  return load_streamed<Vector>(global, inside);
}

template <typename Vector>
void store_global(typename Vector::Type* global, const Vector& packed) {
  emulator::check_global(global, sizeof(Vector), true);
  memcpy(static_cast<void*>(global), &packed, sizeof(Vector));
}

inline void store_shared(unsigned address, const Packed<unsigned, 4>& packed) {
  memcpy(emulator::shared(address, sizeof packed), &packed, sizeof packed);
}

template <int COUNT>
void load_shared(float (&values)[COUNT], unsigned address) {
  memcpy(values, emulator::shared(address, sizeof values), sizeof values);
}

inline unsigned load_shared_word(unsigned address) {
  unsigned value;
  memcpy(&value, emulator::shared(address, 4), 4);
  return value;
}

struct HostMbarrier {
  short count, pending;
  int phase;
};
inline HostMbarrier& host_mbarrier(unsigned address) {
  return *reinterpret_cast<HostMbarrier*>(emulator::shared(address, sizeof(HostMbarrier)));
}
inline void mbarrier_init(unsigned barrier, int arrivals) {
  host_mbarrier(barrier) = {static_cast<short>(arrivals), static_cast<short>(arrivals), 0};
}
inline void mbarrier_arrive(unsigned barrier) {
  HostMbarrier& own = host_mbarrier(barrier);
  if (--own.pending == 0) own.pending = own.count, ++own.phase;
}
inline void mbarrier_wait(unsigned barrier, int parity) {
  while (host_mbarrier(barrier).phase % 2 == parity) emulator::yield();
}

inline void count_conflicts(const emulator::Warp& warp) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned banks = 0;
    for (int row = 0; row < 8; ++row) banks |= 1u << warp.values[matrix * 8 + row][0] / 16 % 8;
    if (banks != 0xff) ++emulator::conflicts;
  }
}

template <bool TRANSPOSED>
void load_matrices_from(unsigned (&matrices)[4], unsigned address) {
  emulator::Warp& warp = emulator::warp();
  const int lane = threadIdx.x % 32;
  warp.values[lane][0] = address;
  __syncwarp();
  if (lane == 0) count_conflicts(warp);
  for (int i = 0; i < 4; ++i) {
    if (TRANSPOSED) {
      unsigned short pair[2];
      for (int k = 0; k < 2; ++k) {
        memcpy(&pair[k], emulator::shared(warp.values[i * 8 + lane % 4 * 2 + k][0], 16) + lane / 4 * 2, 2);
      }
      matrices[i] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
    } else {
      memcpy(&matrices[i], emulator::shared(warp.values[i * 8 + lane / 4][0], 16) + lane % 4 * 4, 4);
    }
  }
  __syncwarp();
}

inline void load_matrices(unsigned (&matrices)[4], unsigned address) { load_matrices_from<false>(matrices, address); }
inline void load_matrices_transposed(unsigned (&matrices)[4], unsigned address) {
  load_matrices_from<true>(matrices, address);
}

inline float half_of(__half, unsigned word, int half) {
  const unsigned short bits = word >> 16 * half;
  __half value;
  memcpy(static_cast<void*>(&value), &bits, 2);
  return to_float(value);
}
inline float half_of(__nv_bfloat16, unsigned word, int half) {
  return to_float(__nv_bfloat16{static_cast<unsigned short>(word >> 16 * half)});
}
inline float half_of(float, unsigned word, int) { return __int_as_float(word & 0xffffe000); }  // TF32

// The fp32 number next to `value` towards zero.
inline float cut(double value) {
  const float nearest = static_cast<float>(value);
  return std::isfinite(value) && fabs(nearest) > fabs(value) ? nextafterf(nearest, 0.0f) : nearest;
}

// sum + products as a tensor core adds: exact products are shifted to the largest exponent, cut to the 24 bits of fp32,
// added exactly, and the result is cut too. Volta keeps no bit more than that; later ones keep one or two.
template <int COUNT>
float add_cut(float sum, const double (&products)[COUNT]) {
  double largest = fabs(sum), plain = sum;
  for (double product : products) largest = ::max(largest, fabs(product)), plain += product;
  if (!std::isfinite(plain) || largest == 0.0) return static_cast<float>(plain);
  const double unit = ::max(ldexp(1.0, std::ilogb(largest) - 23), 0x1p-149);
  double units = trunc(sum / unit);
  for (double product : products) units += trunc(product / unit);
  return cut(units * unit);
}

template <typename T>
void multiply_fragment(T type, float (&acc)[4], const unsigned (&lhs)[4], const unsigned (&rhs)[2]) {
  constexpr int PACKED = 4 / sizeof(T);  // elements of one register
  constexpr int SIDE = 4 * PACKED;       // of k in one register of all lanes of a row, and of one addition
  emulator::Warp& warp = emulator::warp();
  const int lane = threadIdx.x % 32;
  memcpy(warp.values[lane], lhs, sizeof lhs);
  memcpy(warp.values[lane] + 4, rhs, sizeof rhs);
  __syncwarp();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4, column = lane % 4 * 2 + e % 2;
    for (int side = 0; side < 2; ++side) {
      double products[SIDE];
      for (int k = 0; k < SIDE; ++k) {
        const double a = half_of(type, warp.values[row * 4 + k / PACKED][e / 2 + side * 2], k % PACKED);
        products[k] = a * half_of(type, warp.values[column * 4 + k / PACKED][4 + side], k % PACKED);
      }
      acc[e] = add_cut(acc[e], products);
    }
  }
  __syncwarp();
}

template <typename T>
void multiply_onto(T type, float (&result)[4], const float (&start)[4], const unsigned (&lhs)[4],
                   const unsigned (&rhs)[2]) {
  float acc[4];
  memcpy(acc, start, sizeof acc);
  multiply_fragment(type, acc, lhs, rhs);
  memcpy(result, acc, sizeof acc);
}

inline void round_to_tf32(unsigned& value) {
  if ((value & 0x7f800000) != 0x7f800000) value = (value + 0x1000) & ~0x1fffu;
}

inline void wait_for_kernel_before() { emulator::wait_for_kernel_before(); }
inline void let_kernel_behind_start() {}
inline void prefetch_into_l2(const void*) {}

inline unsigned permute_bytes(unsigned first, unsigned second, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(second) << 32 | first;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

inline unsigned masked_or(unsigned word, unsigned mask, unsigned others) { return (word & mask) | others; }

template <typename T>
unsigned pack_pair(T, float first, float second) {
  T pair[2];
  store_pair(pair, first, second);
  unsigned packed;
  memcpy(&packed, pair, 4);
  return packed;
}

template <typename T>
unsigned subtract_pair(T type, unsigned first, unsigned second) {
  T pair[2];
  for (int i = 0; i < 2; ++i) {
    T both[2];
    store_pair(both, half_of(type, first, i) - half_of(type, second, i), 0.0f);
    pair[i] = both[0];
  }
  unsigned result;
  memcpy(&result, pair, 4);
  return result;
}

inline float at_least_normal(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? 0.0f : x; }
inline float fast_exp2(float x) { return at_least_normal(exp2f(at_least_normal(x))); }
inline float fast_reciprocal(float x) { return at_least_normal(1.0f / at_least_normal(x)); }

inline float minimum(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : ::min(a, b); }
inline float maximum(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : ::max(a, b); }

}  // namespace onnxfuse
