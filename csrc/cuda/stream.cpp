#include "stream.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <string>

#include "error.h"
#include "memory.h"

namespace overflowstat::cuda {

CaptureState capture_state(const c10::cuda::CUDAStream& stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  const cudaError_t error = taken(cudaStreamGetCaptureInfo(stream.stream(), &status, &id, &graph));
#else  // where that name is an older function's
  const cudaError_t error = taken(cudaStreamGetCaptureInfo_v2(stream.stream(), &status, &id, &graph));
#endif
  if (error != cudaSuccess) return {error, std::nullopt};
  switch (status) {
    case cudaStreamCaptureStatusNone: return {cudaSuccess, std::nullopt};
    case cudaStreamCaptureStatusInvalidated: return {cudaErrorStreamCaptureInvalidated, std::nullopt};
    default: return {cudaSuccess, Capture{id, graph}};
  }
}

std::optional<Capture> capture_of(const c10::cuda::CUDAStream& stream) {
  const CaptureState state = capture_state(stream);
  check(state.error, "asking whether a stream is captured");
  return state.capture;
}

namespace {

// CUDA's answers for a stream that cannot be asked, though what it had before the capture goes on: one whose capture
// has failed and not ended yet, and the default stream while one that it waits for is captured.
bool is_in_the_way(Error error) {
  return error == cudaErrorStreamCaptureInvalidated || error == cudaErrorStreamCaptureImplicit;
}

// What a device that has failed answers to anything is a reason for rows that are missing, not to lose the others.
std::pair<Progress, std::string> ask(const c10::cuda::CUDAStream& stream, Progress if_captured) {
  try {
    const c10::cuda::CUDAGuard guard(stream.device_index());
    // A query would spoil the capture of this stream, and without the guard also one of another thread's.
    const CaptureState state = capture_state(stream);
    if (state.capture || is_in_the_way(state.error)) return {if_captured, ""};
    if (state.error != cudaSuccess) return {Progress::kFailed, words(state.error)};
    const c10::cuda::CUDAStreamCaptureModeGuard allowed_anywhere(cudaStreamCaptureModeRelaxed);
    const Error error = query(stream.stream());
    if (error == kNotReady) return {Progress::kRunning, ""};
    return error == cudaSuccess ? std::pair(Progress::kFinished, std::string())
                                : std::pair(Progress::kFailed, words(error));
  } catch (const c10::Error& error) {
    return {Progress::kFailed, words(error)};
  }
}

}  // namespace

Poll poll_of(c10::cuda::CUDAStream stream) {
  return [stream] { return ask(stream, Progress::kRunning); };
}

Poll poll_of_current_stream(c10::DeviceIndex device) {
  return [device] { return ask(c10::cuda::getCurrentCUDAStream(device), Progress::kFinished); };
}

}  // namespace overflowstat::cuda
