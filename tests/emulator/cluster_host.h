// The blocks of a cluster on the CPU, and copies of TMA that land when nothing else can go on.
#pragma once
#include "cuda_host.h"
#include "shuffles.h"

#define __cluster_dims__(...)

struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulator {

// A copy that lands later, with what it captured.
struct ClusterCopy {
  void (*land)(const void* captured);
  alignas(16) unsigned char captured[112];
};

struct Cluster {
  int rank = 0;
  Barrier all;

  // The barrier of the current block with a number.
  Barrier& named(int barrier, int threads);

  template <typename Copy>
  void later(const Copy& copy) {
    static_assert(std::is_trivially_copyable_v<Copy> && sizeof(Copy) <= sizeof(ClusterCopy::captured));
    ClusterCopy kept{[](const void* captured) { (*static_cast<const Copy*>(captured))(); }, {}};
    memcpy(kept.captured, static_cast<const void*>(&copy), sizeof copy);
    keep(kept);
  }

  // The copy that has been under way for the longest, or the newest.
  void land(bool newest);

 private:
  void keep(const ClusterCopy& copy);
};

extern Cluster cluster;

// The phase of the barrier of the whole cluster in which the current thread arrived last.
int& phase_of_arrival();

}  // namespace emulator
