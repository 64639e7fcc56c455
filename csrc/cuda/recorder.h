// Reads tensors in CUDA memory: the only code that knows torch's streams and allocators as well as our launches.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "../layout.h"
#include "../recorder.h"

namespace overflowstat::cuda {

struct Source {
  const void* data;
  c10::DeviceIndex device;
  Format format;
  const Layout* layout;
  size_t entry;  // of the reading that the row is for
};

// Launches the reading of tensors in CUDA memory on the current stream of each one's device, and adds the frames that
// the rows will be in to `reading`. No wait, no copy of a tensor; device memory is allocated only where a list is
// longer than any before. Thread-safe. Throws std::runtime_error with CUDA's own words if a launch is refused, or
// during a graph capture.
void launch(const std::vector<Source>& sources, Reading& reading);

}  // namespace overflowstat::cuda
