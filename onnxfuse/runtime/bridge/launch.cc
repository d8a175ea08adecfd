#include "launch.h"

#include <algorithm>

#include "copied_rows.h"
#include "error.h"
#include "tensor_maps.h"

namespace onnxfuse {
namespace {

constexpr int64_t kMaxGridX = 2147483647;
constexpr int kMaxGridZ = 65535;

// Of one batch.
int64_t tiles_of(const Record& record, const OnnxfuseArguments& arguments) {
  const int64_t rows = (int64_t{arguments.m} + record.block_m - 1) / record.block_m;
  const int64_t columns = (int64_t{arguments.n} + record.block_n - 1) / record.block_n;
  return rows * columns;
}

// Clusters of a persistent grid that the device has room for.
int64_t clusters_of(const Record& record, const Device& device) {
  return std::max<int64_t>(device.multiprocessors / record.cluster, 1);
}

Driver::Grid grid_of(const Record& record, const OnnxfuseArguments& arguments, const Device& device) {
  const int64_t tiles = tiles_of(record, arguments) * (record.cluster == 0 ? 1 : arguments.batch);
  if (tiles > kMaxGridX) {
    fail("m=", arguments.m, " and n=", arguments.n, " need ", tiles, " tiles, more than a grid has");
  }
  if (record.cluster == 0) {
    return {static_cast<unsigned>(tiles), static_cast<unsigned>(std::min(arguments.batch, kMaxGridZ))};
  }
  return {static_cast<unsigned>(std::min(tiles, clusters_of(record, device)) * record.cluster), 1};
}

// Whether the kernel, which then waits by itself, is launched beside the end of the one before it. Its blocks go where
// that one's have ended: those that read the same are no longer neighbours, and the multiprocessors that are free first
// get more small ones than others, which costs a long kernel more than a launch takes.
bool starts_early(const Record& record, const OnnxfuseArguments& arguments, const Device& device) {
  if (record.early_depth == 0 || record.early_depth == kAnyDepth) return record.early_depth > 0;
  const int64_t tiles = tiles_of(record, arguments) * arguments.batch;
  const int64_t together = record.cluster > 0 ? clusters_of(record, device) : 1;
  const bool is_full = record.cluster > 0 && 4 * tiles >= 3 * together;
  return (tiles + together - 1) / together * arguments.k <= (is_full ? record.full_early_depth : record.early_depth);
}

void encode_maps(const Record& record, const Contract& contract, const ElementBytes& bytes,
                 const OnnxfuseArguments& arguments, TensorMap* maps) {
  for (size_t i = 0; i < record.maps.size(); ++i) {
    const MapRule& rule = record.maps[i];
    if (rule.tensor == Mapped::kNothing) continue;
    cuda_driver()->encode(tensor_box(record, rule, bytes, arguments, contract.is_attention()), &maps[i]);
  }
}

void launch_kernel(const Loaded& code, size_t chosen, const Contract& contract, const ElementBytes& bytes,
                   OnnxfuseArguments& arguments, Stream stream) {
  const Record& record = *code.records[chosen];
  TensorMap maps[kMaxMaps]{};  // the kernel fetches all of them into its cache
  encode_maps(record, contract, bytes, arguments, maps);
  // The kernel for few rows of a quantized rhs reads it without waiting.
  const bool may_be_early = arguments.rhs_ready || !contract.is_quantized();
  const bool early = may_be_early && starts_early(record, arguments, code.device);
  if (!early) arguments.rhs_ready = 0;  // there is nothing to wait for, and lhs is wanted first
  cuda_driver()->launch(code.functions[chosen], grid_of(record, arguments, code.device), record.threads,
                        record.shared_bytes, early, stream, &arguments, record.maps.empty() ? nullptr : maps);
}

void* aligned(void* memory) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory), step = kScratchAlignment;
  return reinterpret_cast<void*>((address + step - 1) / step * step);
}

// Scratch memory holds the product, and behind it what the library itself needs.
bool multiply(Cublaslt& library, const LibraryProducts& products, const Scratch& scratch, Stream stream,
              char** product) {
  std::shared_ptr<const Method> methods[ONNXFUSE_MAX_PARTS];
  size_t workspace_bytes = 0;
  for (size_t i = 0; i < products.count; ++i) {
    methods[i] = library.method(products.products[i].product);
    if (methods[i] == nullptr) return false;
    workspace_bytes = std::max(workspace_bytes, methods[i]->workspace_bytes());
  }
  const size_t product_bytes = (static_cast<size_t>(products.bytes) / kScratchAlignment + 1) * kScratchAlignment;
  void* memory = scratch(product_bytes + workspace_bytes + kScratchAlignment);
  if (memory == nullptr) return false;
  *product = static_cast<char*>(aligned(memory));
  for (size_t i = 0; i < products.count; ++i) {
    const PlacedProduct& placed = products.products[i];
    char* out = *product + placed.out_offset;
    if (!library.multiply(*methods[i], placed.lhs, placed.rhs, out, *product + product_bytes, stream)) return false;
  }
  return true;
}

// Whether the library took the product on, and the kernel was launched behind it.
bool launch_behind_library(const Loaded& code, size_t chosen, const Contract& contract, const ElementBytes& bytes,
                           const OnnxfuseArguments& arguments, const Scratch& scratch, Stream stream) {
  const auto products = library_products(*code.records[chosen], contract, bytes, arguments);
  char* product = nullptr;
  if (!products || !multiply(*code.library, *products, scratch, stream, &product)) return false;
  OnnxfuseArguments behind = behind_library(*products, contract, arguments, product);
  launch_kernel(code, chosen, contract, behind_library(contract, bytes), behind, stream);
  return true;
}

// Whether there was memory for the copies, and the kernel was launched behind what makes them.
bool launch_behind_copies(const Loaded& code, size_t chosen, const Contract& contract, const ElementBytes& bytes,
                          const OnnxfuseArguments& arguments, const Scratch& scratch, Stream stream) {
  const Record& record = *code.records[chosen];
  void* memory = scratch(copy_bytes(record, contract, bytes, arguments) + kScratchAlignment);
  if (memory == nullptr) return false;
  Copies copies = copies_at(record, contract, bytes, arguments, aligned(memory));
  for (Copies::Launch& copy : copies.launches) {
    cuda_driver()->launch(code.copies[chosen], {copy.blocks, copy.batches}, kCopyThreads, 0, /*early=*/true, stream,
                          &copy.arguments, nullptr);
  }
  launch_kernel(code, chosen, contract, bytes, copies.behind, stream);
  return true;
}

bool launch_if_possible(const Loaded& code, size_t chosen, const Contract& contract, const ElementBytes& bytes,
                        const OnnxfuseArguments& arguments, const Scratch& scratch, Stream stream) {
  const auto launch_behind = code.records[chosen]->copies_any() ? launch_behind_copies : launch_behind_library;
  return launch_behind(code, chosen, contract, bytes, arguments, scratch, stream);
}

}  // namespace

bool Loaded::needs_scratch() const {
  return std::any_of(records.begin(), records.end(), [](const Record* record) { return record->may_be_refused(); });
}

std::unique_ptr<const Loaded> load(const Contract& contract, const Records& records, Context context) {
  const Driver& driver = *cuda_driver();
  auto result = std::make_unique<Loaded>();
  result->context = context;
  result->device = driver.device();
  const bool wants_library = std::any_of(records.begin(), records.end(), [&](const Record& record) {
    return record.kernel == contract.kernel && record.library != LibraryMath::kNone;
  });
  if (wants_library) result->library = Cublaslt::acquire(driver, context);
  result->device.has_library = result->library != nullptr;
  result->records = records_for(records, contract, result->device);
  for (const Record* record : result->records) {
    result->modules.push_back(Module::acquire(driver, context, *record));
    const Module& module = *result->modules.back();
    result->functions.push_back(module.function(record->entry, record->shared_bytes));
    result->copies.push_back(record->copies_any() ? module.function(kCopyEntry, 0) : nullptr);
  }
  return result;
}

void launch_blocks(const Loaded& code, size_t chosen, int64_t blocks, OnnxfuseArguments& arguments, Stream stream) {
  const Record& record = *code.records[chosen];
  if (blocks > kMaxGridX) fail("batch=", arguments.batch, " needs ", blocks, " blocks, more than a grid has");
  cuda_driver()->launch(code.functions[chosen], {static_cast<unsigned>(blocks), 1}, record.threads, record.shared_bytes,
                        record.early_depth == kAnyDepth, stream, &arguments, nullptr);
}

void launch(const Loaded& code, const Contract& contract, const ElementBytes& bytes, OnnxfuseArguments& arguments,
            const Scratch& scratch, Stream stream) {
  size_t chosen = choose(code.records, contract, bytes, arguments);
  while (code.records[chosen]->may_be_refused()) {
    if (launch_if_possible(code, chosen, contract, bytes, arguments, scratch, stream)) return;
    chosen = choose(code.records, contract, bytes, arguments, chosen + 1);
  }
  launch_kernel(code, chosen, contract, bytes, arguments, stream);
}

}  // namespace onnxfuse
