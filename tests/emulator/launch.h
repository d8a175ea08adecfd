// Included after the emitted source: runs its kernel over a grid, block by block, or cluster by cluster of EMULATED_BLOCKS.
#ifndef ONNXFUSE_ENTRY
#define ONNXFUSE_ENTRY onnxfuse_gemm
#endif
#ifndef EMULATED_BLOCKS
#define EMULATED_BLOCKS 0
#endif

// Returns what went wrong, or an empty string; `conflicts` counts the bank conflicts of ldmatrix. No byte may be
// written twice.
extern "C" const char* emulate(const OnnxfuseArguments* args, int grid_x, int grid_z, int threads, int lazy,
                               emulator::Range* ranges, int range_count, int* conflicts) {
  const auto call = [&] { ONNXFUSE_ENTRY(*args); };
  const emulator::Launch launch = {grid_x, grid_z, threads, lazy != 0, lazy != 0, EMULATED_BLOCKS, 1};
  const char* failure = emulator::launch(launch, ranges, range_count, emulator::Kernel(call));
  *conflicts = emulator::conflicts;
  return failure;
}
