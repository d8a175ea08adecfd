// What a warp exchanges on the CPU.
#pragma once
#include "cuda_host.h"

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  if constexpr (!std::is_same_v<T, float>) return value;  // of what all lanes have
  emulator::Warp& warp = emulator::warp();
  memcpy(&warp.values[threadIdx.x % 32][7], &value, 4);
  __syncwarp();
  T other;
  memcpy(&other, &warp.values[source][7], 4);
  __syncwarp();
  return other;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  emulator::Warp& warp = emulator::warp();
  const int lane = threadIdx.x % 32;
  memcpy(&warp.values[lane][7], &value, 4);
  __syncwarp();
  T other;
  memcpy(static_cast<void*>(&other), &warp.values[lane ^ mask][7], 4);
  __syncwarp();
  return other;
}

inline int __any_sync(unsigned, int own) {
  bool any = own;
  for (int mask = 1; mask < 32; mask *= 2) any = __shfl_xor_sync(0xffffffff, static_cast<int>(any), mask) || any;
  return any;
}
