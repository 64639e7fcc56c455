// What one tensor's statistics are, and how those of two parts of a tensor make those of both.
#pragma once

#include <cstdint>

#include "number_format.h"

namespace overflowstat {

// Magnitudes are keys of the tensor's number format. A default row is that of no elements, and merge's identity.
struct StatsRow {
  uint64_t abs_min = ~uint64_t{0};  // over the elements that have a magnitude: all that are not NaN
  uint64_t finite_abs_max = 0;      // over the finite elements
  uint64_t nan_count = 0;
  uint64_t posinf_count = 0;
  uint64_t neginf_count = 0;
  uint64_t first_bad = ~uint64_t{0};  // memory-order index of the first element that is not finite (layout.h)
  uint64_t numel = 0;
};

// What is counted besides where a reader asks for detail. A default one is that of no elements, and merge's identity.
struct Detail {
  uint64_t abs_min_nonzero = ~uint64_t{0};  // as abs_min, zeros left out
  uint64_t zero_count = 0;
  uint64_t subnormal_count = 0;  // of the format itself; for complex numbers see number_format.h
};

// The kinds of numbers that are not finite, as overflowstat.row.NonFinite has them.
enum NonFinite : uint8_t { kNan = 1, kPosInf = 2, kNegInf = 4 };

// A row that is written behind the reader's back: first the row, then, once that is visible, the stamp, which is the
// number that the reader waits for. One cache line.
struct alignas(64) StampedRow {
  StatsRow row;
  uint64_t stamp = 0;  // no launch's
};
// In place of a stamp: one more than the row has. For a launch in a CUDA graph, which is the same in every replay.
constexpr uint64_t kNextStamp = 0;
static_assert(sizeof(StampedRow) == 64, "a row and its stamp share a cache line");

// How many of these a tensor takes. Its detail, for which there is no room beside the row, has the next one, with a
// stamp of its own, which comes first: a row that is there has its detail. What deals rows out, waits for them and
// counts their replays need not know that there is anything else.
OVERFLOWSTAT_HOST_DEVICE constexpr uint32_t slots_each(bool detail) { return detail ? 2 : 1; }
OVERFLOWSTAT_HOST_DEVICE inline StatsRow as_row(const Detail& detail) {
  StatsRow row;
  row.abs_min = detail.abs_min_nonzero;
  row.nan_count = detail.zero_count;
  row.posinf_count = detail.subnormal_count;
  return row;
}
inline Detail as_detail(const StatsRow& row) { return {row.abs_min, row.nan_count, row.posinf_count}; }

OVERFLOWSTAT_HOST_DEVICE inline StatsRow merge(const StatsRow& a, const StatsRow& b) {
  StatsRow both;
  both.abs_min = a.abs_min < b.abs_min ? a.abs_min : b.abs_min;
  both.finite_abs_max = a.finite_abs_max > b.finite_abs_max ? a.finite_abs_max : b.finite_abs_max;
  both.nan_count = a.nan_count + b.nan_count;
  both.posinf_count = a.posinf_count + b.posinf_count;
  both.neginf_count = a.neginf_count + b.neginf_count;
  both.first_bad = a.first_bad < b.first_bad ? a.first_bad : b.first_bad;
  both.numel = a.numel + b.numel;
  return both;
}

inline Detail merge(const Detail& a, const Detail& b) {
  return {a.abs_min_nonzero < b.abs_min_nonzero ? a.abs_min_nonzero : b.abs_min_nonzero, a.zero_count + b.zero_count,
          a.subnormal_count + b.subnormal_count};
}

// Counts one element that is not finite; extrema are the caller's.
template <class F>
OVERFLOWSTAT_HOST_DEVICE inline void count_non_finite(StatsRow& row, typename F::Element element, uint64_t index) {
  row.nan_count += F::is_nan(element);
  if (F::is_inf(element)) ++(F::is_negative(element) ? row.neginf_count : row.posinf_count);
  if (index < row.first_bad) row.first_bad = index;
}

// The largest magnitude follows from the row: infinity where one was counted, else the largest finite one.
// abs_min tells whether there is any magnitude at all, since every key of an element that has one is below
// kFirstNan; an integer always has one.
template <class F>
bool has_magnitude(const StatsRow& row) {
  return F::kIsInteger ? row.numel > 0 : row.abs_min < F::kFirstNan;
}
template <class F>
bool has_finite(const StatsRow& row) {
  return F::kIsInteger ? row.numel > 0 : row.abs_min < F::kFirstNonFinite;
}
template <class F>
bool has_nonzero(const StatsRow& row, const Detail& detail) {
  return F::kIsInteger ? row.numel > detail.zero_count : detail.abs_min_nonzero < F::kFirstNan;
}

}  // namespace overflowstat
