#include "cached_attention.h"

#include <algorithm>
#include <limits>

#include "error.h"

namespace onnxfuse {
namespace {

constexpr size_t kColumns = 2;                              // dimension of the query
constexpr size_t kHeads = 1, kRoom = 2, kHead = 3;          // of the cache
constexpr size_t kOwn = 3, kOwnRank = 3, kTableRank = 2, kVectorRank = 1;  // of a key of the token; of angles; of norms
constexpr uintptr_t kAccessBytes = 16;
constexpr int64_t kElementBytes = 2;
constexpr int64_t kMost = std::numeric_limits<int>::max();

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kAccessBytes == 0; }

OnnxfuseTensor dense(void* pointer) { return {pointer, 0, 0, 1}; }

void* moved(void* pointer, int64_t elements) { return static_cast<char*>(pointer) + elements * kElementBytes; }

// The token's own query, key and value.
void set_token(const CachedInputs& at, const CachedSizes& sizes, const std::vector<void*>& inputs,
               OnnxfuseArguments& arguments) {
  const int64_t query = sizes.query, own = sizes.heads * sizes.head;
  void* first = inputs[at.query];
  if (at.is_packed()) {
    const int64_t pitch = query + 2 * own;
    arguments.lhs = {first, pitch, 0, 1};
    arguments.rhs[2] = {moved(first, query), pitch, 0, 1};
    arguments.rhs[3] = {moved(first, query + own), pitch, 0, 1};
    return;
  }
  arguments.lhs = {first, query, 0, 1};
  arguments.rhs[2] = {inputs[at.own_key], own, 0, 1};
  arguments.rhs[3] = {inputs[at.own_value], own, 0, 1};
}

}  // namespace

CachedInputs::CachedInputs(const Contract& contract) {
  const auto tensor = [&](size_t load) { return contract.loads[load].tensor; };
  const size_t last = contract.loads.size() - 1;
  size_t next = kOwn;
  const auto take = [&](size_t rank) {
    const bool fits = next < last && contract.inputs[tensor(next)].size() == rank;
    return fits ? tensor(next++) : kNone;
  };
  query = tensor(0), keys = tensor(1), values = tensor(2);
  own_key = take(kOwnRank), own_value = take(kOwnRank);
  lengths = tensor(next++);
  cosines = take(kTableRank), sines = take(kTableRank);
  const bool has_norms = last >= next + 2;
  query_norm = has_norms ? take(kVectorRank) : kNone, key_norm = has_norms ? take(kVectorRank) : kNone;
  sink = take(kVectorRank);
  counted = tensor(last);
}

size_t original_inputs(const CachedInputs& at) { return at.key_norm != kNone ? 16 : at.sink != kNone ? 12 : 9; }

CachedSizes cached_sizes(const Contract& contract, const std::vector<Shape>& inputs) {
  bind_axes(contract, inputs);
  const CachedInputs at(contract);
  const Shape &query = inputs[at.query], &cache = inputs[at.keys];
  CachedSizes sizes{query[0], query[1], cache[kHeads], cache[kRoom], cache[kHead], 0, kMost, query[kColumns]};
  if (at.is_packed()) sizes.query -= 2 * sizes.heads * sizes.head;
  sizes.keys = inputs[at.counted][1];
  if (at.cosines != kNone) sizes.positions = inputs[at.cosines][0];
  return sizes;
}

Shape cached_output_shape(const Contract& contract, const CachedSizes& sizes, size_t output) {
  if (output == static_cast<size_t>(contract.outs[0].tensor)) return {sizes.batch, sizes.tokens, sizes.query};
  return {sizes.batch, sizes.heads, sizes.room_after(), sizes.head};
}

bool is_decoding(const Contract& contract, const CachedSizes& sizes, const std::vector<void*>& inputs,
                 const std::vector<void*>& outputs) {
  const CachedInputs at(contract);
  const bool has_room = sizes.keys > 0 && sizes.keys <= std::min(sizes.room, sizes.positions) && sizes.room <= kMost;
  const bool in_place = inputs[at.keys] == outputs[contract.outs[1].tensor] &&
                        inputs[at.values] == outputs[contract.outs[2].tensor];
  return sizes.tokens == 1 && has_room && in_place && std::all_of(inputs.begin(), inputs.end(), is_aligned) &&
         is_aligned(outputs[contract.outs[0].tensor]);
}

OnnxfuseArguments cached_arguments(const Contract& contract, const CachedSizes& sizes, const std::vector<void*>& inputs,
                                   const std::vector<void*>& outputs) {
  const CachedInputs at(contract);
  OnnxfuseArguments arguments{};
  arguments.batch = static_cast<int>(sizes.batch);
  arguments.m = 1;
  arguments.n = static_cast<int>(sizes.room);
  arguments.k = static_cast<int>(sizes.keys);
  set_token(at, sizes, inputs, arguments);
  for (size_t i = 0; i < 2; ++i) arguments.rhs[i] = dense(outputs[contract.outs[1 + i].tensor]);
  size_t load = 0;
  for (const int input : {at.lengths, at.cosines, at.sines, at.query_norm, at.key_norm, at.sink}) {
    if (input != kNone) arguments.loads[load] = dense(inputs[input]);
    ++load;
  }
  arguments.outs[0] = dense(outputs[contract.outs[0].tensor]);
  return arguments;
}

int64_t cached_blocks(const Record& record, const CachedSizes& sizes) {
  return sizes.batch * sizes.heads * std::max<int64_t>(record.cluster, 1);
}

}  // namespace onnxfuse
