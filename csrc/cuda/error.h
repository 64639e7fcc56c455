// Errors of CUDA that are ours to report.
#pragma once

#include <cuda_runtime_api.h>

namespace overflowstat::cuda {

// What a call returned, taken from where CUDA keeps it: another library's next check must not find it.
inline cudaError_t taken(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace overflowstat::cuda
