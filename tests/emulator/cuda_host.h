// CUDA C++ on the CPU, as far as the kernels of onnxfuse use it: a block's threads are fibers of one thread, switched
// at every barrier. Included before the emitted source; the folder's other headers stand in for those of CUDA.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ inline
#define __shared__
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

using std::isfinite;
using std::max;
using std::min;

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
inline Position threadIdx, blockIdx, gridDim;

// Of the blocks of a cluster, each behind 24 bits of offset; memory that no block touches costs nothing.
constexpr int EMULATED_MAX_BLOCKS = 8;
constexpr int EMULATED_SHARED_BYTES = 228 * 1024;
constexpr int EMULATED_BLOCK_PITCH = 1 << 24;
extern "C" {
alignas(1024) inline unsigned char
    onnxfuse_shared[(EMULATED_MAX_BLOCKS - 1) * EMULATED_BLOCK_PITCH + EMULATED_SHARED_BYTES];
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
inline float __saturatef(float x) { return x > 0.0f ? std::min(x, 1.0f) : 0.0f; }
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

// Bytes that a kernel may touch, and how often it wrote each.
struct Range {
  unsigned char* begin;
  size_t bytes;
  bool writable;
  std::vector<unsigned char> writes;
  size_t widest = 0;  // access, in bytes
};

struct PendingCopy {
  unsigned shared;
  unsigned char bytes[16];
  int count;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool finished;
  std::vector<std::vector<PendingCopy>> groups;  // of cp.async, the open one last
  int phase;  // of the barrier of a cluster, in which it arrived there last
};

struct Warp {
  Barrier barrier;
  unsigned values[32][8];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  ucontext_t scheduler;
  bool lazy;  // cp.async lands as late as it may; otherwise at once
  bool any;   // of a barrier that asks
};

inline Block block;
inline std::vector<Range> ranges;
inline std::string failure;
inline int conflicts;

[[noreturn]] inline void fail(const std::string& message);

inline Fiber& fiber() { return block.fibers[threadIdx.x]; }

inline void yield() {
  const unsigned self = threadIdx.x;
  swapcontext(&fiber().context, &block.scheduler);
  threadIdx.x = self;
}

inline void fail(const std::string& message) {
  if (failure.empty()) failure = message;
  while (true) yield();
}

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

inline void check_global(const void* pointer, size_t bytes, bool write) {
  const auto* address = static_cast<const unsigned char*>(pointer);
  if (reinterpret_cast<uintptr_t>(address) % bytes) fail("misaligned access of " + std::to_string(bytes) + " bytes");
  for (Range& range : ranges) {
    if (address < range.begin || address + bytes > range.begin + range.bytes) continue;
    range.widest = std::max(range.widest, bytes);
    if (!write) return;
    if (!range.writable) fail("write into an input");
    for (size_t i = 0; i < bytes; ++i) ++range.writes[address - range.begin + i];
    return;
  }
  fail(std::string(write ? "write" : "read") + " of " + std::to_string(bytes) + " bytes out of bounds");
}

inline unsigned ended;  // blocks of a cluster that have no shared memory any more, one bit each

inline unsigned char* shared(unsigned address, size_t bytes) {
  if (ended >> address / EMULATED_BLOCK_PITCH & 1) fail("shared memory of a block that has ended");
  if (address % EMULATED_BLOCK_PITCH + bytes > EMULATED_SHARED_BYTES) fail("shared memory out of bounds");
  if (address % bytes) fail("misaligned access of shared memory");
  return onnxfuse_shared + address;
}

// Fibers for the threads of the current block, whose shared memory is `memory`.
inline void start_block(int threads, const std::function<void()>& kernel, unsigned char* memory) {
  memset(memory, 0xff, EMULATED_SHARED_BYTES);  // NaN in every type
  block.fibers = std::vector<Fiber>(threads);
  block.warps.assign(threads / 32, Warp{{32}, {}});
  block.barrier = {threads};
  static const std::function<void()>* entry;
  entry = &kernel;
  for (Fiber& own : block.fibers) {
    constexpr size_t STACK = 256 * 1024;
    own.stack.reset(new char[STACK]);
    own.groups.resize(1);
    getcontext(&own.context);
    own.context.uc_stack.ss_sp = own.stack.get();
    own.context.uc_stack.ss_size = STACK;
    own.context.uc_link = &block.scheduler;
    makecontext(
        &own.context,
        +[] {
          (*entry)();
          fiber().finished = true;
        },
        0);
  }
}

// Every thread of the current block up to its next barrier. Returns whether any was left to run.
inline bool step_block(bool backwards = false) {
  bool running = false;
  const int threads = static_cast<int>(block.fibers.size());
  for (int i = 0; i < threads && failure.empty(); ++i) {
    threadIdx.x = backwards ? threads - 1 - i : i;
    if (fiber().finished) continue;
    running = true;
    swapcontext(&block.scheduler, &fiber().context);
  }
  return running;
}

inline void run_block(int threads, const std::function<void()>& kernel) {
  start_block(threads, kernel, onnxfuse_shared);
  while (failure.empty() && step_block()) continue;
}

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
