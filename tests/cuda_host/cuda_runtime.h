// Stands in for CUDA's header of this name: kernels, which run as fibers (tests/cuda_on_cpu), and their launches.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda/reduce.h"
#include "cuda_runtime_api.h"
#include "device.h"
#include "machine.h"

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

// Those of our kernels that fill two slots a tensor.
namespace overflowstat::cuda {
struct Workspace;
void dense_detail(TensorList list, Workspace* workspace, StampedRow* slots, uint64_t stamp);
void strided_detail(StridedTensor tensor, Workspace* workspace, StampedRow* slots, uint64_t stamp);
}  // namespace overflowstat::cuda

namespace fake_cuda {

// What a launch of each of our kernels works in.
template <class Workspace>
Launch describe(bool detail, const overflowstat::cuda::TensorList& list, Workspace* workspace,
                overflowstat::StampedRow* rows, uint64_t stamp) {
  const void* table = list.count > overflowstat::cuda::kInlineTensors ? list.table : nullptr;
  return {list.count, table, workspace, rows, stamp, list.count * overflowstat::slots_each(detail)};
}
template <class Workspace>
Launch describe(bool detail, const overflowstat::cuda::StridedTensor&, Workspace* workspace,
                overflowstat::StampedRow* row, uint64_t stamp) {
  return {0, nullptr, workspace, row, stamp, overflowstat::slots_each(detail)};
}

inline void run_block(dim3 grid, dim3 block, unsigned index, const std::function<void()>& body) {
  if (block.x == 1) {  // there is nobody to wait for, so that it needs no fiber
    gridDim = grid;
    blockIdx = {index, 0, 0};
    return body();
  }
  thread_local const cuda_on_cpu::Stacks stacks(block.x);
  cuda_on_cpu::run_one_block(grid, block, index, stacks, body);
}

}  // namespace fake_cuda

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return fake_cuda::occupancy(blocks);
}

// The arguments are copied at once, as CUDA does it.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  auto copies = std::make_shared<const std::tuple<std::decay_t<Parameters>...>>(arguments...);
  const std::function<void()> body = [kernel, copies] { std::apply(kernel, *copies); };
  const auto address = reinterpret_cast<const void*>(kernel);
  const bool detail = address == reinterpret_cast<const void*>(&overflowstat::cuda::dense_detail) ||
                      address == reinterpret_cast<const void*>(&overflowstat::cuda::strided_detail);
  return fake_cuda::launch(config->stream, fake_cuda::describe(detail, arguments...), config->gridDim.x,
                           [grid = config->gridDim, block = config->blockDim, body](unsigned index) {
                             fake_cuda::run_block(grid, block, index, body);
                           });
}
