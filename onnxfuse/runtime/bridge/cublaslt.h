// The library's products: cuBLASLt as ONNX Runtime's CUDA provider has loaded it into the process. It is looked up at run
// time, never linked and never loaded: without it, nodes run their own kernels.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "driver.h"
#include "library_product.h"

namespace onnxfuse {

struct CublasltApi;

// How the library multiplies matrices of some sizes: its descriptions of them and its choice of a kernel.
class Method {
 public:
  // Throws Error where the library refuses.
  Method(const CublasltApi& api, void* handle, const Product& product);
  ~Method();
  Method(const Method&) = delete;
  Method& operator=(const Method&) = delete;

  size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  friend class Cublaslt;

  void describe(const Product& product);
  void choose(void* handle, const Product& product);
  void release();

  const CublasltApi& api_;
  void *operation_ = nullptr, *rhs_ = nullptr, *lhs_ = nullptr, *out_ = nullptr;
  uint64_t algorithm_[8] = {};   // cublasLtMatmulAlgo_t
  size_t workspace_bytes_ = 0;
};

// The library in one context.
class Cublaslt {
 public:
  // Nothing where the process holds no library, or where it does not start. Nodes of one context share it.
  static std::shared_ptr<Cublaslt> acquire(const Driver& driver, Context context);

  // Nothing where the library refuses. It is asked once for each product of late; safe from several threads.
  std::shared_ptr<const Method> method(const Product& product);

  // Whether the library took the product on.
  bool multiply(const Method& method, const void* lhs, const void* rhs, void* out, void* workspace, Stream stream) const;

  Cublaslt(const CublasltApi& api, const Driver& driver, Context context);
  ~Cublaslt();
  Cublaslt(const Cublaslt&) = delete;
  Cublaslt& operator=(const Cublaslt&) = delete;

 private:
  const CublasltApi& api_;
  const Driver& driver_;
  const Context context_;
  void* handle_ = nullptr;
  std::mutex mutex_;
  std::map<Product, std::shared_ptr<const Method>> methods_;   // nothing of what the library refused
  std::deque<Product> oldest_first_;
};

}  // namespace onnxfuse
