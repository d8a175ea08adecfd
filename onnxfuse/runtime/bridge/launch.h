// The code of one node in one context: which records it holds, which of them a run takes, and how it is launched.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "archive.h"
#include "axes.h"
#include "choice.h"
#include "contract.h"
#include "cublaslt.h"
#include "driver.h"

namespace onnxfuse {

struct Loaded {
  Context context = nullptr;
  Device device;
  std::vector<const Record*> records;
  std::vector<Function> functions;   // one for each record
  std::vector<Function> copies;      // what copies factors before it; nullptr where nothing does
  std::vector<std::shared_ptr<Module>> modules;
  std::shared_ptr<Cublaslt> library;   // nothing where no record needs it, or there is none

  // Whether a run may ask for memory.
  bool needs_scratch() const;
};

// Device memory for the work that this run enqueues, at least so many bytes; nullptr where there is none.
using Scratch = std::function<void*(size_t)>;

// The records of the node's kernel that the device of the current context runs, loaded there.
std::unique_ptr<const Loaded> load(const Contract& contract, const Records& records, Context context);

// Launches the first record that fits the arguments, for whose copies, if it needs any, there is memory, and whose
// product, where it is the library's, the library takes on.
// Throws Error that says what does not fit.
void launch(const Loaded& code, const Contract& contract, const ElementBytes& bytes, OnnxfuseArguments& arguments,
            const Scratch& scratch, Stream stream);

// Launches a kernel that needs no maps over so many blocks.
void launch_blocks(const Loaded& code, size_t chosen, int64_t blocks, OnnxfuseArguments& arguments, Stream stream);

}  // namespace onnxfuse
