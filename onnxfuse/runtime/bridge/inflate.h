// Reads a raw deflate stream (RFC 1951), which Python's zlib writes. The library depends on libc alone, and no zlib
// that a build finds everywhere can be linked into a shared library. Pure: bytes in, bytes out, every access checked.
#pragma once

#include <cstdint>

namespace onnxfuse {

// Throws Error unless the stream is valid, makes `bytes` bytes and ends where `data` does.
void inflate(const uint8_t* data, uint64_t size, uint8_t* out, uint64_t bytes);

}  // namespace onnxfuse
