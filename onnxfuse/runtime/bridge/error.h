// The one exception of the bridge. It never crosses the C ABI: every entry point turns it into an OrtStatus.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace onnxfuse {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Joins anything printable into one message.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(text(parts...));
}

}  // namespace onnxfuse
