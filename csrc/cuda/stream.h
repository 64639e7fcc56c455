// What a stream is doing: working, waiting to be replayed, or gone.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <optional>

#include "../progress.h"

struct CUgraph_st;

namespace overflowstat::cuda {

// The graph into which a stream's work is captured. `id` is no other graph's in this process.
struct Capture {
  uint64_t id;
  CUgraph_st* graph;
};
// Nothing if the work of the stream runs. The device's context must exist.
std::optional<Capture> capture_of(const c10::cuda::CUDAStream& stream);

// Asks one stream. While that is captured what was launched on it before may still run, and cannot be asked for.
Poll poll_of(c10::cuda::CUDAStream stream);

// Asks the stream that is current on a device then. While that is captured there is nothing to wait for.
Poll poll_of_current_stream(c10::DeviceIndex device);

}  // namespace overflowstat::cuda
