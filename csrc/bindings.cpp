// Names for Python, nothing else.
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "recorder.h"

#ifdef OVERFLOWSTAT_WITH_CUDA
#include "cuda/recorder.h"
#endif

namespace py = pybind11;

namespace {

using overflowstat::Reading;
using overflowstat::StatsRow;

// A view that meets each element `repeat` times (they are the fastest in memory order), or with the other sign.
StatsRow as_seen(const Reading::Entry& entry) {
  StatsRow row = entry.row;
  row.nan_count *= entry.repeat;
  row.posinf_count *= entry.repeat;
  row.neginf_count *= entry.repeat;
  row.numel *= entry.repeat;
  row.first_bad *= entry.repeat;
  if (entry.negated) std::swap(row.posinf_count, row.neginf_count);
  return row;
}

// (abs_min, abs_max, finite_abs_max, nan_count, posinf_count, neginf_count, first_bad): the fields of
// overflowstat.row.Row. Magnitudes are ints where the format is one, since int64 does not fit a double.
py::object to_row(const Reading::Entry& entry) {
  if (!entry.missing.empty()) return py::str(entry.missing);
  return overflowstat::with_format(entry.format, [row = as_seen(entry)](auto f) -> py::object {
    using F = decltype(f);
    const auto magnitude = [](uint64_t key, bool there) -> py::object {
      if (!there) return py::float_(std::numeric_limits<double>::quiet_NaN());
      if (F::kIsInteger) return py::int_(key);
      return py::float_(F::value(static_cast<typename F::Key>(key)));
    };
    const bool has_inf = row.posinf_count + row.neginf_count > 0;
    const bool has_bad = has_inf || row.nan_count > 0;
    const uint64_t abs_max = has_inf ? F::kFirstNonFinite : row.finite_abs_max;
    return py::make_tuple(magnitude(row.abs_min, overflowstat::has_magnitude<F>(row)),
                          magnitude(abs_max, overflowstat::has_magnitude<F>(row)),
                          magnitude(row.finite_abs_max, overflowstat::has_finite<F>(row)), row.nan_count,
                          row.posinf_count, row.neginf_count,
                          has_bad ? py::object(py::int_(row.first_bad)) : py::object(py::none()));
  });
}

py::list rows(Reading& reading) {
  std::vector<Reading::Entry> entries;
  {
    const py::gil_scoped_release release;
    entries = reading.rows(overflowstat::kLongestWait);
  }
  py::list found;
  for (const Reading::Entry& entry : entries) found.append(to_row(entry));
  return found;
}

// None, or (whole replays so far, whether there will be no more, what failed while waiting or "").
py::object replays(Reading& reading) {
  std::optional<Reading::Replays> replays;
  {
    const py::gil_scoped_release release;
    replays = reading.replays(overflowstat::kLongestWait);
  }
  if (!replays) return py::none();
  return py::make_tuple(replays->count, replays->over, replays->failure);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::class_<Reading, std::shared_ptr<Reading>>(module, "Reading")
      .def("ready", &Reading::ready)
      .def("rows", &rows)
      .def("replays", &replays);
  module.def("record", &overflowstat::record, py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
#ifdef OVERFLOWSTAT_WITH_CUDA
  module.attr("has_cuda") = true;
  module.def("current_capture", &overflowstat::cuda::current_capture);
#else
  module.attr("has_cuda") = false;
#endif
}
