// In what amounts the loops over host memory take it.
#pragma once

#include <cstdint>
#include <cstring>

#define OVERFLOWSTAT_INLINE inline __attribute__((always_inline))

namespace overflowstat::cpu {

// Of which two fit into L1, of 32 KB or more: where something in a block is to be looked at again it must still be
// there, with the one that was read beside it.
constexpr int64_t kBlockBytes = 8 * 1024;
// What one thread takes at a time. Below this a second thread costs more than it brings.
constexpr int64_t kPieceBytes = 256 * 1024;

template <class Element>
OVERFLOWSTAT_INLINE Element load(const char* data, int64_t i) {
  Element element;
  memcpy(&element, data + i * static_cast<int64_t>(sizeof(Element)), sizeof(Element));
  return element;
}

}  // namespace overflowstat::cpu
