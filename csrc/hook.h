// The forward hook of a module as a Python object that is called without any Python in between.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>

#include "frame_log.h"

namespace overflowstat {

// hook(module, args, output) or hook(module, args, kwargs, output) calls log.call(), and look() if that is true; for
// another module than its own other(module). What it is in a copy of the module, deep or pickled, `copied` tells as
// __reduce__ does. `log` is the Python object of a FrameLog. Whoever asks for its name gets an AttributeError with the
// text `not_scripted`: torch.jit.script, that is.
pybind11::object make_hook(pybind11::object log, size_t number, pybind11::object module, pybind11::object look,
                           pybind11::object other, pybind11::object copied, pybind11::object not_scripted);

}  // namespace overflowstat
