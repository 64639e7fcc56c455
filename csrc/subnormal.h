// Whether so much of a tensor is subnormal that it has lost precision as a whole. overflowstat/subnormal.py says why
// these shares, and finds the same tensors.
#pragma once

#include "reading.h"

namespace overflowstat {

constexpr double kLargeShare = 0.5;
constexpr double kFewestNumbers = 8;

inline bool is_mostly_subnormal(const Reading::Entry& entry) {
  if (!entry.detail || entry.detail->subnormal_count == 0) return false;
  const auto numbers = static_cast<double>(entry.row.numel - entry.detail->zero_count - entry.row.nan_count);
  return numbers * static_cast<double>(entry.repeat) >= kFewestNumbers &&
         static_cast<double>(entry.detail->subnormal_count) >= kLargeShare * numbers;
}

}  // namespace overflowstat
