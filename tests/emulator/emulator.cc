// What is the same for every kernel on the CPU: fibers, ranges of memory, and the launch of a grid.
#undef _FORTIFY_SOURCE  // whose longjmp refuses to go from one stack to another
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cluster_host.h"

Position threadIdx, blockIdx, gridDim;
alignas(1024) unsigned char onnxfuse_shared[(EMULATED_MAX_BLOCKS - 1) * EMULATED_BLOCK_PITCH + EMULATED_SHARED_BYTES];

namespace emulator {

Block block;
Cluster cluster;
int conflicts;
unsigned ended;

// swapcontext asks the kernel for the mask of signals at every switch: it begins a fiber, and longjmp goes on with it.
struct Fiber {
  ucontext_t beginning;
  jmp_buf place;
  bool begun, finished, waited;                  // the last for the kernel before
  std::vector<std::vector<PendingCopy>> groups;  // of cp.async, the open one last
  int phase;                                     // of the barrier of a cluster, in which it arrived there last
};

namespace {

constexpr size_t STACK = 256 * 1024;
constexpr int MAX_ROUNDS = 20000;  // many times what a launch takes that does not hang
constexpr int STILL = 400;         // rounds, more than what is left when the last stage has been multiplied

struct Memory {
  Range* range;
  std::vector<unsigned char> writes;  // of each byte
};

struct OwnBlock {
  Block state;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::map<int, Barrier> barriers;  // by number
};

std::vector<Memory> memories;
std::string failure;
jmp_buf scheduler;
const Kernel* entry;
std::vector<std::unique_ptr<char[]>> stacks;
std::vector<OwnBlock> blocks;
std::vector<ClusterCopy> copies;  // under way
bool late_copies;                 // of TMA: they land when nothing else can go on
int still;                        // round from which on the first block stands still for STILL of them; 0 for never

Fiber& fiber() { return block.fibers[threadIdx.x]; }

[[noreturn]] void run_fiber() {
  entry->run(entry->call);
  fiber().finished = true;
  _longjmp(scheduler, 1);
}

void go_on_with(Fiber& own) {
  if (_setjmp(scheduler) != 0) return;
  if (own.begun) _longjmp(own.place, 1);
  own.begun = true;
  setcontext(&own.beginning);
}

[[noreturn]] void fail_with(const std::string& message) {
  if (failure.empty()) failure = message;
  while (true) yield();
}

void land_copy(const PendingCopy& copy) { memcpy(shared(copy.shared, copy.count), copy.bytes, copy.count); }

// Fibers for the threads of a block, whose shared memory is that of its rank.
void start_block(int rank, int threads, bool late) {
  memset(onnxfuse_shared + rank * EMULATED_BLOCK_PITCH, 0xff, EMULATED_SHARED_BYTES);  // NaN in every type
  OwnBlock& own = blocks[rank];
  own.fibers = std::vector<Fiber>(threads);
  own.warps.assign(threads / 32, Warp{{32}, {}});
  own.barriers.clear();
  own.state = {own.fibers.data(), own.warps.data(), threads, {threads}, late, false};
  while (stacks.size() < static_cast<size_t>((rank + 1) * threads)) stacks.emplace_back(new char[STACK]);
  for (int i = 0; i < threads; ++i) {
    Fiber& each = own.fibers[i];
    each.groups.resize(1);
    getcontext(&each.beginning);
    each.beginning.uc_stack.ss_sp = stacks[rank * threads + i].get();
    each.beginning.uc_stack.ss_size = STACK;
    makecontext(&each.beginning, run_fiber, 0);
  }
}

// Every thread of the current block up to its next barrier. Returns whether any was left to run.
bool step_block(bool backwards) {
  bool running = false;
  for (int i = 0; i < block.threads && failure.empty(); ++i) {
    threadIdx.x = backwards ? block.threads - 1 - i : i;
    if (fiber().finished) continue;
    running = true;
    go_on_with(fiber());
  }
  return running;
}

void run_block(const Launch& launch) {
  start_block(0, launch.threads, launch.late);
  block = blocks[0].state;
  while (failure.empty() && step_block(false)) continue;
}

bool step_cluster(int rank, int first, bool lazy) {
  cluster.rank = rank;
  blockIdx.x = first + rank;
  block = blocks[rank].state;
  const bool running = step_block(lazy);
  blocks[rank].state = block;
  const auto finished = [](const Fiber& fiber) { return fiber.finished; };
  ended |= std::all_of(blocks[rank].fibers.begin(), blocks[rank].fibers.end(), finished) ? 1u << rank : 0u;
  return running;
}

// All threads of the blocks `first` and following, until they end or something fails.
void run_cluster(const Launch& launch, int first) {
  cluster.all = {launch.cluster * launch.threads};
  copies.clear();
  ended = 0;
  for (int rank = 0; rank < launch.cluster; ++rank) start_block(rank, launch.threads, launch.late);
  int round = 0;
  for (bool running = true; running && failure.empty(); ++round) {
    running = false;
    for (int i = 0; i < launch.cluster; ++i) {
      const int rank = launch.lazy ? launch.cluster - 1 - i : i;
      const bool stands = rank == 0 && still > 0 && round >= still && round < still + STILL;
      running = stands || step_cluster(rank, first, launch.lazy) || running;
    }
    if (round == MAX_ROUNDS) failure = "threads wait for each other";
  }
}

void run_grid(const Launch& launch) {
  for (int z = 0; z < launch.grid_z; ++z) {
    const int step = std::max(launch.cluster, 1);
    for (int x = 0; x < launch.grid_x && failure.empty(); x += step) {
      blockIdx = {static_cast<unsigned>(x), 0, static_cast<unsigned>(z)};
      if (launch.cluster > 0) {
        run_cluster(launch, x);
      } else {
        run_block(launch);
      }
    }
  }
}

}  // namespace

void yield() {
  const unsigned self = threadIdx.x;
  if (_setjmp(fiber().place) == 0) _longjmp(scheduler, 1);
  threadIdx.x = self;
}

void fail(const char* message) { fail_with(message); }

Memory* memory_of(const void* pointer, size_t bytes) {
  const auto* address = static_cast<const unsigned char*>(pointer);
  for (Memory& memory : memories) {
    const Range& range = *memory.range;
    if (range.begin <= address && address + bytes <= range.begin + range.bytes) return &memory;
  }
  return nullptr;
}

void check_order(const void* pointer) {
  const Memory* memory = memory_of(pointer, 1);
  if (fiber().waited || (memory != nullptr && memory->range->use == READY)) return;
  fail("an access that does not wait for the kernel before");
}

Memory& checked(const void* pointer, size_t bytes, bool write) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes) {
    fail_with("misaligned access of " + std::to_string(bytes) + " bytes");
  }
  Memory* memory = memory_of(pointer, bytes);
  if (memory == nullptr) {
    fail_with(std::string(write ? "write" : "read") + " of " + std::to_string(bytes) + " bytes out of bounds");
  }
  memory->range->widest = std::max(memory->range->widest, static_cast<int>(bytes));
  return *memory;
}

void check_landing(const void* pointer, size_t bytes) { checked(pointer, bytes, false); }

void check_global(const void* pointer, size_t bytes, bool write) {
  Memory& memory = checked(pointer, bytes, write);
  check_order(pointer);
  if (!write) return;
  if (memory.range->use != WRITTEN) fail("write into an input");
  const size_t first = static_cast<const unsigned char*>(pointer) - memory.range->begin;
  for (size_t i = 0; i < bytes; ++i) ++memory.writes[first + i];
}

void wait_for_kernel_before() { fiber().waited = true; }

void copy_later(const PendingCopy& copy) {
  if (block.lazy) {
    fiber().groups.back().push_back(copy);
  } else {
    land_copy(copy);
  }
}

void close_group() { fiber().groups.emplace_back(); }

void land_groups(size_t pending) {
  auto& groups = fiber().groups;
  while (groups.size() - 1 > pending) {
    for (const auto& copy : groups.front()) land_copy(copy);
    groups.erase(groups.begin());
  }
}

Barrier& Cluster::named(int barrier, int threads) {
  Barrier& found = blocks[rank].barriers[barrier];
  found.size = threads;
  return found;
}

void Cluster::keep(const ClusterCopy& copy) {
  if (late_copies) {
    copies.push_back(copy);
  } else {
    copy.land(copy.captured);
  }
}

void Cluster::land(bool newest) {
  if (copies.empty()) return;
  const auto which = newest ? copies.end() - 1 : copies.begin();
  const ClusterCopy copy = *which;
  copies.erase(which);
  copy.land(copy.captured);
}

int& phase_of_arrival() { return fiber().phase; }

const char* launch(const Launch& launch, Range* ranges, int range_count, const Kernel& kernel) {
  failure.clear();
  memories.clear();
  conflicts = 0;
  ended = 0;
  cluster.rank = 0;
  entry = &kernel;
  late_copies = launch.lazy != 0;
  still = launch.cluster > 0 && launch.lazy > 1 ? launch.lazy : 0;
  blocks = std::vector<OwnBlock>(std::max(launch.cluster, 1));
  for (int i = 0; i < range_count; ++i) {
    ranges[i].widest = 0;
    memories.push_back({&ranges[i], std::vector<unsigned char>(ranges[i].bytes)});
  }
  gridDim = {static_cast<unsigned>(launch.grid_x), 1, static_cast<unsigned>(launch.grid_z)};
  run_grid(launch);
  for (const Memory& memory : memories) {
    for (unsigned char writes : memory.writes) {
      if (writes > launch.writes && failure.empty()) failure = "an element was written twice";
    }
  }
  blocks.clear();
  stacks.clear();
  return failure.c_str();
}

}  // namespace emulator
