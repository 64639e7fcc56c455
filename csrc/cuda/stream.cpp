#include "stream.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "memory.h"
#include "reduce.h"

namespace overflowstat::cuda {

std::optional<Capture> capture_of(const c10::cuda::CUDAStream& stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(stream.stream(), &status, &id, &graph);
#else  // where that name is an older function's
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream.stream(), &status, &id, &graph);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  check(error, "asking whether a stream is captured");
  if (status != cudaStreamCaptureStatusActive) return std::nullopt;
  return Capture{id, graph};
}

namespace {

std::pair<Progress, std::string> ask(const c10::cuda::CUDAStream& stream, Progress if_captured) {
  const c10::cuda::CUDAGuard guard(stream.device_index());
  // A query would spoil the capture of this stream, and without the guard also one of another thread's.
  if (capture_of(stream)) return {if_captured, ""};
  const c10::cuda::CUDAStreamCaptureModeGuard allowed_anywhere(cudaStreamCaptureModeRelaxed);
  const Error error = query(stream.stream());
  if (error == 0) return {Progress::kFinished, ""};
  if (error == kNotReady) return {Progress::kRunning, ""};
  return {Progress::kFailed, words(error)};
}

}  // namespace

Poll poll_of(c10::cuda::CUDAStream stream) {
  return [stream] { return ask(stream, Progress::kRunning); };
}

Poll poll_of_current_stream(c10::DeviceIndex device) {
  return [device] { return ask(c10::cuda::getCurrentCUDAStream(device), Progress::kFinished); };
}

}  // namespace overflowstat::cuda
