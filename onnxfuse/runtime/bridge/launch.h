// The code of one node in one context: which records it holds, which of them a run takes, and how it is launched.
#pragma once

#include <memory>
#include <vector>

#include "archive.h"
#include "axes.h"
#include "choice.h"
#include "contract.h"
#include "driver.h"

namespace onnxfuse {

struct Loaded {
  Context context = nullptr;
  Device device;
  std::vector<const Record*> records;
  std::vector<Function> functions;   // one for each record
  std::vector<std::shared_ptr<Module>> modules;
};

// The records of the node's kernel that the device of the current context runs, loaded there.
std::unique_ptr<const Loaded> load(const Contract& contract, const Records& records, Context context);

// Launches the first record that fits the arguments. Throws Error that says what does not fit.
void launch(const Loaded& code, const Contract& contract, const ElementBytes& bytes, OnnxfuseArguments& arguments,
            Stream stream);

}  // namespace onnxfuse
