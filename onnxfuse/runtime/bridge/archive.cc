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
constexpr uint32_t kVersion = 16;
constexpr uint64_t kHeaderBytes = 32;
constexpr uint64_t kChecksumOffset = 24;
constexpr uint64_t kRecordBytes = 283;
constexpr uint64_t kKernelBytes = 32;
constexpr uint64_t kEntryBytes = 64;
constexpr uint32_t kMaxBlock = 1 << 16;
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxCluster = 16;
constexpr uint32_t kMaxBox = 256;
constexpr uint32_t kMaxSharedBytes = 1 << 20;
constexpr uint64_t kMaxImageBytes = 1 << 26;
constexpr uint64_t kMaxRatio = 1032;   // that deflate can reach: 258 bytes for two bits

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

constexpr size_t kProductTensors = 2;   // lhs and rhs

void check_rule(const TensorRule& rule) {
  const int alignment = rule.alignment;
  if (alignment > 16 || (alignment & (alignment - 1)) != 0) fail("a record has alignment ", alignment, kRemedy);
  if ((rule.flags & ~kAllFlags) != 0) fail("a record has unknown flags ", int{rule.flags}, kRemedy);
  if (alignment == 0 && rule.flags != 0) fail("a record has flags of a tensor that it does not have", kRemedy);
}

// How many of `count` tensors a kernel has; it lacks those behind the last.
size_t count_tensors(const TensorRule* rules, size_t count) {
  size_t used = 0;
  for (size_t i = 0; i < count; ++i) {
    if (rules[i].alignment == 0) continue;
    if (used != i) fail("the alignments of a record have a gap", kRemedy);
    ++used;
  }
  return used;
}

void parse_tensors(Cursor& cursor, Record& record) {
  for (TensorRule& rule : record.tensors) rule.alignment = cursor.number<uint8_t>();
  for (TensorRule& rule : record.tensors) rule.flags = cursor.number<uint8_t>();
  for (const TensorRule& rule : record.tensors) check_rule(rule);
  if (count_tensors(record.tensors, kProductTensors) == 1) fail("a record has half a product", kRemedy);
  record.load_count = count_tensors(record.tensors + kFirstLoad, ONNXFUSE_MAX_LOADS);
  record.out_count = count_tensors(record.tensors + kFirstOut, ONNXFUSE_MAX_OUTS);
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

bool is_possible(const MapRule& rule, const Record& record) {
  const bool swizzle = rule.swizzle == 0 || rule.swizzle == 32 || rule.swizzle == 64 || rule.swizzle == 128;
  const bool box = rule.box_inner >= 1 && rule.box_inner <= kMaxBox && rule.box_outer >= 1 && rule.box_outer <= kMaxBox;
  const size_t count = rule.tensor == Mapped::kOut    ? record.out_count
                       : rule.tensor == Mapped::kLoad ? record.load_count
                                                      : ONNXFUSE_MAX_PARTS;
  const bool index = rule.index < count;
  const bool there = rule.tensor >= Mapped::kOut || record.has_product();
  return rule.tensor <= Mapped::kLoad && swizzle && box && there && (index || rule.tensor == Mapped::kNothing);
}

void parse_maps(Cursor& cursor, Record& record) {
  record.cluster = cursor.number<uint16_t>();
  record.early_depth = cursor.number<uint32_t>();
  record.full_early_depth = cursor.number<uint32_t>();
  const auto count = cursor.number<uint32_t>();
  const bool deeper = record.full_early_depth >= record.early_depth;
  if (count > kMaxMaps || record.cluster > kMaxCluster || !deeper) fail("a record holds impossible numbers", kRemedy);
  for (size_t i = 0; i < kMaxMaps; ++i) {
    const MapRule rule = parse_map(cursor);
    if (i >= count) continue;
    if (!is_possible(rule, record)) fail("a record has an impossible tensor map", kRemedy);
    record.maps.push_back(rule);
  }
}

void parse_library(Cursor& cursor, Record& record) {
  record.library = LibraryMath{cursor.number<uint32_t>()};
  const bool plain = record.has_product() && record.maps.empty() && record.cluster == 0 && record.load_count > 0;
  if (record.library > LibraryMath::kTf32 || (record.library != LibraryMath::kNone && !plain)) {
    fail("a record has an impossible product of the library", kRemedy);
  }
}

bool is_power_of_two(int number) { return number > 0 && (number & (number - 1)) == 0; }

void parse_quantized(Cursor& cursor, Record& record) {
  Quantized& form = record.quantized;
  form.bits = cursor.number<uint8_t>();
  form.block = cursor.number<uint16_t>();
  form.scales_alignment = cursor.number<uint8_t>();
  form.zero_points_alignment = cursor.number<uint8_t>();
  if (form.bits == 0 && form.block == 0 && form.scales_alignment == 0 && form.zero_points_alignment == 0) return;
  const auto is_alignment = [](int bytes) { return bytes <= 16 && is_power_of_two(bytes); };
  const bool is_block = 16 <= form.block && form.block <= 256 && is_power_of_two(form.block);
  const bool sane = (form.bits == 4 || form.bits == 8) && is_block && is_alignment(form.scales_alignment) &&
                    (form.zero_points_alignment == 0 || is_alignment(form.zero_points_alignment));
  if (!sane || !record.has_product() || record.library != LibraryMath::kNone) {
    fail("a record has an impossible quantized rhs", kRemedy);
  }
}

void check_copy(const Record& record) {
  const TensorRule* tensors = record.tensors;
  const auto is_copied = [](const TensorRule& rule) { return (rule.flags & kCopied) != 0; };
  const bool in_one_level = (!record.copies(kLhsIndex) || tensors[kLhsIndex].flags == kCopied) &&
                            (!record.copies(kRhsIndex) || (tensors[kRhsIndex].flags | kTransposed) == (kCopied | kTransposed));
  const bool own = !record.is_quantized() && record.library == LibraryMath::kNone;
  if (std::any_of(tensors + kFirstLoad, tensors + kTensors, is_copied) || (record.copies_any() && !(in_one_level && own))) {
    fail("a record has an impossible copy", kRemedy);
  }
}

void check_record(const Record& record) {
  check_copy(record);
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
    parse_tensors(cursor, record);
    parse_maps(cursor, record);
    parse_library(cursor, record);
    parse_quantized(cursor, record);
    check_record(record);
    parse_image(cursor, data, size, table_end, record);
  }
  return records;
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
