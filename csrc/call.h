// One module call: what it showed, and the numbers of that, which may be on their way.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>

#include "measured.h"

namespace overflowstat {

// A tensor that Python reads, since it is none that can be read here: a place in an
// overflowstat.measurement.Measurement.
struct ReadByPython {
  pybind11::object measurement;
  size_t position;
};

// What a line shows: a word for what is no tensor, or a tensor's numbers.
using Content = std::variant<const char*, std::shared_ptr<Measured>, ReadByPython>;

struct Line {
  uint32_t label;
  Content content;
  bool is_judged = true;  // whether it makes its call bad
  uint8_t allowed = 0;    // kinds of NonFinite by which it does not
};

// One module call. Needs the GIL.
struct Call {
  int64_t batch_number;
  size_t module;  // its place in the list of modules
  bool starts_batch;
  bool is_recompute;     // in a backward: a forward that activation checkpointing runs once more
  bool is_told;          // it is to be shown whatever it holds
  unsigned long thread;  // on which it ran, as threading.get_ident has it
  c10::SmallVector<Line, 6> lines;
  int64_t calls = 1;  // that are merged in it, by a compiled program

  bool ready() const;
  // May wait.
  bool is_bad() const;
  // Whether some number that is there is bad, whatever is still on its way. Never waits.
  bool is_known_bad() const;
  // Until all numbers are there. Gives how often a device had to be waited for.
  uint64_t wait() const;
  // Warns where numbers are missing that no device will bring any more. May wait.
  void tell_of_missing() const;
  // The tensor of a line; None if it is gone or has changed. Never waits.
  pybind11::object tensor(size_t line) const;
  // As overflowstat.recorder.Replays; None if nothing of it is read inside a CUDA graph. May wait.
  pybind11::object replays() const;
};

}  // namespace overflowstat
