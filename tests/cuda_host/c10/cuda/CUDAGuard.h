// Stands in for torch's header of this name.
#pragma once

#include "c10/cuda/CUDAStream.h"

namespace c10::cuda {

class CUDAGuard {
 public:
  explicit CUDAGuard(DeviceIndex device);
  ~CUDAGuard();
  CUDAGuard(const CUDAGuard&) = delete;
  CUDAGuard& operator=(const CUDAGuard&) = delete;

 private:
  int before_ = 0;
};

class CUDAStreamGuard {
 public:
  explicit CUDAStreamGuard(CUDAStream stream);
  ~CUDAStreamGuard();
  CUDAStreamGuard(const CUDAStreamGuard&) = delete;
  CUDAStreamGuard& operator=(const CUDAStreamGuard&) = delete;

 private:
  CUDAGuard device_;
  CUDAStream before_;
};

}  // namespace c10::cuda
