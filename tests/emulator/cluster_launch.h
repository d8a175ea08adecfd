// Included after the emitted source: runs its kernel over a grid, cluster by cluster.
static_assert(EMULATED_BLOCKS <= EMULATED_MAX_BLOCKS);
#ifndef EMULATED_WRITES
#define EMULATED_WRITES 1
#endif

// Returns what went wrong, or an empty string. With `lazy`, threads and blocks run in the opposite order, and copies
// land only while somebody waits; more than 1 is the round in which the first block begins to stand still for long. No
// byte may be written twice, but where the last tile down begins earlier than its neighbour ends. cp.async lands at once:
// it arrives at a barrier, which nothing here waits for.
extern "C" const char* emulate(const OnnxfuseArguments* args, const onnxfuse::Maps* maps, int blocks, int threads,
                               int lazy, emulator::Range* ranges, int range_count) {
  const auto call = [&] { onnxfuse_gemm(*args, *maps); };
  const emulator::Launch launch = {blocks, 1, threads, false, lazy, EMULATED_BLOCKS, EMULATED_WRITES};
  return emulator::launch(launch, ranges, range_count, emulator::Kernel(call));
}
