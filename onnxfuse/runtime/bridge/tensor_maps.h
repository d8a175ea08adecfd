// What a launch tells TMA of each tensor. Pure: no runtime, no driver.
#pragma once

#include <cstdint>

#include "archive.h"
#include "axes.h"

namespace onnxfuse {

constexpr uint32_t kMaxRank = 5;   // of a tensor map

// What a tensor map says. The contiguous axis comes first; sizes in elements, strides and the swizzle in bytes.
struct TensorBox {
  void* pointer;
  int64_t element_bytes;
  uint32_t rank;
  uint64_t extents[kMaxRank];
  uint64_t strides[kMaxRank - 1];   // of all axes but the first
  uint32_t box[kMaxRank];
  uint8_t swizzle;
  bool is_factor;        // of the product: the tensor cores read it
};

// The box of the tensor that one of the record's rules names, which is not kNothing; of keys and values apart where
// `is_attention`.
TensorBox tensor_box(const Record& record, const MapRule& rule, const ElementBytes& bytes,
                     const OnnxfuseArguments& arguments, bool is_attention = false);

}  // namespace onnxfuse
