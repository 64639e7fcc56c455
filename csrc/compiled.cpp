// Operations that graphs of torch.compile call: overflowstat/compiled/operation.py puts them there.
#include "compiled.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
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

// Ticks at each call that is kept, in the whole process: tells the order of calls in programs that know nothing of each
// other.
std::atomic<int64_t> kept_so_far{0};

// As overflowstat/compiled/row.py has it: one more call in the row of this number, of this site, and from `first_size`
// and `first_tensor` on its sizes, and maxima of one tensor after the other. Those for which there is no room are
// merged with the last.
void keep(const at::Tensor& rows, int64_t number, int64_t site, at::IntArrayRef sizes, at::TensorList maxima,
          int64_t first_size, int64_t first_tensor) {
  TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && rows.scalar_type() == at::kDouble && 0 <= number &&
                  number < rows.size(0),
              "overflowstat::keep_v2: the rows are not float64, or this is none of them");
  const int64_t length = rows.size(1), count_of_sizes = static_cast<int64_t>(sizes.size());
  TORCH_CHECK(3 <= first_size && first_size + count_of_sizes <= first_tensor && first_tensor <= length,
              "overflowstat::keep_v2: the row is too short");
  double* const begin = rows.mutable_data_ptr<double>() + number * length;
  double* const end = begin + length;
  begin[0] += 1;
  begin[1] = static_cast<double>(site);
  begin[2] = static_cast<double>(++kept_so_far);
  std::transform(sizes.begin(), sizes.end(), begin + first_size,
                 [](int64_t size) { return static_cast<double>(size); });
  double* into = begin + first_tensor;
  for (const at::Tensor& of_tensor : maxima) {
    const int64_t count = of_tensor.numel();
    TORCH_CHECK(of_tensor.is_contiguous() && of_tensor.scalar_type() == at::kDouble && first_tensor + count <= length,
                "overflowstat::keep_v2: maxima are not float64, or more than a row has");
    const double* const given = of_tensor.const_data_ptr<double>();
    into = std::min(into, end - count);
    std::transform(given, given + count, into, into, largest);
    into += count;
  }
}

void keep_meta(const at::Tensor&, int64_t, int64_t, c10::SymIntArrayRef, at::TensorList, int64_t, int64_t) {}

at::Tensor kept(const at::Tensor& rows, int64_t number, int64_t site, at::IntArrayRef sizes, at::TensorList maxima,
                int64_t first_size, int64_t first_tensor) {
  at::Tensor result = rows.clone();
  keep(result, number, site, sizes, maxima, first_size, first_tensor);
  return result;
}

at::Tensor kept_meta(const at::Tensor& rows, int64_t, int64_t, c10::SymIntArrayRef, at::TensorList, int64_t, int64_t) {
  return at::empty_like(rows);
}

}  // namespace

namespace overflowstat {

int64_t calls_kept() { return kept_so_far; }

}  // namespace overflowstat

// In the names are the versions of the schemas, since the caches of compiled code know an operation by its name.
TORCH_LIBRARY_FRAGMENT(overflowstat, library) {
  library.def("extremes_v1(Tensor tensor) -> Tensor");
  library.def(
      "keep_v2(Tensor(a!) rows, int number, int site, SymInt[] sizes, Tensor[] maxima, int first_size, "
      "int first_tensor) -> ()");
  library.def(
      "kept_v2(Tensor rows, int number, int site, SymInt[] sizes, Tensor[] maxima, int first_size, "
      "int first_tensor) -> Tensor");
}

TORCH_LIBRARY_IMPL(overflowstat, CPU, library) {
  library.impl("extremes_v1", extremes);
  library.impl("keep_v2", keep);
  library.impl("kept_v2", kept);
}

TORCH_LIBRARY_IMPL(overflowstat, Meta, library) {
  library.impl("extremes_v1", extremes_meta);
  library.impl("keep_v2", keep_meta);
  library.impl("kept_v2", kept_meta);
}
