#include "memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "error.h"

namespace overflowstat::cuda {
namespace {

[[noreturn]] void throw_no_memory(const char* kind, size_t bytes, const std::string& what, const std::string& reason) {
  throw std::runtime_error(std::string("no ") + kind + " memory for " + what + ", " + std::to_string(bytes) +
                           " bytes: " + reason);
}

template <class Make>
at::Tensor allocated(const char* kind, size_t bytes, const std::string& what, Make make) {
  // torch asks CUDA for memory and about events without it, which ends a capture that another thread is in.
  const c10::cuda::CUDAStreamCaptureModeGuard allowed_anywhere(cudaStreamCaptureModeRelaxed);
  try {
    return make(static_cast<int64_t>(bytes));
  } catch (const c10::Error& error) {
    throw_no_memory(kind, bytes, what, words(error));
  }
}

at::TensorOptions bytes_on(at::Device device) { return at::TensorOptions().dtype(at::kByte).device(device); }

}  // namespace

std::string words(Error error) { return std::string(error_name(error)) + " (" + error_text(error) + ")"; }

std::string words(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

void check(Error error, const char* doing) {
  if (error != 0) throw std::runtime_error(std::string("CUDA error while ") + doing + ": " + words(error));
}

PinnedRows::PinnedRows(size_t count) : count_(count) {
  const c10::cuda::CUDAStreamCaptureModeGuard allowed_anywhere(cudaStreamCaptureModeRelaxed);
  const size_t bytes = count * sizeof(StampedRow);
  void* memory = nullptr;
  const cudaError_t error = taken(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable));
  if (error != cudaSuccess) throw_no_memory("pinned", bytes, std::to_string(count) + " rows", words(error));
  data_ = static_cast<StampedRow*>(memory);
  std::fill_n(data_, count, StampedRow{});
}

PinnedRows::~PinnedRows() { taken(cudaFreeHost(data_)); }

at::Tensor make_workspace(size_t tensors, at::Device device) {
  return allocated("device", workspace_bytes(tensors), "the rows of " + std::to_string(tensors) + " tensors",
                   [&](int64_t bytes) { return at::zeros({bytes}, bytes_on(device)); });
}

at::Tensor make_table(const std::vector<DenseTensor>& list, at::Device device) {
  const size_t bytes = list.size() * sizeof(DenseTensor);
  const std::string what = "a table of " + std::to_string(list.size()) + " tensors";
  // torch keeps pinned memory until what was copied from it has arrived.
  const at::Tensor source = allocated("pinned", bytes, what, [](int64_t n) {
    return at::empty({n}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  });
  memcpy(source.data_ptr(), list.data(), bytes);
  at::Tensor table = allocated("device", bytes, what, [&](int64_t n) { return at::empty({n}, bytes_on(device)); });
  table.copy_(source, /*non_blocking=*/true);
  return table;
}

void* StreamMemory::workspace(size_t tensors, const c10::cuda::CUDAStream& stream) {
  if (!workspace_.defined() || static_cast<size_t>(workspace_.numel()) < workspace_bytes(tensors)) {
    workspace_ = make_workspace(2 * tensors, stream.device());
  }
  return workspace_.data_ptr();
}

const DenseTensor* StreamMemory::table(const std::vector<DenseTensor>& list, const c10::cuda::CUDAStream& stream) {
  const auto known = std::find_if(tables_.begin(), tables_.end(), [&](const Table& table) {
    return list.size() == table.list.size() &&
           memcmp(list.data(), table.list.data(), list.size() * sizeof(DenseTensor)) == 0;
  });
  if (known == tables_.end()) {
    tables_.push_front({list, make_table(list, stream.device())});
    if (tables_.size() > kTables) tables_.pop_back();  // torch keeps its memory until the stream is done with it
  } else {
    std::rotate(tables_.begin(), known, known + 1);
  }
  return static_cast<const DenseTensor*>(tables_.front().on_device.data_ptr());
}

}  // namespace overflowstat::cuda
