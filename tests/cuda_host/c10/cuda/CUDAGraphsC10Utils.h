// Stands in for torch's header of this name.
#pragma once

#include <cuda_runtime_api.h>

namespace c10::cuda {

class CUDAStreamCaptureModeGuard {
 public:
  explicit CUDAStreamCaptureModeGuard(cudaStreamCaptureMode mode);
  ~CUDAStreamCaptureModeGuard();
  CUDAStreamCaptureModeGuard(const CUDAStreamCaptureModeGuard&) = delete;
  CUDAStreamCaptureModeGuard& operator=(const CUDAStreamCaptureModeGuard&) = delete;

 private:
  cudaStreamCaptureMode mode_;
};

}  // namespace c10::cuda
