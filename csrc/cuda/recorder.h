// Reads tensors in CUDA memory: the only code that knows torch's streams and allocators as well as our launches.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../layout.h"
#include "../reading.h"

namespace overflowstat::cuda {

struct Source {
  const void* data;
  c10::DeviceIndex device;
  Format format;
  const Layout* layout;
  size_t entry;  // of the reading that the row is for
};

// Launches the reading of tensors in CUDA memory on the current stream of each one's device, and adds what the rows
// will be in to `reading`. No wait, no copy of a tensor; device memory is allocated only where a list is longer than
// any before. Inside a graph capture each launch gets memory of its own, and waits until it is there. Thread-safe.
// Throws std::runtime_error with CUDA's own words if a launch is refused.
void launch(const std::vector<Source>& sources, Reading& reading);

// A number for the CUDA graph into which the calling thread's current stream is captured, no other graph's in this
// process; 0 if it is not. CUDA must have been used before.
uint64_t current_capture();

}  // namespace overflowstat::cuda
