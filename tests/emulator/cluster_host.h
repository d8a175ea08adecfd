// The blocks of a cluster on the CPU, and copies of TMA that land when nothing else can go on.
#pragma once
#include <map>

#include "cuda_host.h"
#include "shuffles.h"

#define __cluster_dims__(...)

struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulator {

constexpr int MAX_ROUNDS = 20000;  // many times what a launch takes that does not hang
constexpr int STILL = 400;         // rounds, more than what is left when the last stage has been multiplied

struct Cluster {
  int rank = 0;
  std::vector<Block> blocks;
  std::vector<std::map<int, Barrier>> barriers;  // of each block, by number
  Barrier all;
  bool lazy = false;
  int still = 0;  // round from which on the first block stands still for STILL of them; 0 for never
  std::vector<std::function<void()>> copies;  // under way

  Barrier& named(int barrier, int threads) {
    Barrier& found = barriers[rank][barrier];
    found.size = threads;
    return found;
  }

  void later(const std::function<void()>& copy) {
    if (lazy) {
      copies.push_back(copy);
    } else {
      copy();
    }
  }

  // The copy that has been under way for the longest, or the newest.
  void land(bool newest) {
    if (copies.empty()) return;
    const auto which = newest ? copies.end() - 1 : copies.begin();
    const std::function<void()> copy = *which;
    copies.erase(which);
    copy();
  }
};

inline Cluster cluster;

// All threads of the blocks `first` and following, until they end or something fails.
inline void run_cluster(int blocks, int threads, int first, const std::function<void()>& kernel) {
  cluster.blocks = std::vector<Block>(blocks);
  for (Block& each : cluster.blocks) each.lazy = block.lazy;
  cluster.barriers.assign(blocks, {});
  cluster.all = {blocks * threads};
  cluster.copies.clear();
  ended = 0;
  const auto in_block = [&](int rank, const auto& body) {
    cluster.rank = rank;
    blockIdx.x = first + rank;
    std::swap(block, cluster.blocks[rank]);
    body();
    std::swap(block, cluster.blocks[rank]);
  };
  for (int rank = 0; rank < blocks; ++rank) {
    in_block(rank, [&] { start_block(threads, kernel, onnxfuse_shared + rank * EMULATED_BLOCK_PITCH); });
  }
  int round = 0;
  for (bool running = true; running && failure.empty(); ++round) {
    running = false;
    for (int i = 0; i < blocks; ++i) {
      const int rank = cluster.lazy ? blocks - 1 - i : i;
      if (rank == 0 && cluster.still > 0 && round >= cluster.still && round < cluster.still + STILL) {
        running = true;
        continue;
      }
      in_block(rank, [&] {
        running = step_block(cluster.lazy) || running;
        const auto finished = [](const Fiber& fiber) { return fiber.finished; };
        ended |= std::all_of(block.fibers.begin(), block.fibers.end(), finished) ? 1u << rank : 0u;
      });
    }
    if (round == MAX_ROUNDS) failure = "threads wait for each other";
  }
}

}  // namespace emulator
