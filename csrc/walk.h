// The walk over what a hook is given, in C++; overflowstat/capture.py defines it.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace overflowstat {

// By its type: objects may say of themselves what they like (mocks and proxies do), and nothing of theirs is run.
inline bool is_tensor(PyObject* object) {
  return object != Py_None && PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

// A str as UTF-8, with a code in place of what that does not have: overflowstat.capture.text.
inline std::string text_of(PyObject* name) {
  Py_ssize_t size = 0;
  if (const char* text = PyUnicode_AsUTF8AndSize(name, &size)) return {text, static_cast<size_t>(size)};
  PyErr_Clear();
  const auto bytes =
      pybind11::reinterpret_steal<pybind11::bytes>(PyUnicode_AsEncodedString(name, "utf-8", "backslashreplace"));
  if (!bytes) throw pybind11::error_already_set();
  return bytes;
}

// The names that values are shown under, as numbers: a text is made when a name is met for the first time.
class Labels {
 public:
  // A place in an input or output: `input[0]`, `output`, `output[1].keys[last]`.
  struct Path {
    uint32_t label;
    std::vector<std::unique_ptr<Path>> by_index;
    std::unordered_map<std::string, std::unique_ptr<Path>> by_suffix;
  };

  Labels() : inputs_{add("input"), {}, {}}, outputs_{add("output"), {}, {}}, children_{add(""), {}, {}} {}

  Path& inputs() { return inputs_; }
  Path& outputs() { return outputs_; }
  Path& children() { return children_; }
  Path& item(Path& path, size_t i) {
    while (path.by_index.size() <= i) {
      path.by_index.push_back(make(path, "[" + std::to_string(path.by_index.size()) + "]"));
    }
    return *path.by_index[i];
  }
  // Where keys are made anew in each call, those that are met later share a name, so that names do not grow without
  // end.
  Path& item(Path& path, const std::string& suffix) {
    const bool full = path.by_suffix.size() >= kMostSuffixes && path.by_suffix.count(suffix) == 0;
    std::unique_ptr<Path>& child = path.by_suffix[full ? "[...]" : suffix];
    if (child == nullptr) child = make(path, full ? "[...]" : suffix);
    return *child;
  }

  // `name` is a str. That which is met first is known by its address, and kept so that it stays its own; there may be
  // others of the same text, as many as a program makes.
  uint32_t of_weight(PyObject* name) {
    const auto found = by_address_.find(name);
    if (found != by_address_.end()) return found->second;
    const auto [known, is_new] = by_text_.try_emplace(text_of(name), 0);
    if (is_new) {
      known->second = by_address_[name] = add(known->first);
      kept_.push_back(pybind11::reinterpret_borrow<pybind11::object>(name));
    }
    return known->second;
  }

  // Of a part of what is shown under a label.
  uint32_t of_part(uint32_t label, const std::string& suffix) {
    return suffix.empty() ? label : of_text(texts_[label] + suffix);
  }

  uint32_t of_text(const std::string& text) {
    const auto [known, is_new] = by_text_.try_emplace(text, 0);
    if (is_new) known->second = add(text);
    return known->second;
  }

  const std::string& text(uint32_t label) const { return texts_[label]; }

 private:
  static constexpr size_t kMostSuffixes = 1000;

  std::unique_ptr<Path> make(const Path& parent, const std::string& suffix) {
    return std::make_unique<Path>(Path{add(texts_[parent.label] + suffix), {}, {}});
  }
  uint32_t add(std::string text) {
    texts_.push_back(std::move(text));
    return static_cast<uint32_t>(texts_.size() - 1);
  }

  std::vector<std::string> texts_;
  std::unordered_map<PyObject*, uint32_t> by_address_;
  std::unordered_map<std::string, uint32_t> by_text_;
  std::vector<pybind11::object> kept_;
  Path inputs_, outputs_, children_;
};

// Calls visit(label, value) for each value; tuples are opened to this depth, all else is one value.
template <class Visit>
void open_tuples(PyObject* value, Labels& labels, Labels::Path& path, int depth, Visit& visit) {
  if (depth > 0 && PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      open_tuples(PyTuple_GET_ITEM(value, i), labels, labels.item(path, static_cast<size_t>(i)), depth - 1, visit);
    }
  } else {
    visit(path.label, value);
  }
}

// As overflowstat/capture.py has them.
constexpr int kDeepest = 8, kMostValues = 1000;

// What is inside of one input or output. Tuples, lists and what is no structure are known here, all else is left to
// `items`, which is overflowstat.capture.items.
template <class Visit, class LeftOut>
class NestedWalk {
 public:
  NestedWalk(Labels& labels, pybind11::handle items, Visit& visit, LeftOut& left_out)
      : labels_(labels), items_(items), visit_(visit), left_out_(left_out) {}

  // The tensors; or the value itself if there is none.
  void values(PyObject* value, Labels::Path& path) {
    if (!tensors(value, path)) visit_(path.label, value);
  }
  // Returns whether there is any, or something was left out.
  bool tensors(PyObject* value, Labels::Path& path) {
    left_ = kMostValues;
    found_ = false;
    walk(value, path, 0);
    return found_;
  }

 private:
  void walk(PyObject* value, Labels::Path& path, int depth) {
    if (is_tensor(value)) {
      found_ = true;
      visit_(path.label, value);
    } else if (value == Py_None || PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value)) {
      return;
    } else if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
      if (PySequence_Fast_GET_SIZE(value) > 0 && is_too_deep(path, depth)) return;
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
        if (!enter(PySequence_Fast_GET_ITEM(value, i), labels_.item(path, static_cast<size_t>(i)), depth)) return;
      }
    } else {
      const pybind11::object inside = items_(pybind11::handle(value));
      if (inside.is_none() || pybind11::len(inside) == 0 || is_too_deep(path, depth)) return;
      for (const pybind11::handle item : inside) {
        const auto [suffix, child] = item.cast<std::pair<std::string, pybind11::object>>();
        if (!enter(child.ptr(), labels_.item(path, suffix), depth)) return;
      }
    }
  }
  bool is_too_deep(Labels::Path& path, int depth) {
    if (depth < kDeepest) return false;
    found_ = true;
    left_out_(path.label, "too deep");
    return true;
  }
  // False where no more is to be looked at.
  bool enter(PyObject* item, Labels::Path& path, int depth) {
    if (left_ == 0) return false;
    if (--left_ == 0) {
      found_ = true;
      left_out_(path.label, "too many");
      return false;
    }
    walk(item, path, depth + 1);
    return true;
  }

  Labels& labels_;
  const pybind11::handle items_;
  Visit& visit_;
  LeftOut& left_out_;
  int left_ = 0;
  bool found_ = false;
};

// Of a class of its own, which may answer in Python, or refuse to, also when it is asked for its device or layout.
inline bool is_of_python(const at::Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

// What a weight holds here: DeepSpeed's ZeRO-3 leaves a parameter without elements while it is not gathered, and keeps
// this process's part of it as its attribute `ds_tensor`.
inline pybind11::object held_here(PyObject* value) {
  static PyObject* const part = PyUnicode_InternFromString("ds_tensor");
  const auto weight = pybind11::reinterpret_borrow<pybind11::object>(value);
  if (!is_tensor(value)) return weight;
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (is_of_python(tensor) || tensor.numel() != 0) return weight;
  auto found = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(value, part));
  if (!found) PyErr_Clear();
  if (!found || !is_tensor(found.ptr())) return weight;
  return pybind11::module_::import("overflowstat.capture").attr("without_padding")(weight, found);
}

// The same for the weights of a module, each once and its children's not among them: visit(name, value), where the
// value is None for one that is not visible. `names` are those of overflowstat.capture.weight_names. Borrowed: what
// visit() keeps is only there as long as the module has it.
template <class Visit>
void walk_weights(pybind11::handle module, const std::vector<pybind11::object>& names, bool buffers, Visit visit) {
  namespace py = pybind11;
  static PyObject* const own = PyUnicode_InternFromString("__dict__");
  static PyObject* const groups[] = {PyUnicode_InternFromString("_parameters"), PyUnicode_InternFromString("_buffers")};
  static PyObject* const modules = PyUnicode_InternFromString("_modules");
  static PyObject* const parametrizations = PyUnicode_InternFromString("parametrizations");
  c10::SmallVector<PyObject*, 8> met;
  const auto meet = [&](PyObject* name, PyObject* value) {
    if (value == Py_None || std::find(met.begin(), met.end(), value) != met.end()) return;
    met.push_back(value);
    visit(name, held_here(value).ptr());
  };
  const auto attribute = [&](PyObject* name) {
    auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(module.ptr(), name));
    if (!found) throw py::error_already_set();
    return found;
  };
  const auto has = [](const py::object& members, PyObject* name) {
    const int found = PySequence_Contains(members.ptr(), name);
    if (found < 0) PyErr_Clear();  // of a container of the user's own
    return found == 1;
  };
  for (size_t group = 0; group < (buffers ? 2 : 1); ++group) {
    const py::object members = attribute(groups[group]);
    if (PyDict_Check(members.ptr())) {
      PyObject *name = nullptr, *value = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(members.ptr(), &at, &name, &value);) meet(name, value);
    } else {  // of a ScriptModule
      for (const py::handle item : members.attr("items")()) {
        const auto [name, value] = item.cast<std::pair<py::object, py::object>>();
        meet(name.ptr(), value.ptr());
      }
    }
    if (group > 0) continue;
    for (const py::object& name : names) {
      if (has(members, name.ptr())) continue;
      py::object value;
      for (PyObject* place : {own, groups[1]}) {
        const py::object there = attribute(place);
        if (!value && has(there, name.ptr())) value = there[name];
      }
      if (value && (value.is_none() || is_tensor(value.ptr()))) {
        meet(name.ptr(), value.ptr());
        continue;
      }
      const py::object children = attribute(modules);
      const bool is_parametrized = has(children, parametrizations) && has(children[parametrizations], name.ptr());
      if (!is_parametrized) visit(name.ptr(), Py_None);
    }
  }
}

}  // namespace overflowstat
