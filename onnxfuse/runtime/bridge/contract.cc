#include "contract.h"

#include <algorithm>
#include <cctype>
#include <locale>
#include <sstream>

#include "error.h"

namespace onnxfuse {
namespace {

constexpr size_t kMaxText = 1 << 16;
constexpr size_t kMaxAxes = 64;
constexpr size_t kMaxKernelId = 31;

const ElementType kElementTypes[] = {
    {"f32", 1, 4},  {"u8", 2, 1},   {"i8", 3, 1},   {"u16", 4, 2},  {"i16", 5, 2},  {"i32", 6, 4},  {"i64", 7, 8},
    {"bool", 9, 1}, {"f16", 10, 2}, {"f64", 11, 8}, {"u32", 12, 4}, {"u64", 13, 8}, {"bf16", 16, 2},
};

// Text of the model inside a message: short, and ASCII whatever it was.
std::string quoted(std::string source) {
  constexpr size_t kMaxQuoted = 200;
  if (source.size() > kMaxQuoted) source = source.substr(0, kMaxQuoted) + "...";
  for (char& c : source) {
    if (c < ' ' || c > '~') c = '?';
  }
  return source;
}

// Words of one attribute. Every character is either consumed or reported.
class Reader {
 public:
  Reader(const char* attribute, const std::string& source) : attribute_(attribute), source_(source) {
    if (source.size() > kMaxText) fail("attribute ", attribute, " is longer than ", kMaxText, " bytes");
  }

  bool at_end() {
    skip_spaces();
    return position_ == source_.size();
  }

  // Consumes the symbol if it is next.
  bool take(const char* symbol) {
    skip_spaces();
    const std::string wanted(symbol);
    if (source_.compare(position_, wanted.size(), wanted) != 0) return false;
    position_ += wanted.size();
    return true;
  }

  void expect(const char* symbol) {
    if (!take(symbol)) wrong(text("expected '", symbol, "'"));
  }

  bool next_is_name() {
    skip_spaces();
    return position_ < source_.size() && (std::isalpha(byte()) || byte() == '_');
  }

  std::string name() {
    if (!next_is_name()) wrong("expected a name");
    const size_t start = position_;
    while (position_ < source_.size() && (std::isalnum(byte()) || byte() == '_')) ++position_;
    return source_.substr(start, position_ - start);
  }

  int64_t number() {
    skip_spaces();
    if (position_ == source_.size() || !std::isdigit(byte())) wrong("expected a number");
    int64_t value = 0;
    for (; position_ < source_.size() && std::isdigit(byte()); ++position_) {
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, int64_t{byte() - '0'}, &value)) {
        wrong("the number does not fit in 64 bits");
      }
    }
    return value;
  }

  float real() {
    skip_spaces();
    const size_t end = std::min(source_.find(' ', position_), source_.size());
    std::istringstream in(source_.substr(position_, end - position_));
    in.imbue(std::locale::classic());
    double value = 0;
    if (!(in >> value) || in.peek() != std::istringstream::traits_type::eof()) wrong("expected a real number");
    position_ = end;
    return static_cast<float>(value);
  }

  [[noreturn]] void wrong(const std::string& reason) const {
    fail("attribute ", attribute_, "='", quoted(source_), "': ", reason, " at character ", position_,
         "; the model was edited or written by another version, optimize the original again");
  }

 private:
  unsigned char byte() const { return static_cast<unsigned char>(source_[position_]); }
  void skip_spaces() {
    while (position_ < source_.size() && std::isspace(byte())) ++position_;
  }

  const char* attribute_;
  const std::string& source_;
  size_t position_ = 0;
};

int find_axis(const Contract& contract, const std::string& name) {
  for (size_t axis = 0; axis < contract.axes.size(); ++axis) {
    if (contract.axes[axis].name == name) return static_cast<int>(axis);
  }
  return kNone;
}

int known_axis(const Contract& contract, Reader& reader, const std::string& name) {
  const int axis = find_axis(contract, name);
  if (axis == kNone) reader.wrong(text("no tensor has an axis ", name));
  return axis;
}

int add_axis(Contract& contract, Reader& reader, const std::string& name) {
  const int axis = find_axis(contract, name);
  if (axis != kNone) return axis;
  if (contract.axes.size() == kMaxAxes) reader.wrong(text("more than ", kMaxAxes, " axes"));
  contract.axes.push_back(Axis{name, kUnknown});
  return static_cast<int>(contract.axes.size()) - 1;
}

bool has_axis(const std::vector<Group>& dims, int axis) {
  return std::any_of(dims.begin(), dims.end(), [&](const Group& group) { return contains(group, axis); });
}

// One dimension but for its window: `m`, `(h d)`, `()` or `1`.
Group parse_dimension(Contract& contract, Reader& reader) {
  if (reader.take("(")) {
    Group group;
    while (!reader.take(")")) group.push_back(add_axis(contract, reader, reader.name()));
    return group;
  }
  if (reader.next_is_name()) return {add_axis(contract, reader, reader.name())};
  if (reader.number() != 1) reader.wrong("a dimension is an axis, a group in parentheses, or 1");
  return {};
}

std::vector<Group> parse_item(Contract& contract, Reader& reader, bool* last, bool* arrow) {
  std::vector<Group> dims;
  while (true) {
    *arrow = reader.take("->");
    *last = !*arrow && reader.at_end();
    if (*arrow || *last || reader.take(",")) break;
    Group group = parse_dimension(contract, reader);
    if (reader.take(":")) {
      if (wide_dimension(dims) != nullptr || group.empty()) reader.wrong("a window of no axes, or a second window");
      group.whole = reader.number();
    }
    for (size_t i = 0; i < group.size(); ++i) {
      if (has_axis(dims, group[i]) || std::count(group.begin(), group.end(), group[i]) > 1) {
        reader.wrong(text("axis ", contract.axes[group[i]].name, " is twice in one tensor"));
      }
    }
    dims.push_back(std::move(group));
  }
  return dims;
}

void parse_axes(const NodeText& node, Contract& contract) {
  Reader reader("axes", node.axes);
  auto* tensors = &contract.inputs;
  for (bool last = false, arrow = false; !last;) {
    tensors->push_back(parse_item(contract, reader, &last, &arrow));
    if (tensors == &contract.outputs && wide_dimension(tensors->back()) != nullptr) {
      reader.wrong("a window of an output, whose other elements nothing would write");
    }
    if (arrow && tensors == &contract.outputs) reader.wrong("a second '->'");
    if (arrow) tensors = &contract.outputs;
  }
  if (contract.outputs.empty()) reader.wrong("expected '->' and the outputs");
}

void parse_sizes(const NodeText& node, Contract& contract) {
  Reader reader("sizes", node.sizes);
  while (!reader.at_end()) {
    Axis& axis = contract.axes[known_axis(contract, reader, reader.name())];
    reader.expect("=");
    if (axis.size != kUnknown) reader.wrong(text("two sizes of axis ", axis.name));
    axis.size = reader.number();
  }
}

Group* group_named(Contract& contract, Reader& reader, const std::string& name) {
  if (name == "batch") return &contract.batch;
  if (name == "heads") return &contract.heads;
  if (name == "m") return &contract.m;
  if (name == "n") return &contract.n;
  if (name == "k") return &contract.k;
  if (name == "o") return &contract.o;
  reader.wrong(text("no dimension of a product is called ", name));
}

void parse_problem(const NodeText& node, Contract& contract) {
  Reader reader("problem", node.problem);
  Group used;
  while (!reader.at_end()) {
    Group* group = group_named(contract, reader, reader.name());
    if (!group->empty()) reader.wrong("a dimension is given twice");
    reader.expect("=");
    do {
      const int axis = known_axis(contract, reader, reader.name());
      if (contains(used, axis)) reader.wrong(text("axis ", contract.axes[axis].name, " is used twice"));
      used.push_back(axis);
      group->push_back(axis);
    } while (reader.take("*"));
  }
}

Reference parse_reference(Contract& contract, Reader& reader, const std::vector<std::vector<Group>>& tensors) {
  Reference reference;
  const int64_t tensor = reader.number();
  if (tensor >= static_cast<int64_t>(tensors.size())) reader.wrong(text("there is no tensor ", tensor));
  reference.tensor = static_cast<int>(tensor);
  if (!reader.take("[")) return reference;
  if (reader.take("+")) {
    if (wide_dimension(tensors[tensor]) == nullptr) reader.wrong(text("tensor ", tensor, " has no window"));
    reference.start = reader.number();
    reader.expect("]");
    return reference;
  }
  reference.part_axis = known_axis(contract, reader, reader.name());
  if (!has_axis(tensors[tensor], reference.part_axis)) {
    reader.wrong(text("tensor ", tensor, " has no axis ", contract.axes[reference.part_axis].name));
  }
  reader.expect("=");
  reference.part = reader.number();
  reader.expect("]");
  return reference;
}

std::vector<Reference> parse_references(Contract& contract, Reader& reader, size_t limit,
                                        const std::vector<std::vector<Group>>& tensors) {
  std::vector<Reference> references;
  do {
    references.push_back(parse_reference(contract, reader, tensors));
    if (references.size() > limit) reader.wrong(text("more than ", limit, " of them"));
  } while (reader.take(","));
  return references;
}

void parse_arguments(const NodeText& node, Contract& contract) {
  Reader reader("arguments", node.arguments);
  bool has_lhs = false;
  while (!reader.at_end()) {
    const std::string name = reader.name();
    reader.expect("=");
    if (name == "lhs" && !has_lhs) {
      contract.lhs = parse_reference(contract, reader, contract.inputs);
      has_lhs = true;
    } else if (name == "rhs" && contract.rhs.empty()) {
      contract.rhs = parse_references(contract, reader, ONNXFUSE_MAX_PARTS, contract.inputs);
    } else if (name == "scales" && contract.scales.empty()) {
      contract.scales = parse_references(contract, reader, ONNXFUSE_MAX_PARTS, contract.inputs);
    } else if (name == "zero_points" && contract.zero_points.empty()) {
      contract.zero_points = parse_references(contract, reader, ONNXFUSE_MAX_PARTS, contract.inputs);
    } else if (name == "loads" && contract.loads.empty()) {
      contract.loads = parse_references(contract, reader, ONNXFUSE_MAX_LOADS, contract.inputs);
    } else if (name == "outs" && contract.outs.empty()) {
      contract.outs = parse_references(contract, reader, ONNXFUSE_MAX_OUTS, contract.outputs);
    } else {
      reader.wrong(text(name, " is unknown or given twice"));
    }
  }
  if (contract.outs.empty()) reader.wrong("outs is missing");
  if (has_lhs != contract.has_product()) reader.wrong("lhs without rhs, or rhs without lhs");
  if (!contract.has_product() && !contract.k.empty()) reader.wrong("a k and no product");
  const bool each_scaled = contract.scales.size() == contract.rhs.size() && !contract.is_attention();
  const bool each_zeroed = contract.zero_points.empty() || contract.zero_points.size() == contract.scales.size();
  if ((contract.is_quantized() && !each_scaled) || !each_zeroed) reader.wrong("not scales and zero points of each rhs");
  const bool two_products = contract.rhs.size() == 2 && contract.outs.size() == 1;
  if (contract.is_attention() ? !two_products : !contract.heads.empty()) {
    reader.wrong("an o and not keys and values, or heads and no o");
  }
}

std::vector<const ElementType*> parse_types(const char* attribute, const std::string& source) {
  Reader reader(attribute, source);
  std::vector<const ElementType*> types;
  do {
    const std::string name = reader.name();
    const auto* found = std::find_if(std::begin(kElementTypes), std::end(kElementTypes),
                                     [&](const ElementType& type) { return name == type.name; });
    if (found == std::end(kElementTypes)) reader.wrong(text("unknown element type ", name));
    types.push_back(found);
  } while (reader.take(","));
  if (!reader.at_end()) reader.wrong("expected ',' or the end");
  return types;
}

void parse_original(const NodeText& node, Contract& contract) {
  Reader reader("original", node.original);
  while (!reader.at_end()) {
    OriginalAttribute attribute{reader.name(), true, 0, 0.0f};
    if (reader.take("=")) {
      attribute.integer = reader.take("-") ? -reader.number() : reader.number();
    } else {
      reader.expect(":");
      attribute.is_integer = false;
      attribute.number = reader.real();
    }
    contract.original.push_back(attribute);
  }
}

// Which tensors one token over a cache has, and that they are as many as its kernel reads.
void check_cached(const Contract& contract) {
  const size_t count = contract.loads.size();
  std::vector<size_t> ranks;
  for (const Reference& load : contract.loads) ranks.push_back(contract.inputs[load.tensor].size());
  const auto rank = [&](size_t load) { return load < count ? ranks[load] : 0; };
  const size_t apart = rank(3) == 3 ? 2 : 0, lengths = 3 + apart;
  const size_t turned = rank(lengths + 1) == 2 && rank(lengths + 2) == 2 ? 2 : 0, first = lengths + 1 + turned;
  const bool has_vectors = count <= first || std::all_of(ranks.begin() + first, ranks.end() - 1, [](size_t each) {
    return each == 1;  // of norms and of a sink
  });
  const bool fits = count > first && count <= first + 4 && has_vectors && rank(0) == 3 && rank(1) == 4 && rank(2) == 4 &&
                    (apart == 0 || rank(4) == 3) && rank(lengths) <= 2 && rank(count - 1) == 2 &&
                    contract.outs.size() == 3 && !contract.has_product();
  if (!fits) fail("attribute arguments='...': not the tensors of one token over a cache");
}

void check_kernel_id(const std::string& kernel) {
  const bool hex = std::all_of(kernel.begin(), kernel.end(), [](unsigned char c) { return std::isxdigit(c); });
  if (kernel.empty() || kernel.size() > kMaxKernelId || !hex) {
    fail("attribute kernel='", quoted(kernel), "' is not a hexadecimal id of at most ", kMaxKernelId, " digits");
  }
}

void check_counts(const Contract& contract) {
  if (contract.out_types.size() != contract.outputs.size()) {
    fail("attribute out_types names ", contract.out_types.size(), " types and axes has ", contract.outputs.size(),
         " outputs");
  }
  if (!contract.in_types.empty() && contract.in_types.size() != contract.inputs.size()) {
    fail("attribute in_types names ", contract.in_types.size(), " types and axes has ", contract.inputs.size(),
         " inputs");
  }
  // An output that no argument writes would hold whatever was in memory.
  for (size_t output = 0; output < contract.outputs.size(); ++output) {
    const bool written = std::any_of(contract.outs.begin(), contract.outs.end(), [&](const Reference& reference) {
      return reference.tensor == static_cast<int>(output);
    });
    if (!written) fail("attribute arguments='...': output ", output, " is not among outs");
  }
}

}  // namespace

const Group* wide_dimension(const std::vector<Group>& dims) {
  const auto found = std::find_if(dims.begin(), dims.end(), [](const Group& dim) { return dim.whole != kUnknown; });
  return found == dims.end() ? nullptr : &*found;
}

bool contains(const Group& group, int axis) { return std::find(group.begin(), group.end(), axis) != group.end(); }

namespace {

// Kernels are chosen by n where m was known when the model was optimized and n or the number of batches was not, as of
// images; those of an attention by its batches where the queries were known. The same rules are `Sizes.by` in
// schedule/kernel_family.py and `_is_by_batches` in schedule/attention_plan.py.
ChosenBy chosen_by(const Contract& contract) {
  if (!contract.has_product()) return ChosenBy::kRows;
  const auto is_known = [&](int axis) { return contract.axes[axis].size != kUnknown; };
  const auto are_known = [&](const Group& axes) { return std::all_of(axes.begin(), axes.end(), is_known); };
  const bool same_batches = are_known(contract.batch) && are_known(contract.heads);
  if (!are_known(contract.m)) return ChosenBy::kRows;
  if (contract.is_attention()) return same_batches ? ChosenBy::kRows : ChosenBy::kBatches;
  const auto& rhs = contract.inputs[contract.rhs[0].tensor];
  const auto is_of_rhs = [&](int axis) {
    return std::any_of(rhs.begin(), rhs.end(), [&](const Group& dimension) { return contains(dimension, axis); });
  };
  // Of batches that share rhs, the rows count together.
  const bool shared = std::none_of(contract.batch.begin(), contract.batch.end(), is_of_rhs);
  if (shared && !same_batches) return ChosenBy::kRows;
  return are_known(contract.n) && same_batches ? ChosenBy::kRows : ChosenBy::kColumns;
}

}  // namespace

const ElementType* element_type(int onnx) {
  for (const ElementType& type : kElementTypes) {
    if (type.onnx == onnx) return &type;
  }
  return nullptr;
}

Contract parse_contract(const NodeText& node) {
  Contract contract;
  contract.kernel = node.kernel;
  check_kernel_id(node.kernel);
  parse_axes(node, contract);
  parse_sizes(node, contract);
  parse_problem(node, contract);
  parse_arguments(node, contract);
  contract.out_types = parse_types("out_types", node.out_types);
  if (!node.in_types.empty()) contract.in_types = parse_types("in_types", node.in_types);
  parse_original(node, contract);
  check_counts(contract);
  if (contract.is_cached()) check_cached(contract);
  contract.chosen_by = chosen_by(contract);
  return contract;
}

}  // namespace onnxfuse
