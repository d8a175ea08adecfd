// Included after the emitted source: runs its kernel over a grid, block by block, or cluster by cluster of EMULATED_BLOCKS.
#ifndef ONNXFUSE_ENTRY
#define ONNXFUSE_ENTRY onnxfuse_gemm
#endif
struct EmulatedRange {
  unsigned char* begin;
  size_t bytes;
  int writable;
  int widest;  // access to it, in bytes: what comes back
};

// Returns what went wrong, or an empty string; `conflicts` counts the bank conflicts of ldmatrix. No byte may be
// written twice.
extern "C" const char* emulate(const OnnxfuseArguments* args, int grid_x, int grid_z, int threads, int lazy,
                               EmulatedRange* ranges, int range_count, int* conflicts) {
  emulator::failure.clear();
  emulator::ranges.clear();
  emulator::conflicts = 0;
  emulator::block.lazy = lazy;
  for (int i = 0; i < range_count; ++i) {
    emulator::ranges.push_back(
        {ranges[i].begin, ranges[i].bytes, ranges[i].writable != 0, std::vector<unsigned char>(ranges[i].bytes)});
  }
  gridDim = {static_cast<unsigned>(grid_x), 1, static_cast<unsigned>(grid_z)};
  blockIdx = {0, 0, 0};
  const auto kernel = [&] { ONNXFUSE_ENTRY(*args); };
  for (int z = 0; z < grid_z; ++z) {
#ifdef EMULATED_BLOCKS
    emulator::cluster.lazy = lazy;
    for (int x = 0; x < grid_x && emulator::failure.empty(); x += EMULATED_BLOCKS) {
      emulator::run_cluster(EMULATED_BLOCKS, threads, x, kernel);
    }
#else
    for (int x = 0; x < grid_x && emulator::failure.empty(); ++x) {
      blockIdx = {static_cast<unsigned>(x), 0, static_cast<unsigned>(z)};
      emulator::run_block(threads, kernel);
    }
#endif
  }
  for (int i = 0; i < range_count; ++i) ranges[i].widest = static_cast<int>(emulator::ranges[i].widest);
  for (const auto& range : emulator::ranges) {
    for (unsigned char writes : range.writes) {
      if (writes > 1 && emulator::failure.empty()) emulator::failure = "an element was written twice";
    }
  }
  *conflicts = emulator::conflicts;
  return emulator::failure.c_str();
}
