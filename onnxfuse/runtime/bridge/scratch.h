// Scratch memory of one run, from the runtime's own arena.
#pragma once

#include <atomic>
#include <cstddef>

#include "ort.h"

namespace onnxfuse {

// The allocator of a session's device; nothing where the runtime has none to give.
class ScratchAllocator {
 public:
  ScratchAllocator(const OrtApi* api, const OrtKernelInfo* info);
  ~ScratchAllocator();
  ScratchAllocator(const ScratchAllocator&) = delete;
  ScratchAllocator& operator=(const ScratchAllocator&) = delete;

 private:
  friend class ScratchMemory;

  bool reaches(size_t bytes) const;
  void* take(size_t bytes) const;

  const OrtApi* api_;
  OrtAllocator* allocator_ = nullptr;
  const OrtMemoryInfo* memory_ = nullptr;
  mutable std::atomic<size_t> reached_{0};   // that the arena has had at once
};

// Given back at the end of the scope, when the work that uses it is enqueued: the runtime gives memory that was used on
// a stream to nothing but that stream, until it has waited for it.
class ScratchMemory {
 public:
  // `allocator` may be nothing: then there is no memory.
  ScratchMemory(const OrtApi* api, const ScratchAllocator* allocator, const OrtKernelContext* context, bool has_stream)
      : api_(api), allocator_(allocator), context_(context), has_stream_(has_stream) {}
  ~ScratchMemory();
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;

  // nullptr where there is no memory. What was taken before is given back: a run that asks again has enqueued nothing.
  void* take(size_t bytes);

 private:
  void give_back();

  const OrtApi* api_;
  const ScratchAllocator* allocator_;
  const OrtKernelContext* context_;
  const bool has_stream_;
  void* memory_ = nullptr;
};

}  // namespace onnxfuse
