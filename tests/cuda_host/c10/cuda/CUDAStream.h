// Stands in for torch's header of this name.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "c10/core/Device.h"

namespace c10 {
using StreamId = int64_t;
}

namespace c10::cuda {

// Ids are a device's own, as torch's are: those of two devices are told apart by the device alone.
class CUDAStream {
 public:
  CUDAStream(DeviceIndex device, StreamId id) : device_(device), id_(id) {}

  DeviceIndex device_index() const { return device_; }
  Device device() const { return Device(device_); }
  StreamId id() const { return id_; }
  cudaStream_t stream() const;  // null for the default stream, whose id is 0

 private:
  DeviceIndex device_;
  StreamId id_;
};

CUDAStream getCurrentCUDAStream(DeviceIndex device = -1);
void setCurrentCUDAStream(CUDAStream stream);
CUDAStream getStreamFromPool(bool high_priority, DeviceIndex device);

}  // namespace c10::cuda
