// A machine with CUDA devices that do nothing until a test lets them: work waits in its stream. It answers calls of the
// runtime as CUDA documents it, and notices what CUDA would punish later or without a word (memory of another device,
// memory that is gone, calls that end a capture): that is a *fault*, kept as text for the test to find.
//
// This is what the stand-ins for headers know of it; tests have control.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cuda_runtime_api.h"

namespace fake_cuda {

constexpr int kDevices = 4;
constexpr int kMultiprocessors = 3;  // of each device, each for one block at a time

// One of our launches. `count` and `table` are those of a list: 0 and null for a strided tensor.
struct Launch {
  uint64_t count;
  const void* table;
  const void* workspace;
  const void* rows;
  uint64_t stamp;
  uint64_t slots;
};
cudaError_t launch(cudaStream_t stream, const Launch& launch, unsigned blocks, std::function<void(unsigned)> run_block);
cudaError_t occupancy(int* blocks);

// Stream 0 is the device's default stream. Those beyond torch's are made by somebody who did not ask for
// cudaStreamNonBlocking: the default stream waits for them, so that it is of no use while one of them is captured.
constexpr int64_t kStreamsOfTorch = 64;
CUstream_st* stream(int device, int64_t id);
int device_of(const CUstream_st* stream);
bool is_captured(const CUstream_st* stream);
void count(const std::string& what);

// Keeps an object until what was put into the stream last is done; a graph keeps nothing.
void keep_with_last(CUstream_st* stream, std::shared_ptr<void> object);
// Once all that is in the stream now is done; with its graph if it is captured.
void free_in_order(CUstream_st* stream, void* memory);
void free_pinned(void* memory);

}  // namespace fake_cuda
