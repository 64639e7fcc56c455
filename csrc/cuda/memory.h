// The memory that launches work in, and words for when there is none.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "../stats_row.h"
#include "reduce.h"

namespace overflowstat::cuda {

// An error of CUDA as people and search engines know it.
std::string words(Error error);
// One of torch's, without the advice that follows on further lines.
std::string words(const c10::Error& error);
// Throws std::runtime_error unless it is a success.
void check(Error error, const char* doing);

// Rows in pinned host memory, which every device can write to, with stamps of 0.
// Throws std::runtime_error that says how much was asked for. May be made while a graph is captured.
class PinnedRows {
 public:
  explicit PinnedRows(size_t count);
  ~PinnedRows();
  PinnedRows(const PinnedRows&) = delete;
  PinnedRows& operator=(const PinnedRows&) = delete;

  StampedRow* data() const { return data_; }
  size_t count() const { return count_; }

 private:
  StampedRow* data_;
  size_t count_;
};

// Device memory for launches over `tensors` tensors, all zero, and one that holds a list; ready on the current stream.
// Throw std::runtime_error that says how much was asked for.
at::Tensor make_workspace(size_t tensors, at::Device device);
at::Tensor make_table(const std::vector<DenseTensor>& list, at::Device device);

// What the launches on one stream work in. The stream orders them, so that they can share it.
class StreamMemory {
 public:
  void* workspace(size_t tensors, const c10::cuda::CUDAStream& stream);
  // Sent to the device only where it is none of the lists that were used last: from batch to batch the weights of a
  // model seldom move.
  const DenseTensor* table(const std::vector<DenseTensor>& list, const c10::cuda::CUDAStream& stream);

 private:
  struct Table {
    std::vector<DenseTensor> list;
    at::Tensor on_device;
  };
  static constexpr size_t kTables = 4;  // a few models' weights, or some long list beside them

  at::Tensor workspace_;
  std::deque<Table> tables_;  // that used last in front
};

}  // namespace overflowstat::cuda
