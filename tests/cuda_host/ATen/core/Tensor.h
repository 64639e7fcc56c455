// Stands in for torch's header of this name: bytes in the memory of a device, or in pinned memory of the host.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "c10/core/Device.h"

namespace at {

constexpr int kByte = 0;

class TensorOptions {
 public:
  TensorOptions dtype(int) const { return *this; }
  TensorOptions device(Device device) const {
    TensorOptions options = *this;
    options.device_ = device;
    return options;
  }
  TensorOptions pinned_memory(bool) const { return *this; }
  std::optional<Device> where() const { return device_; }

 private:
  std::optional<Device> device_;  // or else pinned
};

struct Storage;

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<Storage> storage) : storage_(std::move(storage)) {}

  bool defined() const { return storage_ != nullptr; }
  int64_t numel() const;
  void* data_ptr() const;
  Tensor& copy_(const Tensor& source, bool non_blocking);

 private:
  std::shared_ptr<Storage> storage_;
};

}  // namespace at
