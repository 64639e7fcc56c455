// Streams, guards and memory as torch has them.

#include <string>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "c10/cuda/CUDAGraphsC10Utils.h"
#include "c10/cuda/CUDAGuard.h"
#include "c10/util/Exception.h"
#include "machine.h"

namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw c10::Error(std::string("CUDA error: ") + cudaGetErrorString(error) + "\nSome advice.");
}

thread_local c10::StreamId current_streams[fake_cuda::kDevices];

}  // namespace

namespace c10::cuda {

cudaStream_t CUDAStream::stream() const { return id_ == 0 ? nullptr : fake_cuda::stream(device_, id_); }

CUDAStream getCurrentCUDAStream(DeviceIndex device) {
  int current = device;
  if (device < 0) check(cudaGetDevice(&current));
  return {static_cast<DeviceIndex>(current), current_streams[current]};
}
void setCurrentCUDAStream(CUDAStream stream) { current_streams[stream.device_index()] = stream.id(); }

CUDAStream getStreamFromPool(bool high_priority, DeviceIndex device) {
  thread_local int dealt_out[fake_cuda::kDevices][2];
  return {device, 1 + 32 * high_priority + dealt_out[device][high_priority]++ % 32};
}

CUDAGuard::CUDAGuard(DeviceIndex device) {
  check(cudaGetDevice(&before_));
  if (device != before_) check(cudaSetDevice(device));
}
CUDAGuard::~CUDAGuard() {
  int now = 0;
  cudaGetDevice(&now);
  if (now != before_) cudaSetDevice(before_);
}

CUDAStreamGuard::CUDAStreamGuard(CUDAStream stream)
    : device_(stream.device_index()), before_(getCurrentCUDAStream(stream.device_index())) {
  setCurrentCUDAStream(stream);
}
CUDAStreamGuard::~CUDAStreamGuard() { setCurrentCUDAStream(before_); }

CUDAStreamCaptureModeGuard::CUDAStreamCaptureModeGuard(cudaStreamCaptureMode mode) : mode_(mode) {
  check(cudaThreadExchangeStreamCaptureMode(&mode_));
}
CUDAStreamCaptureModeGuard::~CUDAStreamCaptureModeGuard() { cudaThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace c10::cuda

namespace at {

struct Storage {
  void* data;
  size_t bytes;
  CUstream_st* stream;  // that it was allocated on, whose work alone may use it; null in pinned memory

  ~Storage() { stream ? fake_cuda::free_in_order(stream, data) : fake_cuda::free_pinned(data); }
};

namespace {

// Asks CUDA each time, as torch's allocators do where they have nothing that fits.
void* allocate_on(c10::cuda::CUDAStream stream, size_t bytes) {
  fake_cuda::count("torch: device memory");
  const c10::cuda::CUDAGuard guard(stream.device_index());
  void* data = nullptr;
  cudaError_t error = cudaSuccess;
  if (fake_cuda::is_captured(fake_cuda::stream(stream.device_index(), stream.id()))) {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    error = cudaMalloc(&data, bytes);
  } else {
    error = cudaMalloc(&data, bytes);
  }
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw c10::Error("CUDA out of memory. Tried to allocate " + std::to_string(bytes) + " bytes.");
  }
  check(error);
  return data;
}

}  // namespace

Tensor empty(std::initializer_list<int64_t> sizes, const TensorOptions& options) {
  const auto bytes = static_cast<size_t>(*sizes.begin());
  if (options.where()) {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(options.where()->index());
    CUstream_st* const queue = fake_cuda::stream(stream.device_index(), stream.id());
    return Tensor(std::shared_ptr<Storage>(new Storage{allocate_on(stream, bytes), bytes, queue}));
  }
  fake_cuda::count("torch: pinned memory");
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, bytes, cudaHostAllocDefault);
  check(error);
  return Tensor(std::shared_ptr<Storage>(new Storage{data, bytes, nullptr}));
}

Tensor zeros(std::initializer_list<int64_t> sizes, const TensorOptions& options) {
  Tensor tensor = empty(sizes, options);
  const c10::DeviceIndex device = options.where()->index();
  const c10::cuda::CUDAGuard guard(device);
  check(cudaMemsetAsync(tensor.data_ptr(), 0, tensor.numel(), c10::cuda::getCurrentCUDAStream(device).stream()));
  return tensor;
}

int64_t Tensor::numel() const { return static_cast<int64_t>(storage_->bytes); }
void* Tensor::data_ptr() const { return storage_->data; }

// Pinned memory to the device that this is on.
Tensor& Tensor::copy_(const Tensor& source, bool non_blocking) {
  if (!non_blocking) throw c10::Error("a copy that waits for a device");
  const auto device = static_cast<c10::DeviceIndex>(fake_cuda::device_of(storage_->stream));
  const c10::cuda::CUDAGuard guard(device);
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  check(cudaMemcpyAsync(data_ptr(), source.data_ptr(), storage_->bytes, cudaMemcpyHostToDevice, stream.stream()));
  fake_cuda::keep_with_last(fake_cuda::stream(device, stream.id()), source.storage_);
  return *this;
}

}  // namespace at
