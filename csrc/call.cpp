#include "call.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace overflowstat {
namespace {

bool is_ready(const Line& line) {
  if (const auto* measured = std::get_if<std::shared_ptr<Measured>>(&line.content)) return (*measured)->ready();
  const auto* other = std::get_if<ReadByPython>(&line.content);
  return other == nullptr || other->measurement.attr("ready")().cast<bool>();
}

uint8_t non_finite(const Content& content) {
  if (const auto* measured = std::get_if<std::shared_ptr<Measured>>(&content)) return (*measured)->non_finite();
  const auto* other = std::get_if<ReadByPython>(&content);
  return other == nullptr ? 0 : other->measurement.attr("non_finite")(other->position).attr("value").cast<uint8_t>();
}

bool makes_bad(const Line& line) { return line.is_judged && (non_finite(line.content) & ~line.allowed) != 0; }

template <class Visit>
void for_each_tensor(const Call& call, Visit visit) {
  for (const Line& line : call.lines) {
    if (!std::holds_alternative<const char*>(line.content)) visit(line.content);
  }
}

}  // namespace

bool Call::ready() const { return std::all_of(lines.begin(), lines.end(), is_ready); }
bool Call::is_bad() const { return std::any_of(lines.begin(), lines.end(), makes_bad); }
bool Call::is_known_bad() const {
  return std::any_of(lines.begin(), lines.end(), [](const Line& line) { return is_ready(line) && makes_bad(line); });
}

py::object Call::replays() const {
  std::vector<Reading*> asked;
  py::object fewest = py::none();
  const auto take = [&](py::object found) {
    if (!found.is_none() && (fewest.is_none() || found < fewest)) fewest = std::move(found);
  };
  for_each_tensor(*this, [&](const Content& content) {
    const auto* measured = std::get_if<std::shared_ptr<Measured>>(&content);
    if (measured == nullptr) {
      take(std::get<ReadByPython>(content).measurement.attr("replays")());
      return;
    }
    Reading* reading = (*measured)->reading().get();
    if (reading == nullptr || std::find(asked.begin(), asked.end(), reading) != asked.end()) return;
    asked.push_back(reading);
    std::optional<Reading::Replays> replays;
    {
      const py::gil_scoped_release release;
      replays = reading->replays(kLongestWait);
    }
    if (replays) take(py::make_tuple(replays->count, replays->over, replays->failure));
  });
  return fewest;
}

// From the last on, which was launched last: when its row is there, so are the others of its stream.
uint64_t Call::wait() const {
  uint64_t waits = 0;
  for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
    if (const auto* other = std::get_if<ReadByPython>(&line->content); other != nullptr && !is_ready(*line)) {
      ++waits;
      other->measurement.attr("wait")();
    }
    const auto* measured = std::get_if<std::shared_ptr<Measured>>(&line->content);
    if (measured == nullptr || (*measured)->reading() == nullptr) continue;
    const std::shared_ptr<Reading> reading = (*measured)->reading();
    const uint64_t before = reading->waits();
    {
      const py::gil_scoped_release release;
      (*measured)->entry();
    }
    waits += reading->waits() - before;
  }
  return waits;
}

void Call::tell_of_missing() const {
  for (const Line& line : lines) {
    const auto* measured = std::get_if<std::shared_ptr<Measured>>(&line.content);
    if (measured == nullptr || (*measured)->entry().missing.empty()) continue;
    py::module_::import("overflowstat.measurement").attr("tell_of_missing")((*measured)->entry().missing);
    return;
  }
}

py::object Call::tensor(size_t line) const {
  const Content& content = lines[line].content;
  if (const auto* other = std::get_if<ReadByPython>(&content))
    return other->measurement.attr("tensor")(other->position);
  const auto* measured = std::get_if<std::shared_ptr<Measured>>(&content);
  const at::Tensor found = measured == nullptr ? at::Tensor() : (*measured)->tensor();
  return found.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(found)) : py::none();
}

}  // namespace overflowstat
