// Reads tensors in CUDA memory: the only code that knows torch's streams and allocators as well as our launches.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "../layout.h"
#include "../stats_row.h"

namespace overflowstat::cuda {

struct Source {
  const void* data;
  c10::DeviceIndex device;
  Format format;
  const Layout* layout;
  StatsRow* row;  // written before read() returns, without layout->repeat
};

// Launches on the current stream of each tensor's device and waits once for each device. Thread-safe.
// Throws std::runtime_error with CUDA's own words if a launch or the wait fails, or during a graph capture, where
// waiting is not allowed.
void read(const std::vector<Source>& sources);

}  // namespace overflowstat::cuda
