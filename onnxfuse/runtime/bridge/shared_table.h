// Tables of what sessions share while any of them lives.
#pragma once

#include <iterator>

namespace onnxfuse {

// A server that reloads its sessions for months would otherwise keep an entry for every one of them.
template <typename Table>
void drop_expired(Table& table) {
  for (auto entry = table.begin(); entry != table.end();) {
    entry = entry->second.expired() ? table.erase(entry) : std::next(entry);
  }
}

}  // namespace onnxfuse
