// A ring with a device that a test plays itself: it decides when which row is written, and what the device answers.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "ring.h"

using namespace overflowstat;

namespace {

struct FakeDevice {
  std::vector<StampedRow> memory;
  std::atomic<int> progress{0};  // of Progress
  std::atomic<long> polls{0};
  std::unique_ptr<Ring> ring;

  std::shared_ptr<Frame> frame(long handle) {
    const std::lock_guard<std::mutex> lock(mutex);
    return frames.at(handle);
  }
  long add(std::shared_ptr<Frame> frame) {
    const std::lock_guard<std::mutex> lock(mutex);
    frames[++last] = std::move(frame);
    return last;
  }

  std::mutex mutex;
  std::map<long, std::shared_ptr<Frame>> frames;
  long last = 0;
};

}  // namespace

extern "C" {

FakeDevice* device_new(long capacity, double limit_seconds) {
  auto* device = new FakeDevice;
  device->memory.resize(capacity);
  device->ring = std::make_unique<Ring>(device->memory.data(), capacity,
                                        std::chrono::nanoseconds(static_cast<int64_t>(limit_seconds * 1e9)));
  return device;
}
void device_delete(FakeDevice* device) { delete device; }
void device_set_progress(FakeDevice* device, int progress) { device->progress = progress; }
long device_polls(const FakeDevice* device) { return device->polls; }
long device_waits(const FakeDevice* device) { return static_cast<long>(device->ring->waits()); }

// A frame's handle; 0 if the ring gives none, -1 if it threw.
long frame_begin(FakeDevice* device, long count) {
  try {
    auto frame = device->ring->begin(count, [device] {
      ++device->polls;
      return std::pair(static_cast<Progress>(device->progress.load()), std::string("it is on fire"));
    });
    return frame ? device->add(std::move(frame)) : 0;
  } catch (const std::invalid_argument&) {
    return -1;
  }
}
long frame_first(FakeDevice* device, long frame) { return device->frame(frame)->rows() - device->memory.data(); }
void frame_drop(FakeDevice* device, long frame) {
  const std::lock_guard<std::mutex> lock(device->mutex);
  device->frames.erase(frame);
}
int frame_ready(FakeDevice* device, long frame) { return device->frame(frame)->ready(); }

// What a kernel does: the row, then its stamp.
void frame_write(FakeDevice* device, long frame, long i, unsigned long value) {
  const auto f = device->frame(frame);
  StatsRow row;
  row.numel = value;
  f->rows()[i].row = row;
  __atomic_store_n(&f->rows()[i].stamp, f->stamp(), __ATOMIC_RELEASE);
}

// Waits; values[i] is what row i was written with, -1 if it is missing. Returns whether it had to wait.
int frame_result(FakeDevice* device, long frame, long* values, char* failure, long failure_size) {
  const auto f = device->frame(frame);
  uint64_t waits = 0;
  const Frame::Result& result = f->result(device->ring->limit(), waits);
  for (size_t i = 0; i < result.rows.size(); ++i) {
    values[i] = result.rows[i].first ? static_cast<long>(result.rows[i].second.numel) : -1;
  }
  strncpy(failure, result.failure.c_str(), failure_size - 1);
  return static_cast<int>(waits);
}
}
