#include "launch.h"

#include <algorithm>

#include "error.h"
#include "tensor_maps.h"

namespace onnxfuse {
namespace {

constexpr int64_t kMaxGridX = 2147483647;
constexpr int kMaxGridZ = 65535;

Driver::Grid grid_of(const Record& record, const OnnxfuseArguments& arguments, const Device& device) {
  const int64_t rows = (int64_t{arguments.m} + record.block_m - 1) / record.block_m;
  const int64_t columns = (int64_t{arguments.n} + record.block_n - 1) / record.block_n;
  const int64_t tiles = rows * columns * (record.cluster == 0 ? 1 : arguments.batch);
  if (tiles > kMaxGridX) {
    fail("m=", arguments.m, " and n=", arguments.n, " need ", tiles, " tiles, more than a grid has");
  }
  if (record.cluster == 0) {
    return {static_cast<unsigned>(tiles), static_cast<unsigned>(std::min(arguments.batch, kMaxGridZ))};
  }
  const int64_t clusters = std::max<int64_t>(device.multiprocessors / record.cluster, 1);
  return {static_cast<unsigned>(std::min(tiles, clusters) * record.cluster), 1};
}

void encode_maps(const Record& record, const ElementBytes& bytes, const OnnxfuseArguments& arguments, TensorMap* maps) {
  for (size_t i = 0; i < record.maps.size(); ++i) {
    const MapRule& rule = record.maps[i];
    if (rule.tensor == Mapped::kNothing) continue;
    cuda_driver()->encode(tensor_box(record, rule, bytes, arguments), &maps[i]);
  }
}

}  // namespace

std::unique_ptr<const Loaded> load(const Contract& contract, const Records& records, Context context) {
  const Driver& driver = *cuda_driver();
  auto result = std::make_unique<Loaded>();
  result->context = context;
  result->device = driver.device();
  result->records = records_for(records, contract, result->device);
  for (const Record* record : result->records) {
    result->modules.push_back(Module::acquire(driver, context, *record));
    result->functions.push_back(result->modules.back()->function(*record));
  }
  return result;
}

void launch(const Loaded& code, const Contract& contract, const ElementBytes& bytes, OnnxfuseArguments& arguments,
            Stream stream) {
  const size_t chosen = choose(code.records, contract, bytes, arguments);
  const Record& record = *code.records[chosen];
  TensorMap maps[kMaxMaps]{};  // the kernel fetches all of them into its cache
  encode_maps(record, bytes, arguments, maps);
  const bool waits = record.cluster > 0;  // the persistent kernel does
  cuda_driver()->launch(code.functions[chosen], grid_of(record, arguments, code.device), record.threads,
                        record.shared_bytes, waits, stream, &arguments, record.maps.empty() ? nullptr : maps);
}

}  // namespace onnxfuse
