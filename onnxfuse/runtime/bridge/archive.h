// The model's archive of kernels: one uint8 initializer, written by onnxfuse/graph/archive.py. Pure: bytes in, records out.
// Every read is checked, so altered bytes give an Error and nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "axes.h"

namespace onnxfuse {

enum class Flavour : uint32_t {
  kCubin = 0,      // runs on the same major version, the same minor or a later one
  kSpecific = 1,   // sm_90a: runs on exactly this capability
  kPtx = 2,        // the driver compiles it for this capability and all later ones
};

// What a record needs to know of a GPU.
struct Device {
  uint32_t capability = 0;     // as one number: 90 for 9.0, 120 for 12.0
  uint32_t shared_bytes = 0;   // that one block may use
  uint32_t multiprocessors = 0;
  bool has_tensor_maps = false;   // the driver knows TMA
};

// Loops of a tensor that a kernel walks in two levels.
constexpr uint64_t kRowsInRuns = 1, kColumnsInRuns = 2, kBatchesInRuns = 4;

constexpr int kBatchLevel = 2 * (2 + ONNXFUSE_MAX_LOADS + ONNXFUSE_MAX_OUTS);

// Bytes that the address and all pitches of an argument must be a multiple of; 0 for what the kernel does not have: lhs
// and rhs together, for a kernel without a product.
struct Alignments {
  uint8_t lhs = 1, rhs = 1, loads[ONNXFUSE_MAX_LOADS] = {}, outs[ONNXFUSE_MAX_OUTS] = {};
  size_t load_count = 0, out_count = 0;
  uint64_t two_levels = 0;   // bit 2 t: the kernel walks the rows of tensor t in two levels; 2 t + 1: its columns
                              // kBatchLevel: the batch of all loads and outputs that need it; behind it, of lhs, of rhs
  uint32_t turned = 0;       // bit t: accesses of tensor t go down its rows

  bool has_product() const { return lhs != 0; }
  // Which loops the kernel walks in two levels.
  uint64_t levels_of(size_t tensor) const {
    const size_t batch_level = kBatchLevel + (tensor > 1 ? 0 : 1 + tensor);
    return (two_levels >> 2 * tensor & 3) | (two_levels >> batch_level & 1) << 2;
  }
};

// Tensors in `two_levels`: lhs is 0.
constexpr size_t kLhsIndex = 0, kRhsIndex = 1, kFirstLoad = 2, kFirstOut = kFirstLoad + ONNXFUSE_MAX_LOADS;

enum class Mapped : uint8_t { kLhs = 0, kRhs = 1, kOut = 2, kNothing = 3 };

// How a launch describes one tensor to TMA, in elements; `swizzle` in bytes.
struct MapRule {
  Mapped tensor = Mapped::kNothing;
  uint8_t index = 0;
  bool rows_contiguous = false;
  uint8_t swizzle = 0;
  uint16_t box_inner = 0, box_outer = 0;
};

constexpr size_t kMaxMaps = 9;

struct Record {
  std::string kernel, entry;
  uint32_t capability = 0;
  Flavour flavour = Flavour::kCubin;
  int64_t min_m = 0, max_m = 0;   // inclusive
  uint32_t block_m = 0, block_n = 0, threads = 0, shared_bytes = 0;
  Alignments alignments;
  uint32_t cluster = 0;        // 0: one block a tile; else a persistent grid of clusters of so many blocks
  std::vector<MapRule> maps;   // of the kernel's second parameter
  const uint8_t* packed = nullptr;   // into the archive
  uint32_t packed_bytes = 0, image_bytes = 0;
};

using Records = std::vector<Record>;

// Reads an archive; the records point into `data`. Throws Error on anything that a writer would not have written.
Records parse_archive(const uint8_t* data, uint64_t size);

// A cubin of the right architecture may still ask for more shared memory than a smaller chip of it has.
bool runs_on(const Record& record, const Device& device);

// The records of a node's kernel that a device can run and that can ever be chosen, in the order of the archive. Throws
// Error that names the architectures and the command that adds one when there is none.
std::vector<const Record*> records_for(const Records& records, const Contract& contract, const Device& device);

// The first of the candidates whose range of m and alignments fit. Throws Error that says what does not fit.
size_t choose(const std::vector<const Record*>& candidates, const Contract& contract, const ElementBytes& bytes,
              const OnnxfuseArguments& arguments);

// The record's code, decompressed, and a zero byte: the driver reads PTX as a C string. Throws Error when it is damaged.
std::vector<uint8_t> read_image(const Record& record);

// Throws Error when a cubin's own tables point outside of it: the driver takes no length and would follow them.
void check_image(const Record& record, const std::vector<uint8_t>& image);

// Tells images apart. FNV-1a, 64 bits.
uint64_t content_hash(const uint8_t* data, uint64_t size);

}  // namespace onnxfuse
