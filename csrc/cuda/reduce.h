// Launches of the pass on a CUDA device. Plain C++ in, CUDA error codes out; nothing here allocates, copies or waits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../number_format.h"
#include "../stats_row.h"

struct CUstream_st;

namespace overflowstat::cuda {

using Stream = CUstream_st*;  // a cudaStream_t, without CUDA's headers
using Error = int;            // a cudaError_t; 0 is success

// A tensor that is dense in memory. 24 bytes, so that a long list stays cheap to send.
struct DenseTensor {
  const void* data;
  uint64_t numel;
  Format format;
  uint32_t first_chunk;  // chunks of the tensors before it in the list; set by plan_chunks
};

// A tensor that is not: read where it is, by its dimensions in memory order (layout.h). torch allows 64 of them.
constexpr int kMaxDimensions = 64;
struct StridedTensor {
  const void* data;
  uint64_t numel;
  Format format;
  int32_t rank;
  int64_t sizes[kMaxDimensions];
  int64_t strides[kMaxDimensions];  // in elements
};

// Fills in first_chunk; returns the chunks of the whole list, which launch_dense refuses from 2**32 on: 256 TiB.
uint64_t plan_chunks(DenseTensor* tensors, size_t count);

// Bytes of device memory that a launch over `count` tensors works in. All zero before the first launch that uses it
// and all zero again after each; two launches may share it if they are ordered (one stream).
size_t workspace_bytes(size_t count);

// rows[i] is the row of tensors[i]. `tensors` and `rows` may be device memory or pinned host memory; both must live
// until the launch is done. `total_chunks` is what plan_chunks returned.
Error launch_dense(const DenseTensor* tensors, size_t count, uint64_t total_chunks, void* workspace, StatsRow* rows,
                   Stream stream);

// The row of one strided tensor; the descriptor travels in the kernel's arguments.
Error launch_strided(const StridedTensor& tensor, void* workspace, StatsRow* row, Stream stream);

Error wait(Stream stream);
const char* error_name(Error error);
const char* error_text(Error error);

}  // namespace overflowstat::cuda
