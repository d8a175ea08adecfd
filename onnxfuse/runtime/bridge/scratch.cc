#include "scratch.h"

namespace onnxfuse {
namespace {

// Whether a call did what it should; where it did not, a kernel that needs no scratch memory takes over.
bool succeeds(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return true;
  api->ReleaseStatus(status);
  return false;
}

}  // namespace

ScratchAllocator::ScratchAllocator(const OrtApi* api, const OrtKernelInfo* info) : api_(api) {
  if (!succeeds(api, api->KernelInfoGetAllocator(info, kOrtDefaultMemory, &allocator_))) allocator_ = nullptr;
  if (allocator_ != nullptr && !succeeds(api, api->AllocatorGetInfo(allocator_, &memory_))) memory_ = nullptr;
}

ScratchAllocator::~ScratchAllocator() {
  if (allocator_ != nullptr) api_->ReleaseAllocator(allocator_);
}

void* ScratchAllocator::take(size_t bytes) const {
  void* memory = nullptr;
  return succeeds(api_, api_->AllocatorAlloc(allocator_, bytes, &memory)) ? memory : nullptr;
}

// KernelContext_GetScratchBuffer ends the process where memory runs out, and AllocatorAlloc returns an error. So a size
// that the arena may have to grow for is asked for in this way first.
bool ScratchAllocator::reaches(size_t bytes) const {
  if (bytes <= reached_.load(std::memory_order_relaxed)) return true;
  void* memory = take(bytes);
  if (memory == nullptr || !succeeds(api_, api_->AllocatorFree(allocator_, memory))) return false;
  reached_.store(bytes, std::memory_order_relaxed);
  return true;
}

void* ScratchMemory::take(size_t bytes) {
  give_back();
  if (allocator_ == nullptr || allocator_->memory_ == nullptr) return nullptr;
  if (!has_stream_) return memory_ = allocator_->take(bytes);
  void* memory = nullptr;
  const bool taken =
      allocator_->reaches(bytes) &&
      succeeds(api_, api_->KernelContext_GetScratchBuffer(context_, allocator_->memory_, bytes, &memory));
  return memory_ = taken ? memory : nullptr;
}

void ScratchMemory::give_back() {
  if (memory_ != nullptr) succeeds(api_, api_->AllocatorFree(allocator_->allocator_, memory_));
  memory_ = nullptr;
}

ScratchMemory::~ScratchMemory() { give_back(); }

}  // namespace onnxfuse
