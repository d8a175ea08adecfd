#include "inflate.h"

#include <algorithm>
#include <vector>

#include "error.h"

namespace onnxfuse {
namespace {

constexpr int kLongestCode = 15;
constexpr int kLiterals = 288, kDistances = 32, kCodeLengths = 19;
constexpr int kUsedLiterals = 286, kUsedDistances = 30;   // the others have codes in fixed blocks, and no meaning
constexpr int kEndOfBlock = 256;

[[noreturn]] void damaged(const char* what) { fail("a compressed kernel ", what); }

// Bits, the lowest of each byte first.
class Bits {
 public:
  Bits(const uint8_t* data, uint64_t size) : next_(data), end_(data + size) {}

  // The next bits without taking them; zeros behind the end.
  uint32_t peek(int count) {
    while (held_ <= 56 && next_ < end_) {
      buffer_ |= uint64_t{*next_++} << held_;
      held_ += 8;
    }
    return static_cast<uint32_t>(buffer_ & ((uint64_t{1} << count) - 1));
  }

  void drop(int count) {
    if (count > held_) damaged("ends too early");
    buffer_ >>= count;
    held_ -= count;
  }

  uint32_t take(int count) {
    const uint32_t value = peek(count);
    drop(count);
    return value;
  }

  void skip_to_byte() { drop(held_ % 8); }
  bool at_end() const { return held_ == 0 && next_ == end_; }

 private:
  const uint8_t *next_, *end_;
  uint64_t buffer_ = 0;
  int held_ = 0;
};

// A prefix code as one table: what the next bits begin with.
class Code {
 public:
  // `lengths` has the bits of each symbol's code, 0 for a symbol without one. A code that leaves bits without meaning
  // is legal only where `may_be_single` and it has one symbol, of one bit.
  Code(const uint8_t* lengths, int symbols, bool may_be_single) {
    int count[kLongestCode + 1] = {}, next[kLongestCode + 1] = {};
    for (int symbol = 0; symbol < symbols; ++symbol) ++count[lengths[symbol]];
    count[0] = 0;
    for (int length = 1; length <= kLongestCode; ++length) {
      if (count[length] != 0) bits_ = length;
    }
    int free = 1;
    for (int length = 1, code = 0; length <= bits_; ++length) {
      free = 2 * free - count[length];
      if (free < 0) damaged("has a code with too many symbols");
      code = (code + count[length - 1]) << 1;
      next[length] = code;
    }
    if (bits_ > 0 && free > 0 && !(may_be_single && bits_ == 1)) damaged("has a code with too few symbols");
    entries_.assign(size_t{1} << bits_, 0);
    for (int symbol = 0; symbol < symbols; ++symbol) {
      if (lengths[symbol] != 0) place(symbol, lengths[symbol], next[lengths[symbol]]++);
    }
  }

  int decode(Bits& bits) const {
    const uint16_t entry = entries_[bits.peek(bits_)];
    if (entry == 0) damaged("has bits without a meaning");
    bits.drop(entry & 15);
    return entry >> 4;
  }

 private:
  void place(int symbol, int length, int code) {
    size_t reversed = 0;   // codes come with their highest bit first
    for (int bit = 0; bit < length; ++bit) reversed |= static_cast<size_t>(code >> bit & 1) << (length - 1 - bit);
    for (size_t at = reversed; at < entries_.size(); at += size_t{1} << length) {
      entries_[at] = static_cast<uint16_t>(symbol << 4 | length);
    }
  }

  std::vector<uint16_t> entries_;   // symbol and length of its code
  int bits_ = 0;
};

struct Range {
  uint16_t first;
  uint8_t extra_bits;
};

// RFC 1951, 3.2.5
constexpr Range kLengthRanges[] = {{3, 0},  {4, 0},  {5, 0},  {6, 0},  {7, 0},  {8, 0},   {9, 0},   {10, 0},
                                   {11, 1}, {13, 1}, {15, 1}, {17, 1}, {19, 2}, {23, 2},  {27, 2},  {31, 2},
                                   {35, 3}, {43, 3}, {51, 3}, {59, 3}, {67, 4}, {83, 4},  {99, 4},  {115, 4},
                                   {131, 5}, {163, 5}, {195, 5}, {227, 5}, {258, 0}};
constexpr Range kDistanceRanges[] = {
    {1, 0},      {2, 0},      {3, 0},      {4, 0},      {5, 1},     {7, 1},     {9, 2},     {13, 2},
    {17, 3},     {25, 3},     {33, 4},     {49, 4},     {65, 5},    {97, 5},    {129, 6},   {193, 6},
    {257, 7},    {385, 7},    {513, 8},    {769, 8},    {1025, 9},  {1537, 9},  {2049, 10}, {3073, 10},
    {4097, 11},  {6145, 11},  {8193, 12},  {12289, 12}, {16385, 13}, {24577, 13}};

uint32_t take_in(const Range& range, Bits& bits) { return range.first + bits.take(range.extra_bits); }

// What has been made so far, inside a buffer of a given size.
class Output {
 public:
  Output(uint8_t* data, uint64_t size) : data_(data), size_(size) {}

  void put(uint8_t byte) {
    if (made_ == size_) damaged("is longer than it says");
    data_[made_++] = byte;
  }

  void repeat(uint64_t distance, uint64_t length) {
    if (distance > made_) damaged("repeats what lies before its begin");
    if (length > size_ - made_) damaged("is longer than it says");
    // Byte by byte: a copy may repeat what it has just made.
    for (const uint8_t* from = data_ + made_ - distance; length > 0; --length) data_[made_++] = *from++;
  }

  bool full() const { return made_ == size_; }

 private:
  uint8_t* data_;
  uint64_t size_, made_ = 0;
};

void copy_stored(Bits& bits, Output& out) {
  bits.skip_to_byte();
  uint32_t length = bits.take(16);
  if ((bits.take(16) ^ length) != 0xFFFF) damaged("has a stored block of another length than it says");
  for (; length > 0; --length) out.put(static_cast<uint8_t>(bits.take(8)));
}

void decode_block(Bits& bits, const Code& literals, const Code& distances, Output& out) {
  for (;;) {
    const int symbol = literals.decode(bits);
    if (symbol == kEndOfBlock) return;
    if (symbol < kEndOfBlock) {
      out.put(static_cast<uint8_t>(symbol));
      continue;
    }
    if (symbol >= kUsedLiterals) damaged("has an unknown length");
    const uint32_t length = take_in(kLengthRanges[symbol - kEndOfBlock - 1], bits);
    const int distance = distances.decode(bits);
    if (distance >= kUsedDistances) damaged("has an unknown distance");
    out.repeat(take_in(kDistanceRanges[distance], bits), length);
  }
}

void decode_fixed(Bits& bits, Output& out) {
  uint8_t lengths[kLiterals], fives[kDistances];
  std::fill(lengths, lengths + 144, 8);
  std::fill(lengths + 144, lengths + 256, 9);
  std::fill(lengths + 256, lengths + 280, 7);
  std::fill(lengths + 280, lengths + kLiterals, 8);
  std::fill(fives, fives + kDistances, 5);
  decode_block(bits, Code(lengths, kLiterals, false), Code(fives, kDistances, false), out);
}

// The lengths of both codes of a block, themselves in a code.
void take_lengths(Bits& bits, const Code& code, uint8_t* lengths, int count) {
  for (int at = 0; at < count;) {
    const int symbol = code.decode(bits);
    if (symbol < 16) {
      lengths[at++] = static_cast<uint8_t>(symbol);
      continue;
    }
    if (symbol == 16 && at == 0) damaged("repeats a length before the first");
    const uint8_t repeated = symbol == 16 ? lengths[at - 1] : 0;
    const int times = symbol == 16 ? 3 + bits.take(2) : symbol == 17 ? 3 + bits.take(3) : 11 + bits.take(7);
    if (times > count - at) damaged("has more lengths than symbols");
    std::fill(lengths + at, lengths + at + times, repeated);
    at += times;
  }
}

void decode_dynamic(Bits& bits, Output& out) {
  constexpr int kOrder[kCodeLengths] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  const int literals = 257 + bits.take(5), distances = 1 + bits.take(5), used = 4 + bits.take(4);
  if (literals > kUsedLiterals || distances > kUsedDistances) damaged("has too many symbols");
  uint8_t of_code[kCodeLengths] = {}, lengths[kLiterals + kDistances] = {};
  for (int i = 0; i < used; ++i) of_code[kOrder[i]] = static_cast<uint8_t>(bits.take(3));
  take_lengths(bits, Code(of_code, kCodeLengths, false), lengths, literals + distances);
  if (lengths[kEndOfBlock] == 0) damaged("has a block without an end");
  decode_block(bits, Code(lengths, literals, true), Code(lengths + literals, distances, true), out);
}

}  // namespace

void inflate(const uint8_t* data, uint64_t size, uint8_t* out, uint64_t bytes) {
  Bits bits(data, size);
  Output output(out, bytes);
  for (bool last = false; !last;) {
    last = bits.take(1) != 0;
    switch (bits.take(2)) {
      case 0: copy_stored(bits, output); break;
      case 1: decode_fixed(bits, output); break;
      case 2: decode_dynamic(bits, output); break;
      default: damaged("has a block of an unknown type");
    }
  }
  bits.skip_to_byte();
  if (!output.full()) damaged("is shorter than it says");
  if (!bits.at_end()) damaged("is followed by something else");
}

}  // namespace onnxfuse
