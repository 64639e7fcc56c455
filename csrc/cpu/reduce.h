// The pass over tensors in host memory.
#pragma once

#include <cstddef>

#include "../layout.h"
#include "../number_format.h"
#include "../stats_row.h"

namespace overflowstat::cpu {

struct Tensor {
  const void* data;
  Format format;
  Layout layout;
};

// rows[i] becomes the row of tensors[i], without layout.repeat: one read of each tensor's memory, on torch's threads
// where the list is large enough to pay for them. Any alignment; allocates 24 bytes for each 256 KiB of a large list.
// `details` is null, or details[i] becomes the detail of tensors[i].
void reduce(const Tensor* tensors, size_t count, StatsRow* rows, Detail* details = nullptr);

}  // namespace overflowstat::cpu
