// Names for Python, nothing else.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "compiled.h"
#include "cpu/count.h"
#include "frame_log.h"
#include "hook.h"
#include "recorder.h"

namespace py = pybind11;

namespace {

using overflowstat::Call;
using overflowstat::Content;
using overflowstat::Detail;
using overflowstat::FrameLog;
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

// (abs_min, abs_max, finite_abs_max, nan_count, posinf_count, neginf_count, first_bad), and with detail (...,
// zero_count, subnormal_count, abs_min_nonzero): the fields of overflowstat.row.Row. Magnitudes are ints where the
// format is one, since int64 does not fit a double.
py::object to_row(const Reading::Entry& entry) {
  if (!entry.missing.empty()) return py::str(entry.missing);
  return overflowstat::with_format(entry.format, [&entry, row = as_seen(entry)](auto f) -> py::object {
    using F = decltype(f);
    const auto magnitude = [](uint64_t key, bool there) -> py::object {
      if (!there) return py::float_(std::numeric_limits<double>::quiet_NaN());
      if (F::kIsInteger) return py::int_(key);
      return py::float_(F::value(static_cast<typename F::Key>(key)));
    };
    const bool has_inf = row.posinf_count + row.neginf_count > 0;
    const bool has_bad = has_inf || row.nan_count > 0;
    const uint64_t abs_max = has_inf ? F::kFirstNonFinite : row.finite_abs_max;
    const py::tuple found =
        py::make_tuple(magnitude(row.abs_min, overflowstat::has_magnitude<F>(row)),
                       magnitude(abs_max, overflowstat::has_magnitude<F>(row)),
                       magnitude(row.finite_abs_max, overflowstat::has_finite<F>(row)), row.nan_count, row.posinf_count,
                       row.neginf_count, has_bad ? py::object(py::int_(row.first_bad)) : py::object(py::none()));
    if (!entry.detail) return found;
    const Detail& detail = *entry.detail;
    return found + py::make_tuple(detail.zero_count * entry.repeat, detail.subnormal_count * entry.repeat,
                                  magnitude(detail.abs_min_nonzero, overflowstat::has_nonzero<F>(entry.row, detail)));
  });
}

// Throws std::invalid_argument for a tensor that cannot be read, before any launch.
std::shared_ptr<Reading> record(const std::vector<at::Tensor>& tensors, bool detail) {
  std::vector<overflowstat::Readable> readable(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string reason = overflowstat::describe(tensors[i], readable[i]);
    if (!reason.empty()) throw std::invalid_argument(reason);
  }
  return overflowstat::record(std::move(readable), detail);
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

// A str; or (row, sizes, strides, dtype), the row being a str that says why there is none, if so; or
// (overflowstat.measurement.Measurement, position).
py::object to_content(const Content& content) {
  if (const auto* word = std::get_if<const char*>(&content)) return py::str(*word);
  if (const auto* other = std::get_if<overflowstat::ReadByPython>(&content)) {
    return py::make_tuple(other->measurement, other->position);
  }
  overflowstat::Measured& measured = *std::get<std::shared_ptr<overflowstat::Measured>>(content);
  const auto tuple = [](const overflowstat::Measured::Dimensions& numbers) {
    py::tuple found(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) found[i] = numbers[i];
    return found;
  };
  const auto dtype =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(measured.dtype())));
  return py::make_tuple(to_row(measured.entry()), tuple(measured.sizes()), tuple(measured.strides()), dtype);
}

// (batch number, module, whether it starts the batch, whether it is a recompute, calls, [(label, content, whether it is
// judged, kinds that it may hold)]); waits for what is not there yet.
py::tuple to_frame(const FrameLog& log, const Call& call) {
  py::list lines;
  for (const auto& [label, content, is_judged, allowed] : call.lines) {
    lines.append(py::make_tuple(log.label(label), to_content(content), is_judged, allowed));
  }
  return py::make_tuple(call.batch_number, call.module, call.starts_batch, call.is_recompute, call.calls,
                        std::move(lines));
}

py::dict counters(const FrameLog& log) {
  const overflowstat::Cost& cost = log.cost();
  py::dict found;
  found["frames"] = log.calls();
  found["tensors"] = cost.tensors;
  found["bytes_read"] = cost.bytes_read;
  found["bytes_reused"] = cost.bytes_reused;
  found["launches"] = cost.launches;
  found["syncs"] = cost.waits;
  return found;
}

// For each threshold how many elements of a tensor have that magnitude or more, as often as they are seen; None where
// its memory cannot be counted as it is.
std::optional<std::vector<uint64_t>> count_at_least(const at::Tensor& tensor, const std::vector<double>& thresholds) {
  overflowstat::Readable readable;
  if (!overflowstat::describe(tensor, readable).empty() || !readable.device.is_cpu()) return std::nullopt;
  auto counts = overflowstat::cpu::count_at_least(readable.memory, thresholds);
  for (size_t i = 0; counts && i < counts->size(); ++i) (*counts)[i] *= readable.memory.layout.repeat;
  return counts;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::class_<Reading, std::shared_ptr<Reading>>(module, "Reading")
      .def("ready", &Reading::ready)
      .def("rows", &rows)
      .def("replays", &replays);
  module.def("record", &record, py::arg("tensors"), py::arg("detail") = false,
             py::call_guard<py::gil_scoped_release>());
  module.def("current_capture", &overflowstat::current_capture);

  module.def("make_hook", &overflowstat::make_hook);

  py::class_<Call, std::shared_ptr<Call>>(module, "Call")
      .def("replays", &Call::replays)
      .def("tensor", &Call::tensor)
      .def_readonly("thread", &Call::thread);
  py::class_<FrameLog>(module, "FrameLog")
      .def(py::init<int64_t, bool, double, bool, py::object, py::object, py::object, py::object>(), py::arg("keep"),
           py::arg("buffers"), py::arg("warn_at"), py::arg("detail"), py::arg("measure"), py::arg("works_on"),
           py::arg("capture"), py::arg("items"))
      .def("add_module", &FrameLog::add_module)
      .def("drop_module", &FrameLog::drop_module)
      .def("set_children", &FrameLog::set_children)
      .def("start_batch", &FrameLog::start_batch)
      .def("configure", &FrameLog::configure)
      .def("forget_weights", &FrameLog::forget_weights)
      .def("call", &FrameLog::call)
      .def("add", &FrameLog::add)
      .def("next", &FrameLog::next)
      .def("take_captured", &FrameLog::take_captured)
      .def("judge_captured", &FrameLog::judge_captured)
      .def("drop_batch", &FrameLog::drop_batch)
      .def("kept", [](const FrameLog& log) { return std::vector(log.kept().begin(), log.kept().end()); })
      .def("clear_kept", &FrameLog::clear_kept)
      .def("frame", &to_frame)
      .def("counters", &counters)
      .def_property_readonly("pending", &FrameLog::pending)
      .def_property_readonly("is_begun", &FrameLog::is_begun)
      .def_property_readonly("calls", &FrameLog::calls);
  module.def("calls_kept", &overflowstat::calls_kept);
  module.def("count_at_least", &count_at_least, py::arg("tensor"), py::arg("thresholds"),
             py::call_guard<py::gil_scoped_release>());
#ifdef OVERFLOWSTAT_WITH_CUDA
  module.attr("has_cuda") = true;
#else
  module.attr("has_cuda") = false;
#endif
}
