// Stands in for torch's header of this name.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "ATen/core/Tensor.h"

namespace at {
Tensor zeros(std::initializer_list<int64_t> sizes, const TensorOptions& options);
}
