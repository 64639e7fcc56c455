// Reads tensors: which device, which stream, which pass. The only place that knows torch as well as CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "number_format.h"
#include "ring.h"
#include "stats_row.h"

namespace overflowstat {

std::optional<Format> format_of(at::ScalarType type);

// The rows of one call of record(), some of them on their way. Thread-safe; needs no GIL, and holds no tensor.
class Reading {
 public:
  struct Entry {
    Format format;
    int64_t repeat;  // how often a view meets each element (layout.h)
    bool negated;    // a view that shows its elements with the other sign
    StatsRow row;
    std::string missing;  // why there is no row, empty if there is
  };

  explicit Reading(std::vector<Entry> entries) : entries_(std::move(entries)) {}

  void add(std::shared_ptr<Frame> frame, std::vector<size_t> entries) {
    awaited_.push_back({std::move(frame), std::move(entries)});
  }

  // Whether rows() would not wait.
  bool ready();
  // All entries; waits for those on a device, each device's for `limit` at most.
  const std::vector<Entry>& rows(std::chrono::nanoseconds limit);

 private:
  struct Awaited {
    std::shared_ptr<Frame> frame;
    std::vector<size_t> entries;  // that its rows are for, in order
  };
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<Awaited> awaited_;
};

// Reads host tensors and launches the reading of all others: one pass over each tensor's memory, one launch for all
// dense tensors of a CUDA device and one for each strided one. Does not wait for a device. Needs no GIL.
// Throws std::invalid_argument for a tensor that cannot be read (dtype, layout, device, storage), before any launch;
// std::runtime_error where CUDA refuses.
std::shared_ptr<Reading> record(const std::vector<at::Tensor>& tensors);

// No wait for a device is longer: it may be busy with the forward of a large model, and not for ever.
constexpr std::chrono::minutes kLongestWait{10};

}  // namespace overflowstat
