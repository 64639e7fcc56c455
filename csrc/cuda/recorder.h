// Reads tensors in CUDA memory: the only code that knows torch's streams and allocators as well as our launches.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "../layout.h"
#include "../reading.h"
#include "memory.h"
#include "stream.h"

namespace overflowstat::cuda {

struct Source {
  const void* data;
  c10::DeviceIndex device;
  Format format;
  const Layout* layout;
  size_t entry;  // of the reading that the row is for
};

// 1 MiB of pinned memory: some thousand module calls that nobody has looked at yet.
constexpr size_t kRingRows = 16384;

// Must outlive its launches. Thread-safe.
class Recorder {
 public:
  // `rows` of a ring, or more where a list is longer than half of them. Where it is full the oldest frame is waited
  // for, and where that does not come in time there is a new ring: no device is refused because another does not
  // answer. No wait in here is longer than `limit`.
  explicit Recorder(size_t rows = kRingRows, std::chrono::nanoseconds limit = kLongestWait)
      : rows_(rows), limit_(limit) {}

  // Launches the reading of tensors in CUDA memory on the current stream of each one's device, and adds what the rows
  // will be in, and with `detail` theirs, to `reading`. No wait, no copy of a tensor; device memory is allocated only
  // where a list is longer than any before. Inside a graph capture each launch gets memory of its own, and waits until
  // it is there. Throws std::runtime_error with CUDA's own words if a launch is refused.
  void launch(const std::vector<Source>& sources, Reading& reading, bool detail);

 private:
  struct PinnedRing {
    PinnedRing(size_t capacity, std::chrono::nanoseconds limit)
        : memory(capacity), ring(memory.data(), capacity, limit) {}

    PinnedRows memory;
    Ring ring;
  };
  // Waits that it took are added to the reading's.
  std::shared_ptr<Frame> begin_frame(size_t rows, const Poll& poll, Reading& reading);

  const size_t rows_;
  const std::chrono::nanoseconds limit_;
  std::mutex mutex_;
  std::unique_ptr<PinnedRing> ring_;
  std::map<StreamKey, StreamMemory> streams_;
};

// The one of this process.
Recorder& recorder();

// A number for the CUDA graph into which the calling thread's current stream is captured, no other graph's in this
// process; 0 if it is not, or if its device has failed. CUDA must have been used before.
uint64_t current_capture();

}  // namespace overflowstat::cuda
