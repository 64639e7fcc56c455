// What a stream is doing: working, waiting to be replayed, or gone.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "../progress.h"
#include "reduce.h"

struct CUgraph_st;

namespace overflowstat::cuda {

// Streams of two devices may have the same id.
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
inline StreamKey key_of(const c10::cuda::CUDAStream& stream) { return {stream.device_index(), stream.id()}; }

// The graph into which a stream's work is captured. `id` is no other graph's in this process.
struct Capture {
  uint64_t id;
  CUgraph_st* graph;
};
// No capture if the work of the stream runs, or with an error: a capture that has failed is one. The device's context
// must exist.
struct CaptureState {
  Error error;
  std::optional<Capture> capture;
};
CaptureState capture_state(const c10::cuda::CUDAStream& stream);
// Throws std::runtime_error in place of an error.
std::optional<Capture> capture_of(const c10::cuda::CUDAStream& stream);

// Asks one stream; never throws. While that is captured what was launched on it before may still run, and cannot be
// asked for.
Poll poll_of(c10::cuda::CUDAStream stream);

// Asks the stream that is current on a device then. While that is captured there is nothing to wait for.
Poll poll_of_current_stream(c10::DeviceIndex device);

}  // namespace overflowstat::cuda
