// The CUDA driver, opened at run time so that the library loads on a machine without one, and the modules loaded
// into it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "archive.h"
#include "choice.h"
#include "tensor_maps.h"

namespace onnxfuse {

using Context = void*;    // CUcontext
using Function = void*;   // CUfunction
using Stream = void*;     // CUstream

// CUtensorMap
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// CUlaunchAttribute and CUlaunchConfig
struct LaunchAttribute {
  int which;
  alignas(8) int value[16];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

// nullptr when no CUDA device is usable. Opened once per process.
class Driver;
const Driver* cuda_driver();

class Driver {
 public:
  // The calling thread's context; throws Error when it has none.
  Context current_context() const;

  // Device of the current context.
  Device device() const;

  struct Grid {
    unsigned x, z;
  };
  // Whether all devices have a compute capability, 90 for 9.0.
  bool all_devices_have(int capability) const;

  // `maps` is the kernel's second parameter, or nullptr where it has none. One that starts `early` waits by itself
  // (griddepcontrol.wait) for the kernel before it, beside whose end it is launched.
  void launch(Function function, Grid grid, unsigned threads, unsigned shared_bytes, bool early, Stream stream,
              OnnxfuseArguments* arguments, TensorMap* maps) const;

  // Describes one tensor to TMA: element strides 1, zeros outside.
  void encode(const TensorBox& box, TensorMap* map) const;

 private:
  friend const Driver* cuda_driver();
  friend class Module;
  friend class RelaxedCapture;
  friend class PushedContext;

  bool open();
  int attribute(int which, int device) const;
  int capability(int device) const;
  void check(int result, const char* what) const;

  int (*init_)(unsigned) = nullptr;
  int (*device_count_)(int*) = nullptr;
  int (*device_get_)(int*, int) = nullptr;
  int (*error_name_)(int, const char**) = nullptr;
  int (*error_string_)(int, const char**) = nullptr;
  int (*context_current_)(Context*) = nullptr;
  int (*context_push_)(Context) = nullptr;
  int (*context_pop_)(Context*) = nullptr;
  int (*context_device_)(int*) = nullptr;
  int (*device_attribute_)(int*, int, int) = nullptr;
  int (*module_load_)(void**, const void*) = nullptr;
  int (*module_unload_)(void*) = nullptr;
  int (*module_function_)(Function*, void*, const char*) = nullptr;
  int (*function_attribute_)(Function, int, int) = nullptr;
  int (*capture_mode_)(int*) = nullptr;   // optional
  int (*encode_)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*,
                 int, int, int, int) = nullptr;   // optional: drivers before 12.0 know no TMA
  int (*launch_)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                 void**) = nullptr;
  int (*launch_early_)(const LaunchConfig*, Function, void**, void**) = nullptr;   // optional
};

// While it lives, this thread may do what is not legal in the middle of capturing a CUDA graph, as loading code.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver);
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_;
  bool exchanged_;
};

// While it lives, a context is this thread's, if it still exists: a session may end on a thread with another context,
// or after the context itself.
class PushedContext {
 public:
  PushedContext(const Driver& driver, Context context);
  ~PushedContext();
  PushedContext(const PushedContext&) = delete;
  PushedContext& operator=(const PushedContext&) = delete;
  bool exists() const { return exists_; }

 private:
  const Driver& driver_;
  bool exists_;
};

// One image in one context. Unloaded when its last user goes.
class Module {
 public:
  // The record's image in the current context, loaded if no other kernel uses it yet. Safe from several threads.
  static std::shared_ptr<Module> acquire(const Driver& driver, Context context, const Record& record);

  // A function of the image, allowed to use so much shared memory.
  Function function(const std::string& entry, uint32_t shared_bytes) const;

  Module(const Driver& driver, Context context, const Record& record);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

 private:
  const Driver& driver_;
  Context context_;
  void* handle_ = nullptr;
};

}  // namespace onnxfuse
