// Operations that graphs of torch.compile call: overflowstat/compiled/operation.py puts them there.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "cpu/reduce.h"
#include "number_format.h"
#include "recorder.h"
#include "stats_row.h"

namespace {

using overflowstat::StatsRow;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
// Of no numbers: the identity of a maximum.
constexpr double kNone = -kInf;

using Extremes = std::array<double, 3>;

// As overflowstat/compiled/row.py has them of a tensor. Only magnitudes are known of what is finite.
template <class F>
Extremes extremes_of(const StatsRow& row) {
  if (row.nan_count > 0) return {kNan, kNan, kNan};
  const auto value = [](uint64_t key) { return static_cast<double>(F::value(static_cast<typename F::Key>(key))); };
  const double finite = overflowstat::has_finite<F>(row) ? value(row.finite_abs_max) : kNone;
  return {row.posinf_count > 0 ? kInf : finite, row.neginf_count > 0 ? kInf : finite,
          overflowstat::has_magnitude<F>(row) ? -value(row.abs_min) : kNone};
}

at::Tensor extremes(const at::Tensor& tensor) {
  overflowstat::Readable readable;
  const std::string reason = overflowstat::describe(tensor, readable);
  TORCH_CHECK(reason.empty(), "overflowstat::extremes_v1: ", reason);
  StatsRow row;
  overflowstat::cpu::reduce(&readable.memory, 1, &row);
  if (readable.negated) std::swap(row.posinf_count, row.neginf_count);
  const Extremes found =
      overflowstat::with_format(readable.memory.format, [&row](auto f) { return extremes_of<decltype(f)>(row); });
  at::Tensor result = at::empty({static_cast<int64_t>(found.size())}, at::kDouble);
  std::copy(found.begin(), found.end(), result.mutable_data_ptr<double>());
  return result;
}

at::Tensor extremes_meta(const at::Tensor&) {
  return at::empty({static_cast<int64_t>(Extremes{}.size())}, at::TensorOptions(at::kMeta).dtype(at::kDouble));
}

double largest(double a, double b) { return std::isnan(a) || b < a ? a : b; }

// Counts in row[0], puts the head behind that, and from `first` on merges maxima of one tensor after the other. Those
// for which there is no room are merged with the last.
void keep(at::TensorList maxima, at::IntArrayRef head, const at::Tensor& row, int64_t first) {
  TORCH_CHECK(row.is_contiguous() && row.scalar_type() == at::kDouble, "overflowstat::keep_v1: the row is not float64");
  double* const begin = row.mutable_data_ptr<double>();
  double* const end = begin + row.numel();
  TORCH_CHECK(static_cast<int64_t>(head.size()) < first && first <= row.numel(),
              "overflowstat::keep_v1: the row is too short");
  begin[0] += 1;
  std::transform(head.begin(), head.end(), begin + 1, [](int64_t number) { return static_cast<double>(number); });
  double* into = begin + first;
  for (const at::Tensor& of_tensor : maxima) {
    const int64_t count = of_tensor.numel();
    TORCH_CHECK(of_tensor.is_contiguous() && of_tensor.scalar_type() == at::kDouble && first + count <= row.numel(),
                "overflowstat::keep_v1: maxima are not float64, or more than a row has");
    const double* const given = of_tensor.const_data_ptr<double>();
    into = std::min(into, end - count);
    std::transform(given, given + count, into, into, largest);
    into += count;
  }
}

void keep_meta(at::TensorList, c10::SymIntArrayRef, const at::Tensor&, int64_t) {}

at::Tensor kept(at::TensorList maxima, at::IntArrayRef head, const at::Tensor& row, int64_t first) {
  at::Tensor result = row.clone();
  keep(maxima, head, result, first);
  return result;
}

at::Tensor kept_meta(at::TensorList, c10::SymIntArrayRef, const at::Tensor& row, int64_t) {
  return at::empty_like(row);
}

}  // namespace

// In the names are the versions of the schemas, since the caches of compiled code know an operation by its name.
TORCH_LIBRARY_FRAGMENT(overflowstat, library) {
  library.def("extremes_v1(Tensor tensor) -> Tensor");
  library.def("keep_v1(Tensor[] maxima, SymInt[] head, Tensor(a!) row, int first) -> ()");
  library.def("kept_v1(Tensor[] maxima, SymInt[] head, Tensor row, int first) -> Tensor");
}

TORCH_LIBRARY_IMPL(overflowstat, CPU, library) {
  library.impl("extremes_v1", extremes);
  library.impl("keep_v1", keep);
  library.impl("kept_v1", kept);
}

TORCH_LIBRARY_IMPL(overflowstat, Meta, library) {
  library.impl("extremes_v1", extremes_meta);
  library.impl("keep_v1", keep_meta);
  library.impl("kept_v1", kept_meta);
}
