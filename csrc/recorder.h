// Reads tensors: which device, which stream, which pass. The only place that knows torch as well as CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "number_format.h"
#include "stats_row.h"

namespace overflowstat {

std::optional<Format> format_of(at::ScalarType type);

struct Reading {
  Format format;
  StatsRow row;
};

// The rows of tensors on any mix of supported devices: one pass over each tensor's memory, one launch for all dense
// tensors of a CUDA device and one for each strided one, and one wait per CUDA device in all. Needs no GIL.
// Throws std::invalid_argument for a tensor that cannot be read (dtype, layout, device, storage), before any launch;
// std::runtime_error where CUDA fails.
std::vector<Reading> read(const std::vector<at::Tensor>& tensors);

}  // namespace overflowstat
