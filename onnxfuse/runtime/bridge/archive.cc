#include "archive.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "error.h"
#include "inflate.h"

namespace onnxfuse {
namespace {

constexpr char kMagic[] = "onnxfuse";
constexpr uint32_t kVersion = 8;
constexpr uint64_t kHeaderBytes = 32;
constexpr uint64_t kChecksumOffset = 24;
constexpr uint64_t kRecordBytes = 256;
constexpr uint64_t kKernelBytes = 32;
constexpr uint64_t kEntryBytes = 64;
constexpr uint32_t kMaxBlock = 1 << 16;
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxCluster = 16;
constexpr uint32_t kMaxBox = 256;
constexpr uint32_t kMaxSharedBytes = 1 << 20;
constexpr uint64_t kMaxImageBytes = 1 << 26;
constexpr uint64_t kMaxRatio = 1032;   // that deflate can reach: 258 bytes for two bits
constexpr char kRemedy[] = "; the model's kernels are damaged or from another version, optimize the original again";

// Little-endian fields, in order, inside [data, data + size).
class Cursor {
 public:
  Cursor(const uint8_t* data, uint64_t size) : data_(data), size_(size) {}

  template <typename Number>
  Number number() {
    Number value;
    std::memcpy(&value, bytes(sizeof(Number)), sizeof(Number));
    return value;
  }

  // A text in a field of fixed width that a NUL ends.
  std::string field(uint64_t width, const char* what) {
    const char* start = reinterpret_cast<const char*>(bytes(width));
    const size_t length = strnlen(start, width);
    if (length == 0 || length == width) fail("a record's ", what, " is empty or not terminated", kRemedy);
    // Names end up in messages, which must be text.
    const bool printable = std::all_of(start, start + length, [](char c) { return c > ' ' && c <= '~'; });
    if (!printable) fail("a record's ", what, " is not printable ASCII", kRemedy);
    return std::string(start, length);
  }

  const uint8_t* bytes(uint64_t count) {
    if (count > size_ - position_) fail("the archive ends inside a field", kRemedy);
    position_ += count;
    return data_ + position_ - count;
  }

 private:
  const uint8_t* data_;
  uint64_t size_;
  uint64_t position_ = 0;
};

std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xEDB88320u : 0u);
    table[byte] = value;
  }
  return table;
}

// CRC-32 as zlib computes it; `crc` is that of what came before.
uint32_t crc32(const uint8_t* data, uint64_t size, uint32_t crc) {
  static const std::array<uint32_t, 256> table = crc_table();
  crc = ~crc;
  for (uint64_t i = 0; i < size; ++i) crc = table[(crc ^ data[i]) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

uint32_t parse_header(const uint8_t* data, uint64_t size) {
  if (data == nullptr || size < kHeaderBytes) fail("the archive has ", size, " bytes, less than its header", kRemedy);
  Cursor cursor(data, kHeaderBytes);
  if (std::memcmp(cursor.bytes(8), kMagic, 8) != 0) fail("the archive does not begin with '", kMagic, "'", kRemedy);
  const auto version = cursor.number<uint32_t>();
  const auto count = cursor.number<uint32_t>();
  const auto total = cursor.number<uint64_t>();
  const auto checksum = cursor.number<uint64_t>();
  if (version != kVersion) {
    fail("the archive has version ", version, " and this onnxfuse reads version ", kVersion,
         "; use the onnxfuse that wrote the model, or optimize the original again");
  }
  if (total != size) fail("the archive should have ", total, " bytes and has ", size, kRemedy);
  if (count > (size - kHeaderBytes) / kRecordBytes) fail("the archive cannot hold ", count, " records", kRemedy);
  const uint32_t header_crc = crc32(data, kChecksumOffset, 0);
  if (checksum != crc32(data + kHeaderBytes, size - kHeaderBytes, header_crc)) {
    fail("the archive's checksum does not match its bytes", kRemedy);
  }
  return count;
}

constexpr uint8_t kTurned = 128;   // in the byte of an alignment

uint8_t parse_alignment(Cursor& cursor, uint32_t& turned, size_t tensor) {
  const auto way = cursor.number<uint8_t>();
  const uint8_t alignment = way & ~kTurned;
  if (way & kTurned) turned |= 1u << tensor;
  if (way == kTurned) fail("a record turns a tensor that it does not have", kRemedy);
  if (alignment > 16 || (alignment & (alignment - 1)) != 0) fail("a record has alignment ", int{alignment}, kRemedy);
  return alignment;
}

// Alignments of tensors of which a kernel has any number; 0 follows the last. Returns how many it has.
template <size_t Count>
size_t parse_alignments(Cursor& cursor, uint8_t (&alignments)[Count], uint32_t& turned, size_t first) {
  size_t used = 0;
  for (size_t i = 0; i < Count; ++i) {
    alignments[i] = parse_alignment(cursor, turned, first + i);
    if (alignments[i] == 0) continue;
    if (used != i) fail("the alignments of a record have a gap", kRemedy);
    ++used;
  }
  return used;
}

Alignments parse_alignments(Cursor& cursor) {
  Alignments alignments;
  alignments.lhs = parse_alignment(cursor, alignments.turned, 0);
  alignments.rhs = parse_alignment(cursor, alignments.turned, kRhsIndex);
  if ((alignments.lhs == 0) != (alignments.rhs == 0)) fail("a record has half a product", kRemedy);
  alignments.load_count = parse_alignments(cursor, alignments.loads, alignments.turned, kFirstLoad);
  alignments.out_count = parse_alignments(cursor, alignments.outs, alignments.turned, kFirstOut);
  for (int byte = 0; byte < 6; ++byte) alignments.two_levels |= uint64_t{cursor.number<uint8_t>()} << 8 * byte;
  return alignments;
}

MapRule parse_map(Cursor& cursor) {
  MapRule rule;
  rule.tensor = Mapped{cursor.number<uint8_t>()};
  rule.index = cursor.number<uint8_t>();
  rule.rows_contiguous = cursor.number<uint8_t>() != 0;
  rule.swizzle = cursor.number<uint8_t>();
  rule.box_inner = cursor.number<uint16_t>();
  rule.box_outer = cursor.number<uint16_t>();
  return rule;
}

bool is_possible(const MapRule& rule, const Alignments& alignments) {
  const bool swizzle = rule.swizzle == 0 || rule.swizzle == 32 || rule.swizzle == 64 || rule.swizzle == 128;
  const bool box = rule.box_inner >= 1 && rule.box_inner <= kMaxBox && rule.box_outer >= 1 && rule.box_outer <= kMaxBox;
  const bool index = rule.tensor == Mapped::kOut ? rule.index < alignments.out_count : rule.index < ONNXFUSE_MAX_PARTS;
  const bool there = rule.tensor >= Mapped::kOut || alignments.has_product();
  return rule.tensor <= Mapped::kNothing && swizzle && box && there && (index || rule.tensor == Mapped::kNothing);
}

void parse_maps(Cursor& cursor, Record& record) {
  record.cluster = cursor.number<uint32_t>();
  const auto count = cursor.number<uint32_t>();
  if (count > kMaxMaps || record.cluster > kMaxCluster) fail("a record holds impossible numbers", kRemedy);
  for (size_t i = 0; i < kMaxMaps; ++i) {
    const MapRule rule = parse_map(cursor);
    if (i >= count) continue;
    if (!is_possible(rule, record.alignments)) fail("a record has an impossible tensor map", kRemedy);
    record.maps.push_back(rule);
  }
}

void check_record(const Record& record) {
  const bool sane = record.flavour <= Flavour::kPtx && record.capability >= 10 && record.capability < 1000 &&
                    0 <= record.min_m && record.min_m <= record.max_m && record.block_m >= 1 &&
                    record.block_m <= kMaxBlock && record.block_n >= 1 && record.block_n <= kMaxBlock &&
                    record.threads >= 1 && record.threads <= kMaxThreads && record.shared_bytes <= kMaxSharedBytes;
  if (!sane) fail("a record of kernel ", record.kernel, " holds impossible numbers", kRemedy);
}

void parse_image(Cursor& cursor, const uint8_t* data, uint64_t size, uint64_t table_end, Record& record) {
  const auto offset = cursor.number<uint64_t>();
  record.packed_bytes = cursor.number<uint32_t>();
  record.image_bytes = cursor.number<uint32_t>();
  if (record.packed_bytes == 0 || offset < table_end || offset > size || record.packed_bytes > size - offset) {
    fail("the code of kernel ", record.kernel, " lies outside of the archive", kRemedy);
  }
  const uint64_t most = std::min(kMaxImageBytes, record.packed_bytes * kMaxRatio);
  if (record.image_bytes == 0 || record.image_bytes > most) {
    fail("the code of kernel ", record.kernel, " has an impossible size of ", record.image_bytes, " bytes", kRemedy);
  }
  record.packed = data + offset;
}

std::string architecture_text(const Record& record) {
  if (record.flavour == Flavour::kPtx) return text("PTX for sm_", record.capability, " and later");
  return text("sm_", record.capability, record.flavour == Flavour::kSpecific ? "a" : "");
}

std::string architectures_text(const std::vector<const Record*>& records) {
  std::vector<std::string> names;
  for (const Record* record : records) {
    const std::string name = architecture_text(*record);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  std::string result;
  for (const std::string& name : names) result += (result.empty() ? "" : ", ") + name;
  return result;
}

std::string remedy_for(uint32_t device) {
  constexpr uint32_t kKnown[] = {80, 86, 89, 100, 120};
  if (device < 80) return "onnxfuse needs compute capability 8.0 or later; run the model without onnxfuse there";
  const bool known = std::find(std::begin(kKnown), std::end(kKnown), device) != std::end(kKnown);
  const std::string arch = device == 90 ? "sm_90a" : known ? text("sm_", device) : "ptx";
  return "add it: onnxfuse optimize ORIGINAL.onnx -o OUT.onnx --arch " + arch;
}

// Whether `earlier` fits wherever `later` does, so that `later` is never chosen (and its PTX need not be compiled).
bool shadows(const Record& earlier, const Record& later) {
  const Alignments &a = earlier.alignments, &b = later.alignments;
  return a.turned == b.turned && earlier.min_m <= later.min_m && earlier.max_m >= later.max_m && a.lhs <= b.lhs &&
         a.rhs <= b.rhs && (~a.two_levels & b.two_levels) == 0 && (earlier.maps.empty() || !later.maps.empty()) &&
         std::equal(std::begin(a.loads), std::end(a.loads), b.loads, std::less_equal<uint8_t>()) &&
         std::equal(std::begin(a.outs), std::end(a.outs), b.outs, std::less_equal<uint8_t>());
}

struct Extents {
  int batch, rows, columns;
};

// What a record asks of one tensor.
struct Need {
  uint8_t alignment;
  uint64_t two_levels;   // bit 0: its rows, bit 1: its columns, bit 2: its batch
  bool turned;           // accesses go down the rows
};

// A pitch is a multiple of the alignment, but for the contiguous axis: there, accesses end where a run does.
bool is_walkable(int extent, int64_t stride, int run, int64_t outer_stride, int64_t bytes, const Need& need, int loop) {
  const auto fits = [&](int64_t elements) { return elements * bytes % need.alignment == 0; };
  if (run < extent && !((need.two_levels >> loop & 1) && fits(outer_stride))) return false;
  return run <= 1 || fits(stride == 1 ? run : stride);
}

// Whether accesses of several elements find neighbours where they go. A size of 1 that only the run knows may have made
// another axis contiguous than the one that the kernel was compiled for.
bool is_contiguous(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int64_t bytes, const Need& need) {
  if (need.alignment <= bytes) return true;
  const int64_t stride = need.turned ? tensor.row_stride : tensor.column_stride;
  const int64_t run = need.turned ? outer.rows : outer.columns;
  return stride == 1 && run * bytes % need.alignment == 0;
}

bool fits(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, const Extents& extents, int64_t bytes,
          const Need& need) {
  return reinterpret_cast<uintptr_t>(tensor.pointer) % need.alignment == 0 &&
         is_walkable(extents.batch, tensor.batch_stride, outer.batches, outer.batch_stride, bytes, need, 2) &&
         is_walkable(extents.rows, tensor.row_stride, outer.rows, outer.row_stride, bytes, need, 0) &&
         is_walkable(extents.columns, tensor.column_stride, outer.columns, outer.column_stride, bytes, need, 1) &&
         is_contiguous(tensor, outer, bytes, need);
}

// The tensor map of lhs has one axis for batches and runs of columns, so one stride must walk both.
bool is_stacked(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int columns, int batch) {
  if (outer.columns >= columns || batch <= 1 || tensor.batch_stride == 0) return true;
  return tensor.batch_stride == columns / outer.columns * outer.column_stride;
}

// Whether TMA reaches what the record wants it to.
bool is_mapped(const Record& record, const OnnxfuseArguments& arguments) {
  return std::all_of(record.maps.begin(), record.maps.end(), [&](const MapRule& rule) {
    return rule.tensor != Mapped::kLhs ||
           is_stacked(arguments.lhs, arguments.lhs_outer, arguments.k, arguments.batch);
  });
}

// The first argument whose address, pitches or levels the record's kernel cannot read; empty when all fit.
std::string misfit(const Record& record, const Contract& contract, const ElementBytes& bytes,
                   const OnnxfuseArguments& arguments) {
  const Alignments& all = record.alignments;
  const Extents lhs{arguments.batch, arguments.m, arguments.k}, rhs{arguments.batch, arguments.k, arguments.n},
      tile{arguments.batch, arguments.m, arguments.n};
  const auto need = [&](uint8_t alignment, size_t tensor) {
    return Need{alignment, all.levels_of(tensor), (all.turned >> tensor & 1) != 0};
  };
  const auto words = [](uint8_t alignment) { return text(" needs ", int{alignment}); };
  const bool multiplies = contract.has_product();
  if (multiplies && !fits(arguments.lhs, arguments.lhs_outer, lhs, bytes.lhs, need(all.lhs, 0))) {
    return text("lhs", words(all.lhs));
  }
  for (size_t i = 0; i < contract.rhs.size(); ++i) {
    if (!fits(arguments.rhs[i], arguments.rhs_outer, rhs, bytes.rhs[i], need(all.rhs, kRhsIndex))) {
      return text("rhs ", i, words(all.rhs));
    }
  }
  for (size_t i = 0; i < contract.loads.size(); ++i) {
    const Need wanted = need(all.loads[i], kFirstLoad + i);
    if (!fits(arguments.loads[i], arguments.loads_outer[i], tile, bytes.loads[i], wanted)) {
      return text("load ", i, words(wanted.alignment));
    }
  }
  for (size_t i = 0; i < contract.outs.size(); ++i) {
    const Need wanted = need(all.outs[i], kFirstOut + i);
    if (!fits(arguments.outs[i], arguments.outs_outer[i], tile, bytes.outs[i], wanted)) {
      return text("out ", i, words(wanted.alignment));
    }
  }
  if (!record.maps.empty() && arguments.k == 0) return "a tensor map needs an element along k, beside";
  if (!is_mapped(record, arguments)) return "the tensor map of lhs needs batches right outside of runs, beside";
  return "";
}

// A kernel with more tensors than the node names would follow a null pointer on the device.
void check_counts(const Record& record, const Contract& contract) {
  const Alignments& has = record.alignments;
  if (has.has_product() != contract.has_product()) {
    fail("kernel ", record.kernel, has.has_product() ? " computes a product, the node none" : " computes no product",
         kRemedy);
  }
  for (const MapRule& rule : record.maps) {
    if (rule.tensor == Mapped::kRhs && rule.index >= contract.rhs.size()) {
      fail("kernel ", record.kernel, " maps part ", int{rule.index}, " of ", contract.rhs.size(), kRemedy);
    }
  }
  if (has.load_count == contract.loads.size() && has.out_count == contract.outs.size()) return;
  fail("kernel ", record.kernel, " has ", has.load_count, " loads and ", has.out_count, " outputs, the node ",
       contract.loads.size(), " and ", contract.outs.size(), kRemedy);
}

// What the ranges of m mean: where all batches share rhs, it is their rows together that decide how often it is read.
int64_t planned_rows(const Contract& contract, const OnnxfuseArguments& arguments) {
  const auto is_shared = [](const OnnxfuseTensor& rhs) { return rhs.batch_stride == 0; };
  const bool shared = contract.has_product() &&
                      std::all_of(arguments.rhs, arguments.rhs + contract.rhs.size(), is_shared);
  const int64_t rows = int64_t{arguments.m} * (shared ? arguments.batch : 1);
  return std::min<int64_t>(rows, std::numeric_limits<int>::max());
}

bool covers(const Record& record, int64_t rows) { return record.min_m <= rows && rows <= record.max_m; }

[[noreturn]] void nothing_fits(const std::vector<const Record*>& candidates, const Contract& contract,
                               const ElementBytes& bytes, const OnnxfuseArguments& arguments) {
  std::string ranges, alignment;
  const int64_t rows = planned_rows(contract, arguments);
  for (const Record* record : candidates) {
    ranges += text(ranges.empty() ? "" : ", ", record->min_m, "..", record->max_m);
    if (covers(*record, rows) && alignment.empty()) alignment = misfit(*record, contract, bytes, arguments);
  }
  if (alignment.empty()) {
    fail("no kernel ", contract.kernel, " for m=", rows, " (the model's are for m=", ranges,
         "); optimize the original again for this range");
  }
  fail("no kernel ", contract.kernel, " for how the data lies in memory: ", alignment,
       "-byte alignment of its address and pitches, each loop in one stride or as it was compiled (m=", arguments.m,
       "); optimize the original again with these shapes");
}

}  // namespace

Records parse_archive(const uint8_t* data, uint64_t size) {
  const uint32_t count = parse_header(data, size);
  const uint64_t table_end = kHeaderBytes + count * kRecordBytes;
  Cursor cursor(data + kHeaderBytes, count * kRecordBytes);
  Records records(count);
  for (Record& record : records) {
    record.kernel = cursor.field(kKernelBytes, "kernel id");
    record.entry = cursor.field(kEntryBytes, "entry");
    record.capability = cursor.number<uint32_t>();
    record.flavour = Flavour{cursor.number<uint32_t>()};
    record.min_m = cursor.number<int64_t>();
    record.max_m = cursor.number<int64_t>();
    record.block_m = cursor.number<uint32_t>();
    record.block_n = cursor.number<uint32_t>();
    record.threads = cursor.number<uint32_t>();
    record.shared_bytes = cursor.number<uint32_t>();
    record.alignments = parse_alignments(cursor);
    parse_maps(cursor, record);
    check_record(record);
    parse_image(cursor, data, size, table_end, record);
  }
  return records;
}

bool runs_on(const Record& record, const Device& device) {
  if (record.shared_bytes > device.shared_bytes || (!record.maps.empty() && !device.has_tensor_maps)) return false;
  switch (record.flavour) {
    case Flavour::kCubin:
      return record.capability / 10 == device.capability / 10 && record.capability <= device.capability;
    case Flavour::kSpecific:
      return record.capability == device.capability;
    case Flavour::kPtx:
      return record.capability <= device.capability;
  }
  return false;
}

std::vector<const Record*> records_for(const Records& records, const Contract& contract, const Device& device) {
  std::vector<const Record*> all, chosen;
  for (const Record& record : records) {
    if (record.kernel != contract.kernel) continue;
    check_counts(record, contract);
    all.push_back(&record);
    const bool shadowed = std::any_of(chosen.begin(), chosen.end(),
                                      [&](const Record* earlier) { return shadows(*earlier, record); });
    if (runs_on(record, device) && !shadowed) chosen.push_back(&record);
  }
  if (all.empty()) fail("the model carries no kernel ", contract.kernel, kRemedy);
  if (chosen.empty()) {
    fail("the model carries this kernel for ", architectures_text(all), " and the device is sm_", device.capability,
         " with ", device.shared_bytes, " bytes of shared memory a block; ", remedy_for(device.capability));
  }
  return chosen;
}

size_t choose(const std::vector<const Record*>& candidates, const Contract& contract, const ElementBytes& bytes,
              const OnnxfuseArguments& arguments) {
  const int64_t rows = planned_rows(contract, arguments);
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Record& record = *candidates[i];
    if (covers(record, rows) && misfit(record, contract, bytes, arguments).empty()) return i;
  }
  nothing_fits(candidates, contract, bytes, arguments);
}

std::vector<uint8_t> read_image(const Record& record) {
  std::vector<uint8_t> image(uint64_t{record.image_bytes} + 1);
  try {
    inflate(record.packed, record.packed_bytes, image.data(), record.image_bytes);
  } catch (const Error& error) {
    fail("the code of kernel ", record.kernel, " is damaged: ", error.what(), kRemedy);
  }
  return image;
}

void check_image(const Record& record, const std::vector<uint8_t>& image) {
  if (record.flavour == Flavour::kPtx) return;
  // ELF64: e_shoff at 40, e_shentsize at 58, e_shnum at 60; of a section sh_type at 4, sh_offset at 24, sh_size at 32.
  constexpr uint64_t kElfHeader = 64, kSectionHeader = 64;
  constexpr uint32_t kNoBits = 8;
  const uint64_t size = record.image_bytes;
  const auto wrong = [&] { fail("the code of kernel ", record.kernel, " is not a cubin", kRemedy); };
  if (size < kElfHeader || std::memcmp(image.data(), "\x7f" "ELF\x02\x01", 6) != 0) wrong();
  const auto read = [&](uint64_t offset, auto* value) { std::memcpy(value, image.data() + offset, sizeof(*value)); };
  uint64_t table = 0;
  uint16_t entry_bytes = 0, count = 0;
  read(40, &table);
  read(58, &entry_bytes);
  read(60, &count);
  if (count == 0) return;
  if (entry_bytes != kSectionHeader || table > size || count > (size - table) / kSectionHeader) wrong();
  for (uint64_t header = table; header < table + count * kSectionHeader; header += kSectionHeader) {
    uint32_t type = 0;
    uint64_t offset = 0, bytes = 0;
    read(header + 4, &type);
    read(header + 24, &offset);
    read(header + 32, &bytes);
    if (type != kNoBits && (offset > size || bytes > size - offset)) wrong();
  }
}

uint64_t content_hash(const uint8_t* data, uint64_t size) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (uint64_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 0x100000001b3ull;
  return hash;
}

}  // namespace onnxfuse
