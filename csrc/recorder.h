// Reads tensors: which device, which stream, which pass. The only place that knows torch as well as CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "number_format.h"
#include "reading.h"

namespace overflowstat {

std::optional<Format> format_of(at::ScalarType type);

// Reads host tensors and launches the reading of all others: one pass over each tensor's memory, one launch for all
// dense tensors of a CUDA device and one for each strided one. Does not wait for a device, and may be called while a
// CUDA graph is captured, which then reads them in each replay. Needs no GIL.
// Throws std::invalid_argument for a tensor that cannot be read (dtype, layout, device, storage), before any launch;
// std::runtime_error where CUDA refuses.
std::shared_ptr<Reading> record(const std::vector<at::Tensor>& tensors);

}  // namespace overflowstat
