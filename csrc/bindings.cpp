// Names for Python, nothing else.
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <vector>

#include "recorder.h"

namespace py = pybind11;

namespace {

// (abs_min, abs_max, finite_abs_max, nan_count, posinf_count, neginf_count, first_bad): the fields of
// overflowstat.recorder.Row. Magnitudes are ints where the format is one, since int64 does not fit a double.
py::tuple to_row(const overflowstat::Reading& reading) {
  return overflowstat::with_format(reading.format, [&row = reading.row](auto f) {
    using F = decltype(f);
    const auto magnitude = [](uint64_t key, bool there) -> py::object {
      if (!there) return py::float_(std::numeric_limits<double>::quiet_NaN());
      if (F::kIsInteger) return py::int_(key);
      return py::float_(F::value(static_cast<typename F::Key>(key)));
    };
    const bool has_inf = row.posinf_count + row.neginf_count > 0;
    const bool has_bad = has_inf || row.nan_count > 0;
    return py::make_tuple(
        magnitude(row.abs_min, overflowstat::has_magnitude<F>(row)),
        magnitude(has_inf ? F::kFirstNonFinite : row.finite_abs_max, overflowstat::has_magnitude<F>(row)),
        magnitude(row.finite_abs_max, overflowstat::has_finite<F>(row)), row.nan_count, row.posinf_count,
        row.neginf_count, has_bad ? py::object(py::int_(row.first_bad)) : py::object(py::none()));
  });
}

py::list read_rows(const std::vector<at::Tensor>& tensors) {
  std::vector<overflowstat::Reading> readings;
  {
    const py::gil_scoped_release release;
    readings = overflowstat::read(tensors);
  }
  py::list rows;
  for (const auto& reading : readings) rows.append(to_row(reading));
  return rows;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def("read", &read_rows, py::arg("tensors"));
#ifdef OVERFLOWSTAT_WITH_CUDA
  module.attr("has_cuda") = true;
#else
  module.attr("has_cuda") = false;
#endif
}
