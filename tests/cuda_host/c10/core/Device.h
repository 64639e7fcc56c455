// Stands in for torch's header of this name.
#pragma once

#include <cstdint>

namespace c10 {

using DeviceIndex = int8_t;

// Of CUDA.
class Device {
 public:
  explicit Device(DeviceIndex index) : index_(index) {}
  DeviceIndex index() const { return index_; }

 private:
  DeviceIndex index_;
};

}  // namespace c10
namespace at {
using c10::Device;
}
