// Copies the rows of a factor, [batch, m, k], that begin on any boundary of an element, to rows that begin on cache lines:
// TMA reads no others. It runs before the kernel that multiplies, which finds its text behind this one. Of rhs n are the
// rows where its k is contiguous, and where n is, its k are called m and its n k.
//
//   lhs       |row 0 ......|row 1 ......|row 2 ......|           what is copied
//   outs[0]   |row 0 ......0   |row 1 ......0   |row 2 ......0   |
//
// A thread writes 16 bytes, zeros behind k, and reads them in words of 4 where all rows begin and end so, else of 2. What
// lies between a row's last 16 bytes and the next row is written by nobody and read by nobody.
//
// Launch: COPY_THREADS threads; grid (blocks for all chunks of 16 bytes of the rows of a batch, 1, batches).
#pragma once
#include "common/arguments.cuh"
#include "common/ptx.cuh"

namespace onnxfuse {

constexpr int COPY_THREADS = 256;
constexpr int CHUNK_BYTES = 16;

template <typename Word>
__device__ __forceinline__ void copy_chunk(const unsigned char* from, unsigned char* to, int bytes) {
  constexpr int WORDS = CHUNK_BYTES / sizeof(Word);
  alignas(CHUNK_BYTES) Word words[WORDS];
#pragma unroll
  for (int word = 0; word < WORDS; ++word) {
    words[word] = word * static_cast<int>(sizeof(Word)) < bytes ? reinterpret_cast<const Word*>(from)[word] : Word{0};
  }
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(words);
}

template <int ELEMENT_BYTES>
__device__ __forceinline__ void copy_rows(const OnnxfuseArguments& args) {
  const OnnxfuseTensor &source = args.lhs, &copy = args.outs[0];
  const int row_bytes = args.k * ELEMENT_BYTES;
  const unsigned chunks = (row_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
  const unsigned index = blockIdx.x * COPY_THREADS + threadIdx.x, row = index / chunks;
  if (row >= static_cast<unsigned>(args.m)) return;
  const int first = static_cast<int>(index % chunks) * CHUNK_BYTES;
  const long long pitch = source.row_stride * ELEMENT_BYTES, batch_pitch = source.batch_stride * ELEMENT_BYTES;
  const auto address = reinterpret_cast<unsigned long long>(source.pointer);
  const bool in_words = ((address | pitch | batch_pitch | row_bytes) & 3) == 0;
  for (int batch = blockIdx.z; batch < args.batch; batch += gridDim.z) {
    const long long element = batch * copy.batch_stride + row * copy.row_stride;
    const auto* from = static_cast<const unsigned char*>(source.pointer) + batch * batch_pitch + row * pitch + first;
    auto* to = static_cast<unsigned char*>(copy.pointer) + element * ELEMENT_BYTES + first;
    if (in_words) {
      copy_chunk<unsigned>(from, to, row_bytes - first);
    } else {
      copy_chunk<unsigned short>(from, to, row_bytes - first);
    }
  }
}

}  // namespace onnxfuse
