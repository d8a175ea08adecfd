// A node's product as the library is asked for it: plain products of matrices into scratch memory, which a kernel
// without a product then reads as its first loads. Pure: no runtime, no driver.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "archive.h"
#include "axes.h"

namespace onnxfuse {

constexpr int64_t kScratchAlignment = 256;   // of the scratch memory; what else lies there is aligned as well as it can

// A row-major matrix, or the transpose of one, repeated along the batch. All in elements but the alignment, in bytes.
struct Matrix {
  int64_t pitch = 0;          // from a row as it is stored to the next
  int64_t batch_stride = 0;
  int64_t transposed = 0;
  int64_t alignment = 0;      // of its address
};

// out[batch, m, n] = lhs[batch, m, k] * rhs[batch, k, n]: all that the library's choice of a kernel depends on.
struct Product {
  int64_t math = 0;           // a LibraryMath
  int64_t m = 0, n = 0, k = 0, batch = 0;
  Matrix lhs, rhs, out;
};

// No padding anywhere, so that bytes tell products apart.
static_assert(std::has_unique_object_representations_v<Product>);
inline bool operator<(const Product& a, const Product& b) { return std::memcmp(&a, &b, sizeof(a)) < 0; }

struct PlacedProduct {
  Product product;
  const void *lhs = nullptr, *rhs = nullptr;
  int64_t out_offset = 0;     // bytes from the start of the scratch memory
};

struct LibraryProducts {
  size_t count = 0;           // one for parts that lie side by side in one weight, else one each
  std::array<PlacedProduct, ONNXFUSE_MAX_PARTS> products;
  int64_t bytes = 0;          // of the whole product in scratch memory
  int64_t part_offsets[ONNXFUSE_MAX_PARTS] = {};   // in bytes
  int64_t row_stride = 0, batch_stride = 0;        // of every part
};

// Nothing where the library does not take the matrices as they lie: walked in two levels, or without an element along k.
std::optional<LibraryProducts> library_products(const Record& record, const Contract& contract,
                                                const ElementBytes& bytes, const OnnxfuseArguments& arguments);

// What the record's kernel gets: the parts of the product at `scratch`, then what the node's epilogue loads.
OnnxfuseArguments behind_library(const LibraryProducts& products, const Contract& contract,
                                 const OnnxfuseArguments& arguments, void* scratch);
ElementBytes behind_library(const Contract& contract, const ElementBytes& bytes);

}  // namespace onnxfuse
