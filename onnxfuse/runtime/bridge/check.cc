// What can be told of a model's fused nodes without a GPU, by the code that reads them as a session loads: for
// `onnxfuse verify`. Plain C, so that Python calls it.
#include <cstring>
#include <exception>
#include <limits>
#include <set>

#include "archive.h"
#include "choice.h"
#include "contract.h"
#include "error.h"

namespace onnxfuse {
namespace {

constexpr size_t kTexts = 8;   // the attributes of NodeText, in its order
constexpr uint32_t kFirstWithMaps = 90;

// As large as any: how much shared memory a chip of an architecture has is seen when the session loads.
Device roomiest(uint32_t capability) {
  return {capability, std::numeric_limits<uint32_t>::max(), 1, capability >= kFirstWithMaps,
          /*has_library=*/true};
}

void check_node(const Records& records, const char* const* texts, const int64_t* ports) {
  const Contract contract =
      parse_contract({texts[0], texts[1], texts[2], texts[3], texts[4], texts[5], texts[6], texts[7]});
  const int64_t inputs = static_cast<int64_t>(contract.inputs.size()) + 1;   // the archive is one
  const int64_t outputs = static_cast<int64_t>(contract.outputs.size());
  if (ports[0] != inputs || ports[1] != outputs) {
    fail("it has ", ports[0], " inputs and ", ports[1], " outputs; its attribute axes describes ", inputs, " and ",
         outputs);
  }
  std::set<uint32_t> capabilities;
  for (const Record& record : records) {
    if (record.kernel == contract.kernel) capabilities.insert(record.capability);
  }
  if (capabilities.empty()) records_for(records, contract, roomiest(0));   // which says so
  for (uint32_t capability : capabilities) records_for(records, contract, roomiest(capability));
}

void check_images(const Records& records) {
  std::set<const uint8_t*> seen;
  for (const Record& record : records) {
    if (seen.insert(record.packed).second) check_image(record, read_image(record));
  }
}

}  // namespace
}  // namespace onnxfuse

// Checks an archive, and each of some nodes against it: its attributes and its numbers of inputs and outputs. Returns
// 0, or 1 with the message in `error` and the node's index in `fault`, -1 for the archive itself.
extern "C" __attribute__((visibility("default"))) int onnxfuse_check_nodes(
    const uint8_t* archive, uint64_t size, const char* const* texts, const int64_t* ports, int nodes, int* fault,
    char* error, size_t error_size) {
  *fault = -1;
  try {
    const onnxfuse::Records records = onnxfuse::parse_archive(archive, size);
    onnxfuse::check_images(records);
    for (int node = 0; node < nodes; ++node) {
      *fault = node;
      onnxfuse::check_node(records, texts + node * onnxfuse::kTexts, ports + node * 2);
    }
    return 0;
  } catch (const std::exception& caught) {
    std::strncpy(error, caught.what(), error_size - 1);
    error[error_size - 1] = '\0';
    return 1;
  }
}
