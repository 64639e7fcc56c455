// The order in which a tensor's elements are read: that of its memory, largest stride first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace overflowstat {

// *Memory order*: dimensions by falling stride (equal ones as they stand), the last one fastest. For a tensor that is
// dense in memory in any order (transposed, channels_last) the memory-order index of an element is its offset from
// the first; for any other it still names one element, which an offset into an expanded or overlapping view would not.
struct Layout {
  struct Dimension {
    int64_t size;
    int64_t stride;  // in elements
  };
  std::vector<Dimension> dimensions;  // memory order, neighbours that one stride spans merged into one
  int64_t count = 1;                  // elements that these dimensions hold
  int64_t repeat = 1;                 // times that each is met again, through strides of 0

  bool is_dense() const {
    return count == 0 || dimensions.empty() || (dimensions.size() == 1 && dimensions[0].stride == 1);
  }

  // Offset of the last element in memory, in elements.
  int64_t extent() const {
    int64_t last = 0;
    for (const Dimension& d : dimensions) last += (d.size - 1) * d.stride;
    return last;
  }
};

// torch has no negative strides.
inline Layout make_layout(const int64_t* sizes, const int64_t* strides, int64_t rank) {
  Layout layout;
  std::vector<Layout::Dimension> sorted;
  for (int64_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0) return Layout{{}, 0, 1};
    if (sizes[i] == 1) continue;
    if (strides[i] == 0) {
      layout.repeat *= sizes[i];
    } else {
      sorted.push_back({sizes[i], strides[i]});
    }
  }
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.stride > b.stride; });
  for (const Layout::Dimension& d : sorted) {
    layout.count *= d.size;
    if (!layout.dimensions.empty() && layout.dimensions.back().stride == d.size * d.stride) {
      layout.dimensions.back() = {layout.dimensions.back().size * d.size, d.stride};
    } else {
      layout.dimensions.push_back(d);
    }
  }
  return layout;
}

}  // namespace overflowstat
