// Stands in for CUDA's header of this name: device.h, and a runtime that does everything at once.
//
// The device is a fake one: device d has d + 1 multiprocessors that hold one block each.
#pragma once

#include <cstddef>
#include <utility>

#include "device.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorNotReady = 600,
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
using cudaStream_t = struct CUstream_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace cuda_on_cpu {
inline int device = 0;
inline cudaError_t next_launch = cudaSuccess;  // what the next launch returns
inline cudaError_t last_error = cudaSuccess;
inline cudaError_t stream_state = cudaSuccess;  // what a query finds
inline unsigned attribute_queries = 0;
inline unsigned last_grid = 0;
}  // namespace cuda_on_cpu

inline cudaError_t cudaGetDevice(int* device) {
  *device = cuda_on_cpu::device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  ++cuda_on_cpu::attribute_queries;
  *value = device + 1;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::last_error, cudaSuccess); }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cuda_on_cpu::last_error = cuda_on_cpu::stream_state; }
inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice ? "cudaErrorNoKernelImageForDevice" : "another error";
}
inline const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  if (cuda_on_cpu::next_launch != cudaSuccess) {
    return cuda_on_cpu::last_error = std::exchange(cuda_on_cpu::next_launch, cudaSuccess);
  }
  cuda_on_cpu::last_grid = config->gridDim.x;
  cuda_on_cpu::run_grid(config->gridDim, config->blockDim, [&] { kernel(arguments...); });
  return cudaSuccess;
}
