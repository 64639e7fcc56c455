// The walk over what a hook is given, in C++; overflowstat/capture.py defines it.
#pragma once

#include <c10/util/SmallVector.h>
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

// The names that values are shown under, as numbers: a text is made when a name is met for the first time.
class Labels {
 public:
  // `input[i]`, or `output`, `output[i]`, `output[i][j]`.
  struct Path {
    uint32_t label;
    std::vector<std::unique_ptr<Path>> items;
  };

  Labels() : inputs_{add("input"), {}}, outputs_{add("output"), {}} {}

  Path& inputs() { return inputs_; }
  Path& outputs() { return outputs_; }
  Path& item(Path& path, size_t i) {
    while (path.items.size() <= i) {
      const std::string text = texts_[path.label] + "[" + std::to_string(path.items.size()) + "]";
      path.items.push_back(std::make_unique<Path>(Path{add(text), {}}));
    }
    return *path.items[i];
  }

  // `name` is a str. That which is met first is known by its address, and kept so that it stays its own; there may be
  // others of the same text, as many as a program makes.
  uint32_t of_weight(PyObject* name) {
    const auto found = by_address_.find(name);
    if (found != by_address_.end()) return found->second;
    const auto [known, is_new] = by_text_.try_emplace(pybind11::handle(name).cast<std::string>(), 0);
    if (is_new) {
      known->second = by_address_[name] = add(known->first);
      kept_.push_back(pybind11::reinterpret_borrow<pybind11::object>(name));
    }
    return known->second;
  }

  const std::string& text(uint32_t label) const { return texts_[label]; }

 private:
  uint32_t add(std::string text) {
    texts_.push_back(std::move(text));
    return static_cast<uint32_t>(texts_.size() - 1);
  }

  std::vector<std::string> texts_;
  std::unordered_map<PyObject*, uint32_t> by_address_;
  std::unordered_map<std::string, uint32_t> by_text_;
  std::vector<pybind11::object> kept_;
  Path inputs_, outputs_;
};

// Calls visit(label, value) for each value; tuples are opened to this depth, all else is one value.
template <class Visit>
void walk(PyObject* value, Labels& labels, Labels::Path& path, int depth, Visit& visit) {
  if (depth > 0 && PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      walk(PyTuple_GET_ITEM(value, i), labels, labels.item(path, static_cast<size_t>(i)), depth - 1, visit);
    }
  } else {
    visit(path.label, value);
  }
}

// The same for the parameters of a module, each once and its children's not among them. Borrowed: what visit() keeps
// is only there as long as the module has it.
template <class Visit>
void walk_weights(pybind11::handle module, Labels& labels, Visit& visit) {
  static PyObject* const attribute = PyUnicode_InternFromString("_parameters");
  const auto parameters = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(module.ptr(), attribute));
  if (!parameters) throw pybind11::error_already_set();
  c10::SmallVector<PyObject*, 8> met;
  const auto meet = [&](PyObject* name, PyObject* value) {
    if (value == Py_None || std::find(met.begin(), met.end(), value) != met.end()) return;
    met.push_back(value);
    visit(labels.of_weight(name), value);
  };
  if (PyDict_Check(parameters.ptr())) {
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(parameters.ptr(), &at, &name, &value);) meet(name, value);
  } else {  // of a ScriptModule
    for (const pybind11::handle item : parameters.attr("items")()) {
      const auto [name, value] = item.cast<std::pair<pybind11::object, pybind11::object>>();
      meet(name.ptr(), value.ptr());
    }
  }
}

}  // namespace overflowstat
