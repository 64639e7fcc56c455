// What the numbers of a row are worth, for Python.
#pragma once

#include <cstdint>

#include "number_format.h"
#include "stats_row.h"

extern "C" {

double key_value(uint32_t format, uint64_t key) {
  return overflowstat::with_format(static_cast<overflowstat::Format>(format), [=](auto f) {
    using F = decltype(f);
    return F::value(static_cast<typename F::Key>(key));
  });
}
int row_has_finite(uint32_t format, const overflowstat::StatsRow* row) {
  return overflowstat::with_format(static_cast<overflowstat::Format>(format),
                                   [=](auto f) { return overflowstat::has_finite<decltype(f)>(*row); });
}
int row_has_magnitude(uint32_t format, const overflowstat::StatsRow* row) {
  return overflowstat::with_format(static_cast<overflowstat::Format>(format),
                                   [=](auto f) { return overflowstat::has_magnitude<decltype(f)>(*row); });
}
int row_has_nonzero(uint32_t format, const overflowstat::StatsRow* row, const overflowstat::Detail* detail) {
  return overflowstat::with_format(static_cast<overflowstat::Format>(format),
                                   [=](auto f) { return overflowstat::has_nonzero<decltype(f)>(*row, *detail); });
}

}  // extern "C"
