// How many elements of a tensor in host memory reach some magnitudes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "reduce.h"

namespace overflowstat::cpu {

// For each of `thresholds` the elements whose magnitude is that or more, infinities among them and no NaN, without
// layout.repeat. One read of memory for all thresholds, on torch's threads where the tensor is large enough to pay for
// them; keys are compared, and no numbers. Nothing where the format is not one of real floating point, or the layout is
// not dense.
std::optional<std::vector<uint64_t>> count_at_least(const Tensor& tensor, const std::vector<double>& thresholds);

}  // namespace overflowstat::cpu
