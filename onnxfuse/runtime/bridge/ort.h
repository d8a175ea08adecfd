// ONNX Runtime's C API with exceptions inside and statuses at the border.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "axes.h"
#include "error.h"
#include "ort_abi.h"

namespace onnxfuse {

// Turns a failed call into an Error.
inline void check(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw Error(message);
}

// Runs the body of an entry point; whatever it throws becomes a status that begins with `who()`.
template <typename Who, typename Body>
OrtStatus* guarded(const OrtApi* api, Who who, Body body) noexcept {
  try {
    try {
      body();
      return nullptr;
    } catch (const std::exception& error) {
      return api->CreateStatus(kOrtFail, text("onnxfuse: ", who(), ": ", error.what()).c_str());
    }
  } catch (...) {
    return api->CreateStatus(kOrtFail, "onnxfuse: out of memory while reporting an error");
  }
}

// A shape as the runtime hands it out; released at the end of the scope.
class ShapeInfo {
 public:
  explicit ShapeInfo(const OrtApi* api) : api_(api) {}
  ~ShapeInfo() {
    if (info_ != nullptr) api_->ReleaseTensorTypeAndShapeInfo(info_);
  }
  ShapeInfo(const ShapeInfo&) = delete;
  ShapeInfo& operator=(const ShapeInfo&) = delete;
  OrtTensorTypeAndShapeInfo** out() { return &info_; }
  OrtTensorTypeAndShapeInfo* get() const { return info_; }

 private:
  const OrtApi* api_;
  OrtTensorTypeAndShapeInfo* info_ = nullptr;
};

inline Shape dimensions(const OrtApi* api, const OrtTensorTypeAndShapeInfo* info) {
  size_t rank = 0;
  check(api, api->GetDimensionsCount(info, &rank));
  Shape shape(rank);
  check(api, api->GetDimensions(info, shape.data(), rank));
  return shape;
}

inline Shape shape_of(const OrtApi* api, const OrtValue* value) {
  ShapeInfo info(api);
  check(api, api->GetTensorTypeAndShape(value, info.out()));
  return dimensions(api, info.get());
}

inline void* data_of(const OrtApi* api, const OrtValue* value) {
  void* data = nullptr;
  // The API has no reading twin of this call; inputs are only read.
  check(api, api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return data;
}

}  // namespace onnxfuse
