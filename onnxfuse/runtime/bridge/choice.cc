#include "choice.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

#include "copied_rows.h"
#include "error.h"
#include "library_product.h"

namespace onnxfuse {
namespace {

std::string architecture_text(const Record& record) {
  if (record.flavour == Flavour::kPtx) return text("PTX for sm_", record.capability, " and later");
  return text("sm_", record.capability, record.flavour == Flavour::kSpecific ? "a" : "");
}

std::string architectures_text(const std::vector<const Record*>& records) {
  std::vector<std::string> names;
  for (const Record* record : records) {
    const std::string name = architecture_text(*record);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  std::string result;
  for (const std::string& name : names) result += (result.empty() ? "" : ", ") + name;
  return result;
}

std::string remedy_for(uint32_t device) {
  constexpr uint32_t kKnown[] = {80, 86, 89, 100, 120};
  if (device < 80) return "onnxfuse needs compute capability 8.0 or later; run the model without onnxfuse there";
  const bool known = std::find(std::begin(kKnown), std::end(kKnown), device) != std::end(kKnown);
  const std::string arch = device == 90 ? "sm_90a" : known ? text("sm_", device) : "ptx";
  return "add it: onnxfuse optimize ORIGINAL.onnx -o OUT.onnx --arch " + arch;
}

// Whether `earlier` fits wherever `later` does, so that `later` is never chosen (and its PTX need not be compiled). What
// the library may refuse shadows nothing.
bool shadows(const Record& earlier, const Record& later) {
  if (earlier.may_be_refused() || later.library != LibraryMath::kNone) return false;
  const auto asks_less = [](const TensorRule& a, const TensorRule& b) {
    return a.alignment <= b.alignment && ((a.flags ^ b.flags) & kTransposed) == 0 &&
           (b.flags & ~a.flags & kInRuns) == 0;
  };
  return earlier.min_m <= later.min_m && earlier.max_m >= later.max_m &&
         (earlier.maps.empty() || !later.maps.empty()) &&
         earlier.quantized.scales_alignment <= later.quantized.scales_alignment &&
         earlier.quantized.zero_points_alignment <= later.quantized.zero_points_alignment &&
         std::equal(std::begin(earlier.tensors), std::end(earlier.tensors), later.tensors, asks_less);
}

struct Extents {
  int batch, rows, columns;
};

// A loop of a tensor. A pitch is a multiple of the alignment, but for the contiguous axis: there, accesses end where a
// run does.
struct Loop {
  int extent;
  int64_t stride;
  int run;
  int64_t outer_stride;
  uint8_t in_runs;   // the flag by which a kernel walks it in two levels
};

bool is_walkable(const Loop& loop, int64_t bytes, const TensorRule& rule) {
  const auto fits = [&](int64_t elements) { return elements * bytes % rule.alignment == 0; };
  if (loop.run < loop.extent && !((rule.flags & loop.in_runs) != 0 && fits(loop.outer_stride))) return false;
  return loop.run <= 1 || fits(loop.stride == 1 ? loop.run : loop.stride);
}

// Whether accesses of several elements find neighbours where they go. A size of 1 that only the run knows may have made
// another axis contiguous than the one that the kernel was compiled for.
bool is_contiguous(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int64_t bytes, const TensorRule& rule) {
  if (rule.alignment <= bytes) return true;
  const bool down = (rule.flags & kTransposed) != 0;
  const int64_t stride = down ? tensor.row_stride : tensor.column_stride;
  const int64_t run = down ? outer.rows : outer.columns;
  return stride == 1 && run * bytes % rule.alignment == 0;
}

bool fits(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, const Extents& extents, int64_t bytes,
          const TensorRule& rule) {
  const Loop batches{extents.batch, tensor.batch_stride, outer.batches, outer.batch_stride, kBatchesInRuns};
  const Loop rows{extents.rows, tensor.row_stride, outer.rows, outer.row_stride, kRowsInRuns};
  const Loop columns{extents.columns, tensor.column_stride, outer.columns, outer.column_stride, kColumnsInRuns};
  return reinterpret_cast<uintptr_t>(tensor.pointer) % rule.alignment == 0 && is_walkable(batches, bytes, rule) &&
         is_walkable(rows, bytes, rule) && is_walkable(columns, bytes, rule) &&
         is_contiguous(tensor, outer, bytes, rule);
}

// The tensor map of lhs has one axis for batches and runs of columns, so one stride must walk both.
bool is_stacked(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int columns, int batch) {
  if (outer.columns >= columns || batch <= 1 || tensor.batch_stride == 0) return true;
  return tensor.batch_stride == columns / outer.columns * outer.column_stride;
}

// Whether TMA reaches what the record wants it to.
bool is_mapped(const Record& record, const OnnxfuseArguments& arguments) {
  return std::all_of(record.maps.begin(), record.maps.end(), [&](const MapRule& rule) {
    return rule.tensor != Mapped::kLhs ||
           is_stacked(arguments.lhs, arguments.lhs_outer, arguments.k, arguments.batch);
  });
}

// How many tensors of each kind a kernel has; no rhs for one without a product.
struct Counts {
  size_t rhs, loads, outs;
};

bool is_aligned(const void* pointer, int alignment) {
  return alignment == 0 || reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// The same of the scales and zero points of a quantized rhs, which lie dense.
std::string scales_misfit(const Record& record, size_t parts, const OnnxfuseArguments& args) {
  const Quantized& form = record.quantized;
  for (size_t i = 0; i < parts; ++i) {
    const OnnxfuseScales& scales = args.scales[i];
    if (!is_aligned(scales.scales, form.scales_alignment)) {
      return text("scales ", i, " need ", int{form.scales_alignment});
    }
    if (!is_aligned(scales.zero_points, form.zero_points_alignment)) {
      return text("zero points ", i, " need ", int{form.zero_points_alignment});
    }
  }
  return "";
}

// The first argument of the product or the epilogue whose address, pitches or levels the record's kernel cannot read.
std::string tensor_misfit(const Record& record, const Counts& counts, const ElementBytes& bytes,
                          const OnnxfuseArguments& args) {
  const int depth = record.is_quantized() ? args.rhs_outer.rows : args.k;
  const Extents lhs{args.batch, args.m, args.k}, rhs{args.batch, depth, args.n}, tile{args.batch, args.m, args.n};
  const int values = args.values_outer.columns;   // columns of an attention's values; 0 where there are none
  const Extents out{args.batch, args.m, values > 0 ? values : args.n};
  const auto needs = [](const TensorRule& rule) { return text(" needs ", int{rule.alignment}); };
  const TensorRule& lhs_rule = record.tensors[kLhsIndex];
  const bool reads_lhs = counts.rhs > 0 && !record.copies(kLhsIndex);   // a copy lies as it should
  if (reads_lhs && !fits(args.lhs, args.lhs_outer, lhs, bytes.lhs, lhs_rule)) return text("lhs", needs(lhs_rule));
  for (size_t i = 0; i < counts.rhs && !record.copies(kRhsIndex); ++i) {
    const TensorRule& rule = record.tensors[kRhsIndex];
    if (values > 0 && i == 1) {
      const TensorRule along{rule.alignment, static_cast<uint8_t>(rule.flags & ~kTransposed)};
      const Extents extents{args.batch, args.n, values};
      if (!fits(args.rhs[i], args.values_outer, extents, bytes.rhs[i], along)) return text("rhs ", i, needs(rule));
      continue;
    }
    if (!fits(args.rhs[i], args.rhs_outer, rhs, bytes.rhs[i], rule)) return text("rhs ", i, needs(rule));
  }
  for (size_t i = 0; i < counts.loads; ++i) {
    const TensorRule& rule = record.tensors[kFirstLoad + i];
    if (!fits(args.loads[i], args.loads_outer[i], tile, bytes.loads[i], rule)) return text("load ", i, needs(rule));
  }
  for (size_t i = 0; i < counts.outs; ++i) {
    const TensorRule& rule = record.tensors[kFirstOut + i];
    if (!fits(args.outs[i], args.outs_outer[i], out, bytes.outs[i], rule)) return text("out ", i, needs(rule));
  }
  return "";
}

// The same of a record whose kernel follows the library's product; scratch memory is aligned as it should be.
std::string library_misfit(const Record& record, const Contract& contract, const ElementBytes& bytes,
                           const OnnxfuseArguments& arguments) {
  const auto products = library_products(record, contract, bytes, arguments);
  if (!products) return "the library needs plain matrices, and no";
  const Counts counts{0, contract.rhs.size() + contract.loads.size(), contract.outs.size()};
  return tensor_misfit(record, counts, behind_library(contract, bytes),
                       behind_library(*products, contract, arguments, nullptr));
}

// What of the arguments the record's kernel cannot read; empty when all fit.
std::string misfit(const Record& record, const Contract& contract, const ElementBytes& bytes,
                   const OnnxfuseArguments& arguments) {
  if (record.library != LibraryMath::kNone) return library_misfit(record, contract, bytes, arguments);
  if (!can_copy(record, contract, bytes, arguments)) return "a copy needs contiguous rows, one stride apart, and";
  const Counts counts{contract.rhs.size(), contract.loads.size(), contract.outs.size()};
  const std::string tensor = tensor_misfit(record, counts, bytes, arguments);
  if (!tensor.empty()) return tensor;
  const std::string scales = scales_misfit(record, counts.rhs, arguments);
  if (!scales.empty()) return scales;
  if (!record.maps.empty() && arguments.k == 0) return "a tensor map needs an element along k, beside";
  if (!is_mapped(record, arguments)) return "the tensor map of lhs needs batches right outside of runs, beside";
  return "";
}

// A kernel with more tensors than the node names would follow a null pointer on the device.
void check_counts(const Record& record, const Contract& contract) {
  if (record.has_product() != contract.has_product()) {
    fail("kernel ", record.kernel, record.has_product() ? " computes a product, the node none" : " computes no product",
         kRemedy);
  }
  const bool quantized_alike = record.is_quantized() == contract.is_quantized() &&
                               (record.quantized.zero_points_alignment != 0) == !contract.zero_points.empty();
  if (!quantized_alike) fail("kernel ", record.kernel, " reads a weight of another form than the node's", kRemedy);
  for (const MapRule& rule : record.maps) {
    if (rule.tensor == Mapped::kLoad && rule.index >= contract.loads.size()) {
      fail("kernel ", record.kernel, " maps load ", int{rule.index}, " of ", contract.loads.size(), kRemedy);
    }
    if (rule.tensor == Mapped::kRhs && rule.index >= contract.rhs.size()) {
      fail("kernel ", record.kernel, " maps part ", int{rule.index}, " of ", contract.rhs.size(), kRemedy);
    }
  }
  const size_t parts = record.library == LibraryMath::kNone ? 0 : contract.rhs.size();
  if (record.load_count == contract.loads.size() + parts && record.out_count == contract.outs.size()) return;
  fail("kernel ", record.kernel, " has ", record.load_count, " loads and ", record.out_count, " outputs, the node ",
       contract.loads.size() + parts, " and ", contract.outs.size(), kRemedy);
}

// Batches, and heads, beyond those that were known when the model was optimized.
int64_t unknown_batches(const Contract& contract, int64_t batch) {
  for (const Group* group : {&contract.batch, &contract.heads}) {
    for (const int axis : *group) {
      if (contract.axes[axis].size > 1) batch /= contract.axes[axis].size;
    }
  }
  return batch;
}

// What the ranges of m mean: where all batches share rhs, it is their rows together that decide how often it is read.
// Columns count together in batches whose number only the run knows; `Sizes.guesses` in schedule/kernel_family.py.
int64_t planned_size(const Contract& contract, const OnnxfuseArguments& arguments) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  const int64_t batches = unknown_batches(contract, arguments.batch);
  if (contract.chosen_by == ChosenBy::kColumns) return std::min(arguments.n * batches, kMost);
  if (contract.chosen_by == ChosenBy::kBatches) return std::min(batches, kMost);
  const auto is_shared = [](const OnnxfuseTensor& rhs) { return rhs.batch_stride == 0; };
  const bool shared = contract.has_product() && !contract.is_attention() &&
                      std::all_of(arguments.rhs, arguments.rhs + contract.rhs.size(), is_shared);
  const int64_t rows = int64_t{arguments.m} * (shared ? arguments.batch : 1);
  return std::min(rows, kMost);
}

// A kernel reads as many blocks of a column as k has; fewer would send it beyond the end of the weight.
void check_blocks(const Record& record, const Contract& contract, const OnnxfuseArguments& arguments) {
  const int64_t bits = record.quantized.bits, block = record.quantized.block;
  for (size_t i = 0; i < contract.scales.size(); ++i) {
    const OnnxfuseScales& scales = arguments.scales[i];
    const int64_t blocks = (arguments.k + block - 1) / block, zero_bytes = (blocks * bits + 7) / 8;
    const bool fits = scales.scales_pitch == blocks && arguments.rhs[i].column_stride == blocks * block * bits / 8 &&
                      (contract.zero_points.empty() || scales.zero_points_pitch == zero_bytes);
    if (!fits) fail("weight ", i, " does not hold k=", arguments.k, " in blocks of ", block, kRemedy);
  }
}

bool covers(const Record& record, int64_t size) { return record.min_m <= size && size <= record.max_m; }

[[noreturn]] void nothing_fits(const std::vector<const Record*>& candidates, const Contract& contract,
                               const ElementBytes& bytes, const OnnxfuseArguments& arguments) {
  std::string ranges, alignment;
  const int64_t size = planned_size(contract, arguments);
  for (const Record* record : candidates) {
    if (record->may_be_refused()) continue;   // another kernel takes over from it
    ranges += text(ranges.empty() ? "" : ", ", record->min_m, "..", record->max_m);
    if (covers(*record, size) && alignment.empty()) alignment = misfit(*record, contract, bytes, arguments);
  }
  if (alignment.empty()) {
    constexpr const char* kNames[] = {"m=", "n=", "batch="};
    const char* by = kNames[static_cast<int>(contract.chosen_by)];
    fail("no kernel ", contract.kernel, " for ", by, size, " (the model's are for ", by, ranges,
         "); optimize the original again for this range");
  }
  fail("no kernel ", contract.kernel, " for how the data lies in memory: ", alignment,
       "-byte alignment of its address and pitches, each loop in one stride or as it was compiled (m=", arguments.m,
       "); optimize the original again with these shapes");
}

}  // namespace

bool runs_on(const Record& record, const Device& device) {
  if (record.shared_bytes > device.shared_bytes || (!record.maps.empty() && !device.has_tensor_maps)) return false;
  if (record.library != LibraryMath::kNone && !device.has_library) return false;
  switch (record.flavour) {
    case Flavour::kCubin:
      return record.capability / 10 == device.capability / 10 && record.capability <= device.capability;
    case Flavour::kSpecific:
      return record.capability == device.capability;
    case Flavour::kPtx:
      return record.capability <= device.capability;
  }
  return false;
}

std::vector<const Record*> records_for(const Records& records, const Contract& contract, const Device& device) {
  std::vector<const Record*> all, chosen;
  for (const Record& record : records) {
    if (record.kernel != contract.kernel) continue;
    check_counts(record, contract);
    all.push_back(&record);
    const bool shadowed = std::any_of(chosen.begin(), chosen.end(),
                                      [&](const Record* earlier) { return shadows(*earlier, record); });
    if (runs_on(record, device) && !shadowed) chosen.push_back(&record);
  }
  if (all.empty()) fail("the model carries no kernel ", contract.kernel, kRemedy);
  if (chosen.empty()) {
    fail("the model carries this kernel for ", architectures_text(all), " and the device is sm_", device.capability,
         " with ", device.shared_bytes, " bytes of shared memory a block; ", remedy_for(device.capability));
  }
  return chosen;
}

size_t choose(const std::vector<const Record*>& candidates, const Contract& contract, const ElementBytes& bytes,
              const OnnxfuseArguments& arguments, size_t first) {
  const int64_t size = planned_size(contract, arguments);
  for (size_t i = first; i < candidates.size(); ++i) {
    const Record& record = *candidates[i];
    check_blocks(record, contract, arguments);
    if (covers(record, size) && misfit(record, contract, bytes, arguments).empty()) return i;
  }
  nothing_fits(candidates, contract, bytes, arguments);
}

}  // namespace onnxfuse
