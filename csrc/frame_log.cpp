#include "frame_log.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <exception>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "subnormal.h"

namespace py = pybind11;

namespace overflowstat {
namespace {

// Reading so much takes longer than giving the GIL away and getting it back.
constexpr int64_t kMuch = 1 << 18;

// Tensors that stand for others (of torch.func, of functionalization, of Python), or for zeros that are nowhere.
bool is_wrapped(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static constexpr c10::DispatchKeySet kWrappers{DispatchKey::Python,           DispatchKey::Functionalize,
                                                 DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                                 DispatchKey::ZeroTensor,       DispatchKey::BatchedNestedTensor};
  return tensor.key_set().has_any(kWrappers);
}

// Whether a tensor's numbers may be in others that it holds.
bool has_parts(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static constexpr c10::DispatchKeySet kTransformed{DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                                    DispatchKey::BatchedNestedTensor};
  return is_of_python(tensor) || tensor.key_set().has_any(kTransformed) || tensor.layout() != at::kStrided ||
         tensor.is_nested();
}

bool is_on_device(const at::Tensor& tensor) { return !is_of_python(tensor) && !tensor.is_cpu(); }
bool is_on_meta(const at::Tensor& tensor) { return !is_of_python(tensor) && tensor.is_meta(); }

}  // namespace

// The tensors of one call that have to be read, and the lines that show them.
struct FrameLog::CallTensors {
  UnreadList here;
  c10::SmallVector<std::pair<PyObject*, c10::SmallVector<size_t, 2>>, 4> shown_here;  // of each
  c10::SmallVector<std::pair<PyObject*, size_t>, 2> elsewhere;
  std::unordered_map<PyObject*, size_t> places;  // in shown_here, where those are many

  // The lines of one that is to be read here already; null if it is not.
  c10::SmallVector<size_t, 2>* find(PyObject* object) {
    if (shown_here.size() <= kFew) {
      const auto known = std::find_if(shown_here.begin(), shown_here.end(), [&](auto& s) { return s.first == object; });
      return known == shown_here.end() ? nullptr : &known->second;
    }
    for (size_t i = places.size(); i < shown_here.size(); ++i) places.emplace(shown_here[i].first, i);
    const auto known = places.find(object);
    return known == places.end() ? nullptr : &shown_here[known->second].second;
  }

  static constexpr size_t kFew = 16;
};

FrameLog::FrameLog(int64_t keep, bool buffers, double warn_at, bool detail, py::object measure, py::object works_on,
                   py::object capture, py::object items)
    : keep_(keep),
      buffers_(buffers),
      near_(warn_at),
      detail_(detail),
      measure_(std::move(measure)),
      works_on_(std::move(works_on)),
      capture_(std::move(capture)),
      items_(std::move(items)) {}

void FrameLog::add_module(const py::object& module, std::vector<py::object> weight_names, py::object rule) {
  const auto guard = lock();
  walk_weights(module, weight_names, buffers_, [&](PyObject*, PyObject* value) {
    uses_device_ = uses_device_ || (is_tensor(value) && is_on_device(THPVariable_Unpack(value)));
  });
  if (rule.is_none()) rule = {};
  modules_.push_back({py::weakref(module), std::move(weight_names), std::move(rule), {}, {}, false, {}});
}

void FrameLog::drop_module(size_t module) {
  const auto guard = lock();
  modules_[module] = {};
}

void FrameLog::set_children(size_t module, std::vector<std::pair<std::string, size_t>> children) {
  const auto guard = lock();
  modules_[module].children = std::move(children);
}

// Whoever waits for another thread lets that have the GIL.
std::unique_lock<std::recursive_mutex> FrameLog::lock() {
  std::unique_lock<std::recursive_mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    const py::gil_scoped_release release;
    lock.lock();
  }
  return lock;
}

void FrameLog::configure(bool is_watching, bool is_told, bool always_look, bool reuse) {
  const auto guard = lock();
  next_batch_ = {next_batch_.number, is_watching, is_told, always_look, reuse};
}

void FrameLog::start_batch(int64_t number, bool keep_weights) {
  const auto guard = lock();
  next_batch_.number = number;
  keeps_weights_ = keep_weights;
  is_begun_ = has_calls_ = false;
}

void FrameLog::use_batch(bool is_recompute) {
  if (is_recompute) return;
  batch_ = next_batch_;
  if (is_begun_) return;
  is_begun_ = true;
  has_weights_ = false;
  activations_.clear();
  if (!keeps_weights_) weights_.clear();
}

// What is read in a graph has no numbers elsewhere.
void FrameLog::use_graph(uint64_t graph) {
  if (graph_ == graph) return;
  graph_ = graph;
  has_weights_ = false;
  weights_.clear();
  activations_.clear();
}

bool FrameLog::works_on(const at::Device& device) {
  const size_t i = device.index();
  if (works_on_cuda_.size() <= i) works_on_cuda_.resize(i + 1);
  if (!works_on_cuda_[i]) {
    try {
      works_on_cuda_[i] = works_on_(py::reinterpret_steal<py::object>(THPDevice_New(device))).cast<bool>();
    } catch (const py::error_already_set&) {
      return false;  // it cannot be told now; measure() says why
    }
  }
  return *works_on_cuda_[i];
}

bool FrameLog::can_read(PyObject* object, const at::Tensor& tensor, Readable& readable) {
  if (!THPVariable_CheckExact(object) || is_wrapped(tensor) || !describe(tensor, readable).empty()) return false;
  return tensor.is_cpu() || works_on(tensor.device());
}

void FrameLog::add_unread(CallTensors& tensors, PyObject* object, size_t line) {
  if (auto* lines = tensors.find(object)) {
    lines->push_back(line);
    return;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (Readable readable; can_read(object, tensor, readable)) {
    tensors.here.push_back({tensor, std::move(readable), nullptr});
    tensors.shown_here.push_back({object, {line}});
  } else {
    tensors.elsewhere.emplace_back(object, line);
  }
}

// Calls visit(label, value) with the parts of a tensor that has no numbers itself, as overflowstat.capture.opened does,
// and left_out(label, word) in place of those that are not there.
template <class Visit, class LeftOut>
void FrameLog::open(uint32_t label, PyObject* value, int depth, Visit& visit, LeftOut& left_out) {
  if (!items_.is_none() && is_tensor(value) && depth < kDeepest && has_parts(THPVariable_Unpack(value))) {
    if (const py::object parts = items_(py::handle(value)); !parts.is_none()) {
      for (const py::handle item : parts) {
        const auto [suffix, part] = item.cast<std::pair<std::string, py::object>>();
        const uint32_t part_label = labels_.of_part(label, suffix);
        if (PyUnicode_Check(part.ptr())) {
          left_out(part_label, PyUnicode_AsUTF8(part.ptr()));  // a constant of capture.py, which stays
        } else {
          open(part_label, part.ptr(), depth + 1, visit, left_out);
        }
      }
      return;
    }
  }
  visit(label, value);
}

uint8_t FrameLog::rule(Module& module, uint32_t label) {
  if (!module.find_rule) return 0;
  if (module.rules.size() <= label) module.rules.resize(label + 1);
  if (!module.rules[label]) module.rules[label] = module.find_rule(labels_.text(label)).cast<uint8_t>();
  return *module.rules[label];
}

void FrameLog::measure(UnreadList& list) {
  int64_t bytes = 0;
  for (const auto& [tensor, readable, measured] : list) {
    const cpu::Tensor& memory = readable.memory;
    bytes += readable.device.is_cpu() ? memory.layout.count * element_size(memory.format) : kMuch;
  }
  std::optional<py::gil_scoped_release> release;
  if (bytes >= kMuch) release.emplace();
  overflowstat::measure(list, detail_, cost_);
}

void FrameLog::read_weights() {
  has_weights_ = true;
  UnreadList unread;
  std::unordered_set<const c10::TensorImpl*> met;  // tied ones are read once
  Module* owner = nullptr;
  const auto read = [&](uint32_t, PyObject* value) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (!met.insert(tensor.unsafeGetTensorImpl()).second) return;
    if (const auto known = weights_.find(tensor)) {
      cost_.bytes_reused += known->bytes();
      return;
    }
    // All others are looked at in their modules: they have no numbers yet, or could change unseen.
    if (Readable readable; Unchanged::can_know(tensor) && can_read(value, tensor, readable)) {
      unread.push_back({tensor, std::move(readable), nullptr});
    }
  };
  const auto leave_out = [](uint32_t, const char*) {};
  const auto visit = [&](PyObject* name, PyObject* value) {
    if (!is_tensor(value)) return;
    const uint32_t label = labels_.of_weight(name);
    if (owner->find_rule && rule(*owner, label) == kNotShown) return;
    // Parts of other kinds are made for each look, and would not be known again.
    if (is_of_python(THPVariable_Unpack(value))) {
      open(label, value, 0, read, leave_out);
    } else {
      read(label, value);
    }
  };
  for (Module& module : modules_) {
    owner = &module;
    // Without buffers: running statistics are written to with no word to the version, and are read in their module.
    if (const py::object object = module.get()) walk_weights(object, module.weight_names, false, visit);
  }
  try {
    measure(unread);
    for (Unread& one : unread) weights_.insert(one.tensor, std::move(one.measured));
  } catch (const std::exception& error) {
    // Then each is read in its module, one by one where it has to be, and what fails there says why.
    py::module_::import("overflowstat.errors")
        .attr("warn_user")(std::string("the weights are read module by module, since not together: ") + error.what());
  }
}

void FrameLog::read(CallTensors& tensors, uint64_t graph, Call& call) {
  auto& elsewhere = tensors.elsewhere;
  if (!tensors.here.empty()) {
    try {
      measure(tensors.here);
      for (size_t i = 0; i < tensors.here.size(); ++i) {
        auto& [tensor, readable, measured] = tensors.here[i];
        for (const size_t line : tensors.shown_here[i].second) call.lines[line].content = measured;
        if (batch_.reuse) activations_.insert(tensor, measured);
      }
    } catch (const std::exception&) {
      for (const auto& [object, lines] : tensors.shown_here) {
        for (const size_t line : lines) elsewhere.emplace_back(object, line);
      }
    }
  }
  if (elsewhere.empty()) return;
  py::list list;
  for (const auto& [object, line] : elsewhere) list.append(py::reinterpret_borrow<py::object>(object));
  const py::object measurement = measure_(list, graph == 0 ? py::object(py::none()) : py::object(py::int_(graph)));
  for (size_t i = 0; i < elsewhere.size(); ++i) call.lines[elsewhere[i].second].content = ReadByPython{measurement, i};
  cost_.tensors += elsewhere.size();
}

// Keeps a call of which walk(call, visit, left_out) shows all but the weights.
template <class Walk>
bool FrameLog::keep_call(size_t module, py::handle object, int64_t calls, Walk walk) {
  const auto guard = lock();
  const bool is_recompute = torch::autograd::get_current_graph_task_id() != -1;
  use_batch(is_recompute);
  if (!batch_.is_watching) return false;
  const auto call = std::make_shared<Call>(
      Call{batch_.number, module, false, is_recompute, batch_.is_told, PyThread_get_thread_ident(), {}, calls});
  // Held, since a structure may have made it for the walk.
  c10::SmallVector<std::pair<py::object, size_t>, 8> tensors;
  bool is_judged = true;
  const auto show = [&](uint32_t label, PyObject* value) {
    const uint8_t allowed = rule(modules_[module], label);
    if (allowed == kNotShown) return;
    if (is_tensor(value)) {
      tensors.emplace_back(py::reinterpret_borrow<py::object>(value), call->lines.size());
      uses_device_ = uses_device_ || is_on_device(THPVariable_Unpack(value));
    }
    call->lines.push_back({label, value == Py_None ? "None" : "not a tensor", is_judged, allowed});
  };
  const auto left_out = [&](uint32_t label, const char* word) {
    const uint8_t allowed = rule(modules_[module], label);
    if (allowed != kNotShown) call->lines.push_back({label, word, is_judged, allowed});
  };
  const auto visit = [&](uint32_t label, PyObject* value) { open(label, value, 0, show, left_out); };
  const auto visit_weight = [&](uint32_t label, PyObject* value) {
    value == Py_None ? left_out(label, "not visible") : visit(label, value);
  };
  modules_[module].was_called = true;
  walk_weights(object, modules_[module].weight_names, buffers_,
               [&](PyObject* name, PyObject* value) { visit_weight(labels_.of_weight(name), value); });
  is_judged = false;  // what may be used nowhere
  for (const auto& [name, number] : modules_[module].children) {
    const Module& child = modules_[number];
    const py::object child_object = child.was_called ? py::object() : child.get();
    if (!child_object) continue;
    Labels::Path& path = labels_.item(labels_.children(), name);
    walk_weights(child_object, child.weight_names, buffers_, [&](PyObject* weight, PyObject* value) {
      visit_weight(labels_.item(path, "." + text_of(weight)).label, value);
    });
  }
  is_judged = true;
  const size_t weights = call->lines.size();
  walk(*call, visit, left_out);

  if (call->lines.empty() && modules_[module].find_rule) return false;  // nothing of it is to be shown
  const py::object capture = uses_device_ ? capture_() : py::none();
  const uint64_t graph = capture.is_none() ? 0 : capture.cast<uint64_t>();
  use_graph(graph);
  if (!has_weights_ && !is_recompute) read_weights();
  // What was read elsewhere was in memory.
  const bool was_read =
      call->lines.size() > weights && std::holds_alternative<ReadByPython>(call->lines.back().content);
  const bool is_real = was_read || std::any_of(tensors.begin(), tensors.end(), [&](const auto& shown) {
                         return shown.second >= weights && !is_on_meta(THPVariable_Unpack(shown.first.ptr()));
                       });
  CallTensors unread;
  for (const auto& [object, line] : tensors) {
    PyObject* value = object.ptr();
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (line < weights && is_real && is_on_meta(tensor)) {
      call->lines[line].content = "offloaded";
      continue;
    }
    std::shared_ptr<Measured> known;
    if (line < weights) {
      known = weights_.find(tensor);
    } else if (batch_.reuse && (known = activations_.find(tensor)) != nullptr) {
      cost_.bytes_reused += known->bytes();
    }
    if (known != nullptr) {
      call->lines[line].content = std::move(known);
    } else {
      add_unread(unread, value, line);
    }
  }
  read(unread, graph, *call);

  if (graph != 0) {
    captured_.emplace_back(graph, call);
    return true;
  }
  call->starts_batch = !has_calls_ && !is_recompute;
  has_calls_ = has_calls_ || !is_recompute;
  calls_ += calls;
  queue_.push_back(call);
  while (!queue_.empty() && queue_.front()->ready() && !queue_.front()->is_told && !queue_.front()->is_bad() &&
         !is_notable(*queue_.front())) {
    keep(std::move(queue_.front()));
    queue_.pop_front();
  }
  return !queue_.empty() && (batch_.always_look || queue_.front()->ready() || call->is_known_bad());
}

bool FrameLog::call(size_t module, py::handle object, py::handle args, py::handle kwargs, py::handle output) {
  return keep_call(module, object, 1, [&](Call&, auto& visit, auto& left_out) {
    if (items_.is_none()) {
      open_tuples(args.ptr(), labels_, labels_.inputs(), 1, visit);
      open_tuples(output.ptr(), labels_, labels_.outputs(), 2, visit);
    } else {
      NestedWalk nested(labels_, items_, visit, left_out);
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args.ptr()); ++i) {
        nested.values(PyTuple_GET_ITEM(args.ptr(), i), labels_.item(labels_.inputs(), static_cast<size_t>(i)));
      }
      PyObject *name = nullptr, *value = nullptr;
      for (Py_ssize_t at = 0; kwargs && PyDict_Next(kwargs.ptr(), &at, &name, &value);) {
        nested.tensors(value, labels_.item(labels_.inputs(), "[" + text_of(name) + "]"));
      }
      nested.values(output.ptr(), labels_.outputs());
    }
  });
}

bool FrameLog::add(size_t module, py::handle object, const std::vector<std::string>& labels, const py::object& read,
                   int64_t calls) {
  return keep_call(module, object, calls, [&](Call& call, auto&, auto&) {
    for (size_t i = 0; i < labels.size(); ++i) {
      const uint32_t label = labels_.of_text(labels[i]);
      const uint8_t allowed = rule(modules_[module], label);
      if (allowed != kNotShown) call.lines.push_back({label, ReadByPython{read, i}, true, allowed});
    }
  });
}

void FrameLog::keep(std::shared_ptr<Call> call) {
  kept_.push_back(std::move(call));
  if (keep_ >= 0 && static_cast<int64_t>(kept_.size()) > keep_) kept_.pop_front();
}

uint8_t FrameLog::notable(const Content& content) {
  bool near = false, subnormal = false;
  if (const auto* measured = std::get_if<std::shared_ptr<Measured>>(&content)) {
    const Reading::Entry& entry = (*measured)->entry();
    near = near_(entry.format, entry.row.finite_abs_max);
    subnormal = detail_ && is_mostly_subnormal(entry);
  } else if (const auto* other = std::get_if<ReadByPython>(&content)) {
    const py::object& measurement = other->measurement;
    near = near_.is_asked() && measurement.attr("is_near")(other->position, near_.share()).cast<bool>();
    subnormal = detail_ && measurement.attr("is_mostly_subnormal")(other->position).cast<bool>();
  }
  return near * kNearLimit | subnormal * kMostlySubnormal;
}

// Calls visit(label, kinds) with the lines that are of kinds of Notable as which they were not given before.
template <class Visit>
void FrameLog::for_each_notable(const Call& call, Visit visit) {
  if (!near_.is_asked() && !detail_) return;
  const std::vector<uint8_t>& told = modules_[call.module].told;
  for (const Line& line : call.lines) {
    if (!line.is_judged || line.allowed != 0) continue;
    const uint8_t before = line.label < told.size() ? told[line.label] : 0;
    if (const uint8_t kinds = notable(line.content) & ~before) visit(line.label, kinds);
  }
}

bool FrameLog::is_notable(const Call& call) {
  bool found = false;
  for_each_notable(call, [&](uint32_t, uint8_t) { found = true; });
  return found;
}

std::shared_ptr<Call> FrameLog::next(bool wait) {
  const auto guard = lock();
  if (wait && !queue_.empty()) wait_for(*queue_.back());
  // It is bad, as is seen already: only what ran before it is still to be judged.
  wait = wait || (!queue_.empty() && queue_.back()->is_known_bad());
  while (!queue_.empty()) {
    const std::shared_ptr<Call> call = queue_.front();
    if (!call->ready()) {
      if (!wait) return nullptr;
      wait_for(*call);
    }
    queue_.pop_front();
    keep(call);
    call->tell_of_missing();
    const bool bad = call->is_bad();
    bool is_new = false;
    if (!bad) {
      for_each_notable(*call, [&, &told = modules_[call->module].told](uint32_t label, uint8_t kinds) {
        if (told.size() <= label) told.resize(label + 1);
        told[label] |= kinds;
        is_new = true;
      });
    }
    if (call->is_told || bad || is_new) return call;
  }
  return nullptr;
}

std::optional<std::pair<uint64_t, std::shared_ptr<Call>>> FrameLog::take_captured() {
  const auto guard = lock();
  if (captured_.empty()) return std::nullopt;
  auto first = std::move(captured_.front());
  captured_.pop_front();
  return first;
}

std::shared_ptr<Call> FrameLog::judge_captured(const Call& call, int64_t batch_number, bool starts_batch) {
  const auto guard = lock();
  const auto judged = std::make_shared<Call>(call);
  judged->batch_number = batch_number;
  judged->starts_batch = starts_batch;
  for (Line& line : judged->lines) {
    if (auto* measured = std::get_if<std::shared_ptr<Measured>>(&line.content)) {
      *measured = std::make_shared<Measured>(**measured);
      (*measured)->finish();
    }
  }
  keep(judged);
  return judged;
}

void FrameLog::drop_batch(int64_t number) {
  const auto guard = lock();
  queue_.erase(std::remove_if(queue_.begin(), queue_.end(), [=](const auto& c) { return c->batch_number == number; }),
               queue_.end());
}

}  // namespace overflowstat
