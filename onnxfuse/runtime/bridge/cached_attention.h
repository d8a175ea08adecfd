// One token of each sequence over a cache of keys and values: what a run asks for, and what its kernel is given. Pure: no
// runtime, no driver.
#pragma once

#include "archive.h"
#include "axes.h"
#include "contract.h"

namespace onnxfuse {

// Which input is what, by position among the node's tensors; kNone for one that it lacks.
struct CachedInputs {
  int query, keys, values;       // of all tokens, and the cache
  int own_key, own_value;        // of the token, where they do not lie behind the query
  int lengths, cosines, sines;
  int query_norm, key_norm;      // what these multiply by
  int sink;                      // of each head of the query
  int counted;                   // has a column for each key of the longest sequence

  explicit CachedInputs(const Contract& contract);
  bool is_packed() const { return own_key == kNone; }
};

// Inputs of the model's op up to the last one that the node has: the norms' stand behind the sink, that behind the angles.
size_t original_inputs(const CachedInputs& at);

// Sizes of a run.
struct CachedSizes {
  int64_t batch, tokens, heads, room, head;   // heads of keys and values; keys that the cache has room for
  int64_t keys;                               // that the longest sequence has
  int64_t positions;                          // that have cosines and sines
  int64_t query;                              // columns of the query alone, and of the result

  // Of the cache that comes out, which has more where that does not suffice.
  int64_t room_after() const { return room < keys ? keys : room; }
};

// Throws Error naming the axis and the sizes that disagree.
CachedSizes cached_sizes(const Contract& contract, const std::vector<Shape>& inputs);

// Shape of an output: the result, the cache of keys, that of values.
Shape cached_output_shape(const Contract& contract, const CachedSizes& sizes, size_t output);

// Whether our kernels do it: one token of each sequence, in a cache with room that is written where it lies, wherever 16
// bytes are read at once.
bool is_decoding(const Contract& contract, const CachedSizes& sizes, const std::vector<void*>& inputs,
                 const std::vector<void*>& outputs);

OnnxfuseArguments cached_arguments(const Contract& contract, const CachedSizes& sizes, const std::vector<void*>& inputs,
                                   const std::vector<void*>& outputs);

// Blocks of a launch: a cluster for each head of keys of each sequence.
int64_t cached_blocks(const Record& record, const CachedSizes& sizes);

}  // namespace onnxfuse
