// The model's archive of kernels: one uint8 initializer, written by onnxfuse/graph/archive.py. Pure: bytes in, records
// out. Every read is checked, so altered bytes give an Error and nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/common/arguments.cuh"

namespace onnxfuse {

enum class Flavour : uint32_t {
  kCubin = 0,      // runs on the same major version, the same minor or a later one
  kSpecific = 1,   // sm_90a: runs on exactly this capability
  kPtx = 2,        // the driver compiles it for this capability and all later ones
};

// Tensors of a record in order: lhs, rhs, the loads, the outputs.
constexpr size_t kLhsIndex = 0, kRhsIndex = 1, kFirstLoad = 2, kFirstOut = kFirstLoad + ONNXFUSE_MAX_LOADS;
constexpr size_t kTensors = kFirstOut + ONNXFUSE_MAX_OUTS;

// The loops of a tensor that the kernel walks in two levels; whether its accesses go down the tensor's rows; of lhs and
// rhs, whether the kernel reads a copy.
constexpr uint8_t kRowsInRuns = 1, kColumnsInRuns = 2, kBatchesInRuns = 4, kTransposed = 8, kCopied = 16;
constexpr uint8_t kInRuns = kRowsInRuns | kColumnsInRuns | kBatchesInRuns;
constexpr uint8_t kAllFlags = kInRuns | kTransposed | kCopied;

// What a record asks of one tensor. The alignment, in bytes, is of its address and all pitches; 0 for what the kernel
// does not have: lhs and rhs together, for a kernel without a product.
struct TensorRule {
  uint8_t alignment = 0, flags = 0;
};

enum class Mapped : uint8_t { kLhs = 0, kRhs = 1, kOut = 2, kNothing = 3, kLoad = 4 };

// How a launch describes one tensor to TMA, in elements; `swizzle` in bytes.
struct MapRule {
  Mapped tensor = Mapped::kNothing;
  uint8_t index = 0;
  bool rows_contiguous = false;
  uint8_t swizzle = 0;
  uint16_t box_inner = 0, box_outer = 0;
};

constexpr size_t kMaxMaps = 9;

// The early depth of a kernel that starts early whatever its size.
constexpr uint32_t kAnyDepth = 0xffffffff;

// How the library multiplies for a kernel that only does what follows; kNone where the kernel does all of it.
enum class LibraryMath : uint32_t { kNone = 0, kF16 = 1, kBf16 = 2, kTf32 = 3 };

// The form of the rhs that a kernel reads: 0 bits where it is not quantized. Alignments in bytes, of addresses; 0 of zero
// points that there are none of.
struct Quantized {
  uint16_t block = 0;
  uint8_t bits = 0, scales_alignment = 0, zero_points_alignment = 0;
};

struct Record {
  std::string kernel, entry;
  uint32_t capability = 0;
  Flavour flavour = Flavour::kCubin;
  int64_t min_m = 0, max_m = 0;   // inclusive
  uint32_t block_m = 0, block_n = 0, threads = 0, shared_bytes = 0;
  TensorRule tensors[kTensors];
  size_t load_count = 0, out_count = 0;
  uint32_t cluster = 0;        // 0: one block a tile; else a persistent grid of clusters of so many blocks
  uint32_t early_depth = 0;    // k of a block's tiles, or a grid's, up to which the kernel starts early; 0: never
  uint32_t full_early_depth = 0;   // the same of a persistent grid that leaves less than a quarter of the device idle
  std::vector<MapRule> maps;   // of the kernel's second parameter
  LibraryMath library = LibraryMath::kNone;   // else the first loads are the parts of the library's product
  Quantized quantized;
  const uint8_t* packed = nullptr;   // into the archive
  uint32_t packed_bytes = 0, image_bytes = 0;

  bool is_quantized() const { return quantized.bits != 0; }
  bool has_product() const { return tensors[kLhsIndex].alignment != 0; }
  bool copies(size_t tensor) const { return (tensors[tensor].flags & kCopied) != 0; }
  bool copies_any() const { return copies(kLhsIndex) || copies(kRhsIndex); }
  // Whether a run may lack the memory or the library that it needs, so that another record has to stand behind it.
  bool may_be_refused() const { return copies_any() || library != LibraryMath::kNone; }
};

using Records = std::vector<Record>;

// Ends a message about an archive that its writer would not have written.
constexpr char kRemedy[] = "; the model's kernels are damaged or from another version, optimize the original again";

// Reads an archive; the records point into `data`. Throws Error on anything that a writer would not have written.
Records parse_archive(const uint8_t* data, uint64_t size);

// The record's code, decompressed, and a zero byte: the driver reads PTX as a C string. Throws Error when it is
// damaged.
std::vector<uint8_t> read_image(const Record& record);

// Throws Error when a cubin's own tables point outside of it: the driver takes no length and would follow them.
void check_image(const Record& record, const std::vector<uint8_t>& image);

// Tells images apart. FNV-1a, 64 bits.
uint64_t content_hash(const uint8_t* data, uint64_t size);

}  // namespace onnxfuse
