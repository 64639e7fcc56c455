// The module calls of a run, kept as numbers: those that are not judged yet, and the last ones that were.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "call.h"
#include "measured.h"
#include "near.h"
#include "unchanged.h"
#include "walk.h"

namespace overflowstat {

constexpr uint8_t kNotShown = 0xff;

// What good numbers are told of for.
enum Notable : uint8_t { kNearLimit = 1, kMostlySubnormal = 2 };

// overflowstat/frame_log.py tells what it does. All methods need the GIL, which they release while they read much or
// wait.
class FrameLog {
 public:
  // `keep` calls are kept when they have been judged, all if it is negative; `buffers` are shown as weights are.
  // measure(tensors, graph) gives a Measurement of those that cannot be read here, works_on(device) tells whether the
  // extension can read there, capture() is that of overflowstat.recorder.Recorder, items is
  // overflowstat.capture.items, or None to see only positional arguments and tuples; `warn_at` is that of NearLimit,
  // `detail` that of record().
  FrameLog(int64_t keep, bool buffers, double warn_at, bool detail, pybind11::object measure, pybind11::object works_on,
           pybind11::object capture, pybind11::object items);

  // rule(label) is what a line of the module may hold, kinds of NonFinite, or kNotShown; None if that is nothing.
  void add_module(const pybind11::object& module, std::vector<pybind11::object> weight_names, pybind11::object rule);
  void drop_module(size_t module);
  void set_children(size_t module, std::vector<std::pair<std::string, size_t>> children);

  void start_batch(int64_t number, bool keep_weights);
  void configure(bool is_watching, bool is_told, bool always_look, bool reuse);
  void forget_weights() { weights_.clear(); }
  // Returns whether next() or take_captured() has something.
  // `kwargs` may be null.
  bool call(size_t module, pybind11::handle object, pybind11::handle args, pybind11::handle kwargs,
            pybind11::handle output);

  // `read` is an overflowstat.measurement.Measurement.
  bool add(size_t module, pybind11::handle object, const std::vector<std::string>& labels, const pybind11::object& read,
           int64_t calls);

  std::shared_ptr<Call> next(bool wait);
  std::optional<std::pair<uint64_t, std::shared_ptr<Call>>> take_captured();
  std::shared_ptr<Call> judge_captured(const Call& call, int64_t batch_number, bool starts_batch);
  void drop_batch(int64_t number);

  const std::deque<std::shared_ptr<Call>>& kept() const { return kept_; }
  void clear_kept() { kept_.clear(); }
  size_t pending() const { return queue_.size(); }
  // Whether this batch has any, watched or not.
  bool is_begun() const { return is_begun_; }
  uint64_t calls() const { return calls_; }
  const Cost& cost() const { return cost_; }
  const std::string& label(uint32_t label) const { return labels_.text(label); }

 private:
  struct CallTensors;

  struct Module {
    pybind11::weakref object;
    std::vector<pybind11::object> weight_names;
    pybind11::object find_rule;
    std::vector<std::optional<uint8_t>> rules;  // of each label, once it was asked for
    std::vector<std::pair<std::string, size_t>> children;
    bool was_called = false;
    std::vector<uint8_t> told;  // of each label, as what of Notable next() has given it

    // Null if it is gone or was dropped.
    pybind11::object get() const {
      pybind11::object found = object ? object() : pybind11::object();
      return found && found.is_none() ? pybind11::object() : found;
    }
  };

  // How the calls of a batch are treated.
  struct Batch {
    int64_t number = 0;
    bool is_watching = true, is_told = false, always_look = false, reuse = true;
  };

  std::unique_lock<std::recursive_mutex> lock();
  bool works_on(const at::Device& device);
  bool can_read(PyObject* object, const at::Tensor& tensor, Readable& readable);
  void add_unread(CallTensors& tensors, PyObject* object, size_t line);
  template <class Visit, class LeftOut>
  void open(uint32_t label, PyObject* value, int depth, Visit& visit, LeftOut& left_out);
  uint8_t rule(Module& module, uint32_t label);
  void measure(UnreadList& list);
  template <class Walk>
  bool keep_call(size_t module, pybind11::handle object, int64_t calls, Walk walk);
  void use_batch(bool is_recompute);
  void use_graph(uint64_t graph);
  void read_weights();
  void read(CallTensors& tensors, uint64_t graph, Call& call);
  void keep(std::shared_ptr<Call> call);
  uint8_t notable(const Content& content);
  template <class Visit>
  void for_each_notable(const Call& call, Visit visit);
  bool is_notable(const Call& call);
  void wait_for(const Call& call) { cost_.waits += call.wait(); }

  std::recursive_mutex mutex_;
  std::vector<Module> modules_;
  const int64_t keep_;
  const bool buffers_;
  const NearLimit near_;
  const bool detail_;
  const pybind11::object measure_, works_on_, capture_, items_;
  std::vector<std::optional<bool>> works_on_cuda_;  // for each device, once it was asked for

  Labels labels_;
  Unchanged weights_, activations_;  // that have been read in this batch
  uint64_t graph_ = 0;               // in which they were

  Batch batch_, next_batch_;  // the next one is begun by its first call, since recomputes belong to the last one
  bool keeps_weights_ = false, is_begun_ = false, has_weights_ = false, has_calls_ = false;
  bool uses_device_ = false;  // a model on the CPU alone is in no CUDA graph

  std::deque<std::shared_ptr<Call>> queue_, kept_;
  std::deque<std::pair<uint64_t, std::shared_ptr<Call>>> captured_;
  uint64_t calls_ = 0;
  Cost cost_;
};

}  // namespace overflowstat
