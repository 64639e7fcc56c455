#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <limits>

#include "error.h"
#include "reduce.cuh"
#include "reduce.h"

namespace overflowstat::cuda {
namespace {

constexpr int kCachedDevices = 64;

// How many blocks of a kernel the current device runs at once; asked once for each kernel and device.
template <auto* kKernel>
cudaError_t resident_blocks(int* blocks) {
  static std::array<std::atomic<int>, kCachedDevices> cache{};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kCachedDevices && (*blocks = cache[device].load(std::memory_order_relaxed)) > 0) return cudaSuccess;
  int multiprocessors = 0, blocks_each = 0;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kKernel, kThreads, 0);
  if (error != cudaSuccess) return error;
  *blocks = std::max(1, multiprocessors * blocks_each);
  if (device < kCachedDevices) cache[device].store(*blocks, std::memory_order_relaxed);
  return cudaSuccess;
}

// Launches as many blocks as the device runs at once, but none beyond the first without one of `parts` to do.
template <auto* kKernel, class... Arguments>
cudaError_t launch(uint64_t parts, Stream stream, const Arguments&... arguments) {
  int blocks = 0;
  cudaError_t error = resident_blocks<kKernel>(&blocks);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::clamp<uint64_t>(parts, 1, blocks)));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kKernel, arguments...);
  }
  return taken(error);
}

}  // namespace

uint64_t plan_chunks(DenseTensor* tensors, size_t count) {
  uint64_t chunks = 0;
  for (size_t t = 0; t < count; ++t) {
    tensors[t].first_chunk = static_cast<uint32_t>(chunks);
    const uint64_t chunk_elements = kChunkBytes / element_size(tensors[t].format);
    chunks += tensors[t].numel / chunk_elements + (tensors[t].numel % chunk_elements != 0);
  }
  return chunks;
}

size_t workspace_bytes(size_t slots) { return offsetof(Workspace, partials) + slots * sizeof(Partial); }

Error launch_dense(const TensorList& list, void* workspace, StampedRow* slots, uint64_t stamp, bool detail,
                   Stream stream) {
  if (list.count == 0) return cudaSuccess;
  if (list.total_chunks > std::numeric_limits<uint32_t>::max()) return cudaErrorInvalidValue;
  const auto run = detail ? launch<&dense_detail, TensorList, Workspace*, StampedRow*, uint64_t>
                          : launch<&dense_kernel, TensorList, Workspace*, StampedRow*, uint64_t>;
  return run(list.total_chunks, stream, list, static_cast<Workspace*>(workspace), slots, stamp);
}

Error launch_strided(const StridedTensor& tensor, void* workspace, StampedRow* slots, uint64_t stamp, bool detail,
                     Stream stream) {
  const uint64_t blocks_worth = tensor.numel / kThreads + (tensor.numel % kThreads != 0);
  const auto run = detail ? launch<&strided_detail, StridedTensor, Workspace*, StampedRow*, uint64_t>
                          : launch<&strided_kernel, StridedTensor, Workspace*, StampedRow*, uint64_t>;
  return run(blocks_worth, stream, tensor, static_cast<Workspace*>(workspace), slots, stamp);
}

const Error kNotReady = cudaErrorNotReady;

Error query(Stream stream) { return taken(cudaStreamQuery(stream)); }  // "not ready" is among what CUDA keeps
const char* error_name(Error error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }
const char* error_text(Error error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace overflowstat::cuda
