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

// A list of tensors after plan_chunks. A short one travels in the kernel's arguments, so that nothing has to outlive
// the call that launches it; a longer one is a table in device memory, which has to.
constexpr size_t kInlineTensors = 64;
struct TensorList {
  const DenseTensor* table;  // used where count > kInlineTensors
  uint64_t total_chunks;
  uint32_t count;
  DenseTensor inlined[kInlineTensors];
};

// Bytes of device memory that a launch which writes `slots` slots works in. All zero before the first launch that uses
// it and all zero again after each; two launches may share it if they are ordered (one stream).
size_t workspace_bytes(size_t slots);

// Each tensor has slots_each(detail) slots, in order: its row, and its detail. First what is in one, then, once the
// host can see that, `stamp` (or the next one, kNextStamp). `slots` may be device memory or pinned host memory and must
// live until the launch is done.
Error launch_dense(const TensorList& list, void* workspace, StampedRow* slots, uint64_t stamp, bool detail,
                   Stream stream);

// Those of one strided tensor; the descriptor travels in the kernel's arguments.
Error launch_strided(const StridedTensor& tensor, void* workspace, StampedRow* slots, uint64_t stamp, bool detail,
                     Stream stream);

// What has been launched on a stream: done, still running (kNotReady), or the error that ended it. Never waits.
Error query(Stream stream);
extern const Error kNotReady;
const char* error_name(Error error);
const char* error_text(Error error);

}  // namespace overflowstat::cuda
