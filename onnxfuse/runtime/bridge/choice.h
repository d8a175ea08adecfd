// Which records of an archive a device can run, and which of them a run takes. Pure: no runtime, no driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "archive.h"
#include "axes.h"
#include "contract.h"

namespace onnxfuse {

// What a record needs to know of a GPU.
struct Device {
  uint32_t capability = 0;     // as one number: 90 for 9.0, 120 for 12.0
  uint32_t shared_bytes = 0;   // that one block may use
  uint32_t multiprocessors = 0;
  bool has_tensor_maps = false;   // the driver knows TMA
  bool has_library = false;       // the process holds cuBLASLt
};

// A cubin of the right architecture may still ask for more shared memory than a smaller chip of it has.
bool runs_on(const Record& record, const Device& device);

// The records of a node's kernel that a device can run and that can ever be chosen, in the order of the archive. Throws
// Error that names the architectures and the command that adds one when there is none.
std::vector<const Record*> records_for(const Records& records, const Contract& contract, const Device& device);

// The first of the candidates, from `first` on, whose range of m and tensors fit. Throws Error that says what does not
// fit.
size_t choose(const std::vector<const Record*>& candidates, const Contract& contract, const ElementBytes& bytes,
              const OnnxfuseArguments& arguments, size_t first = 0);

}  // namespace onnxfuse
