// Reads tensors: which device, which stream, which pass. The only place that knows torch as well as CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/reduce.h"
#include "number_format.h"
#include "reading.h"

namespace overflowstat {

std::optional<Format> format_of(at::ScalarType type);

// A tensor whose memory can be read as it is.
struct Readable {
  cpu::Tensor memory;
  at::Device device = at::kCPU;
  bool negated = false;  // a view that shows its elements with the other sign
};

// Makes one of a tensor; or says why there is none (dtype, layout, device, storage), which leaves it undefined.
std::string describe(const at::Tensor& tensor, Readable& readable);

// Reads host tensors and launches the reading of all others: one pass over each tensor's memory, one launch for all
// dense tensors of a CUDA device and one for each strided one. Does not wait for a device, and may be called while a
// CUDA graph is captured, which then reads them in each replay. Needs no GIL.
// With `detail` the entries have theirs. Throws std::runtime_error where CUDA refuses.
std::shared_ptr<Reading> record(std::vector<Readable> tensors, bool detail);

// As cuda::current_capture; 0 where there is no CUDA.
uint64_t current_capture();

}  // namespace overflowstat
