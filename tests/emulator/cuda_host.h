// CUDA C++ on the CPU, as far as the kernels of onnxfuse use it: a block's threads are fibers of one thread, switched
// at every barrier. Included before the emitted source; the folder's other headers stand in for those of CUDA. What is
// the same for all kernels is in emulator.cc, which is compiled once: every kernel pays for what stands here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ inline
#define __shared__
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

using std::isfinite;

// <algorithm> is larger than everything else that a kernel includes.
template <typename T>
constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}
template <typename T>
constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}

struct float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

struct Position {
  unsigned x, y, z;
};
extern Position threadIdx, blockIdx, gridDim;

// Of the blocks of a cluster, each behind 24 bits of offset; memory that no block touches costs nothing.
constexpr int EMULATED_MAX_BLOCKS = 8;
constexpr int EMULATED_SHARED_BYTES = 228 * 1024;
constexpr int EMULATED_BLOCK_PITCH = 1 << 24;
extern "C" {
extern unsigned char onnxfuse_shared[(EMULATED_MAX_BLOCKS - 1) * EMULATED_BLOCK_PITCH + EMULATED_SHARED_BYTES];
}

inline float __int_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(bits); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> shift % 32);
}
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __saturatef(float x) { return x > 0.0f ? min(x, 1.0f) : 0.0f; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// As the programming guide has it: 0 for a large finite divisor, whatever the quotient would be.
inline float __fdividef(float x, float y) {
  if (fabsf(y) > 0x1p126f) return std::isinf(x) ? NAN : (std::isnan(x) || std::isnan(y) ? NAN : 0.0f * x);
  return x / y;
}

namespace emulator {

struct Barrier {
  int size, arrived = 0, generation = 0;
};

// What a kernel may do with bytes: read them behind its wait for the kernel before, write them there, or read them at any
// time.
enum Use { READ = 0, WRITTEN = 1, READY = 2 };

// Bytes that a kernel may touch, as the tests describe them.
struct Range {
  unsigned char* begin;
  size_t bytes;
  int use;
  int widest;  // access to it, in bytes: what comes back
};

struct PendingCopy {
  unsigned shared;
  unsigned char bytes[16];
  int count;
};

struct Warp {
  Barrier barrier;
  unsigned values[32][8];
};

struct Fiber;

struct Block {
  Fiber* fibers;
  Warp* warps;
  int threads;
  Barrier barrier;
  bool lazy;  // cp.async lands as late as it may; otherwise at once
  bool any;   // of a barrier that asks
};

extern Block block;
extern int conflicts;
extern unsigned ended;  // blocks of a cluster that have no shared memory any more, one bit each

[[noreturn]] void fail(const char* message);
void yield();
void check_global(const void* pointer, size_t bytes, bool write);
void check_landing(const void* pointer, size_t bytes);  // of what a thread asked for before
void check_order(const void* pointer);                  // of what it asks for
void wait_for_kernel_before();

// cp.async of the current thread: into its open group; the open group closed; all but so many closed ones landed.
void copy_later(const PendingCopy& copy);
void close_group();
void land_groups(size_t pending);

inline void arrive(Barrier& barrier) {
  if (++barrier.arrived != barrier.size) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

inline void wait(Barrier& barrier) {
  const int generation = barrier.generation;
  arrive(barrier);
  while (barrier.generation == generation) yield();
}

inline Warp& warp() { return block.warps[threadIdx.x / 32]; }

inline unsigned char* shared(unsigned address, size_t bytes) {
  if (ended >> address / EMULATED_BLOCK_PITCH & 1) fail("shared memory of a block that has ended");
  if (address % EMULATED_BLOCK_PITCH + bytes > EMULATED_SHARED_BYTES) fail("shared memory out of bounds");
  if (address % bytes) fail("misaligned access of shared memory");
  return onnxfuse_shared + address;
}

// What every thread of a launch runs: a call of the kernel with its arguments.
struct Kernel {
  void (*run)(const void* call);
  const void* call;

  template <typename Call>
  explicit Kernel(const Call& own) : run([](const void* call) { (*static_cast<const Call*>(call))(); }), call(&own) {}
};

struct Launch {
  int grid_x, grid_z, threads;
  bool late;    // lands cp.async as late as it may
  int lazy;     // of a cluster: as cluster_launch.h has it
  int cluster;  // blocks of one; 0 where blocks run one by one
  int writes;   // that a byte may get
};

// Returns what went wrong, or an empty string.
const char* launch(const Launch& launch, Range* ranges, int range_count, const Kernel& kernel);

}  // namespace emulator

inline void __syncthreads() { emulator::wait(emulator::block.barrier); }
inline int __syncthreads_or(int own) {
  if (own) emulator::block.any = true;
  __syncthreads();
  const bool any = emulator::block.any;
  __syncthreads();
  emulator::block.any = false;
  __syncthreads();
  return any;
}
inline void __syncwarp() { emulator::wait(emulator::warp().barrier); }
