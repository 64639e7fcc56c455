#include "recorder.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "reduce.h"

namespace overflowstat::cuda {
namespace {

void check(Error error, const char* doing) {
  if (error != 0) {
    throw std::runtime_error(std::string("overflowstat: CUDA error while ") + doing + ": " + error_name(error) + " (" +
                             error_text(error) + ")");
  }
}

// What the launches of one device work in, kept between calls and grown on demand. Sharing it is safe because read()
// holds a lock until the device has finished.
struct DeviceState {
  at::Tensor workspace;  // device memory, zero between launches
  at::Tensor pinned;     // host memory that the device reads descriptors from and writes rows to

  void reserve(size_t tensors, c10::DeviceIndex device) {
    const auto bytes = static_cast<int64_t>(workspace_bytes(tensors));
    if (!workspace.defined() || workspace.numel() < bytes) {
      workspace = at::zeros({2 * bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA, device));
    }
    const auto host_bytes = static_cast<int64_t>(tensors * (sizeof(DenseTensor) + sizeof(StatsRow)));
    if (!pinned.defined() || pinned.numel() < host_bytes) {
      pinned = at::empty({2 * host_bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    }
  }
};

struct Pending {
  Stream stream;
  std::vector<const Source*> sources;  // in the order of their rows
  const StatsRow* rows;
};

StridedTensor strided_descriptor(const Source& source) {
  StridedTensor tensor{};
  tensor.data = source.data;
  tensor.numel = source.layout->count;
  tensor.format = source.format;
  tensor.rank = static_cast<int32_t>(source.layout->dimensions.size());
  for (int32_t d = 0; d < tensor.rank; ++d) {
    tensor.sizes[d] = source.layout->dimensions[d].size;
    tensor.strides[d] = source.layout->dimensions[d].stride;
  }
  return tensor;
}

Pending launch(DeviceState& state, c10::DeviceIndex device, std::vector<const Source*> sources) {
  const c10::cuda::CUDAGuard guard(device);
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    throw std::runtime_error("overflowstat: tensors are not read while a CUDA graph is captured");
  }
  const Stream stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const auto strided_begin =
      std::stable_partition(sources.begin(), sources.end(), [](const Source* s) { return s->layout->is_dense(); });
  const size_t dense_count = strided_begin - sources.begin();

  state.reserve(sources.size(), device);
  auto* rows = static_cast<StatsRow*>(state.pinned.data_ptr());
  auto* dense = reinterpret_cast<DenseTensor*>(rows + sources.size());
  for (size_t i = 0; i < dense_count; ++i) {
    const Source& source = *sources[i];
    dense[i] = {source.data, static_cast<uint64_t>(source.layout->count), source.format, 0};
  }
  if (dense_count > 0) {
    const uint64_t chunks = plan_chunks(dense, dense_count);
    check(launch_dense(dense, dense_count, chunks, state.workspace.data_ptr(), rows, stream), "launching the pass");
  }
  for (size_t i = dense_count; i < sources.size(); ++i) {
    check(launch_strided(strided_descriptor(*sources[i]), state.workspace.data_ptr(), rows + i, stream),
          "launching the strided pass");
  }
  return {stream, std::move(sources), rows};
}

}  // namespace

void read(const std::vector<Source>& sources) {
  // Not destroyed, since CUDA may be gone before static destructors run.
  static auto& mutex = *new std::mutex;
  static auto& states = *new std::map<c10::DeviceIndex, DeviceState>;
  const std::lock_guard<std::mutex> lock(mutex);

  std::map<c10::DeviceIndex, std::vector<const Source*>> by_device;
  for (const Source& source : sources) by_device[source.device].push_back(&source);

  try {
    std::vector<Pending> pending;
    for (auto& [device, list] : by_device) pending.push_back(launch(states[device], device, std::move(list)));
    for (const Pending& done : pending) {
      check(wait(done.stream), "waiting for the pass");
      for (size_t i = 0; i < done.sources.size(); ++i) *done.sources[i]->row = done.rows[i];
    }
  } catch (...) {
    states.clear();  // a workspace that a launch has left half done is of no use to the next
    throw;
  }
}

}  // namespace overflowstat::cuda
