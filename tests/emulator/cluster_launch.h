// Included after the emitted source: runs its kernel over a grid, cluster by cluster.
static_assert(EMULATED_BLOCKS <= EMULATED_MAX_BLOCKS);
#ifndef EMULATED_WRITES
#define EMULATED_WRITES 1
#endif
struct EmulatedRange {
  unsigned char* begin;
  size_t bytes;
  int writable;
  int widest;  // access to it, in bytes: what comes back
};

// Returns what went wrong, or an empty string. With `lazy`, threads and blocks run in the opposite order, and copies
// land only while somebody waits; more than 1 is the round in which the first block begins to stand still for long. No
// byte may be written twice, but where the last tile down begins earlier than its neighbour ends.
extern "C" const char* emulate(const OnnxfuseArguments* args, const onnxfuse::Maps* maps, int blocks, int threads,
                               int lazy, EmulatedRange* ranges, int range_count) {
  emulator::failure.clear();
  emulator::ranges.clear();
  emulator::cluster.lazy = lazy;
  emulator::cluster.still = lazy > 1 ? lazy : 0;
  for (int i = 0; i < range_count; ++i) {
    emulator::ranges.push_back(
        {ranges[i].begin, ranges[i].bytes, ranges[i].writable != 0, std::vector<unsigned char>(ranges[i].bytes)});
  }
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  for (int first = 0; first < blocks && emulator::failure.empty(); first += EMULATED_BLOCKS) {
    emulator::run_cluster(EMULATED_BLOCKS, threads, first, [&] { onnxfuse_gemm(*args, *maps); });
  }
  for (int i = 0; i < range_count; ++i) ranges[i].widest = static_cast<int>(emulator::ranges[i].widest);
  for (const auto& range : emulator::ranges) {
    for (unsigned char writes : range.writes) {
      if (writes > EMULATED_WRITES && emulator::failure.empty()) emulator::failure = "an element was written twice";
    }
  }
  return emulator::failure.c_str();
}
