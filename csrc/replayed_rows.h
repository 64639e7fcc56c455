// Rows that a launch inside a CUDA graph writes anew whenever the graph is replayed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "progress.h"
#include "stats_row.h"

namespace overflowstat {

// The device counts its replays in the stamps (kNextStamp), which start at 0: the host does not see them launched.
// Thread-safe.
class ReplayedRows {
 public:
  // `rows` share in the memory that they lie in. `poll` asks for the stream that is current when it is called.
  ReplayedRows(std::shared_ptr<StampedRow> rows, size_t count, std::shared_ptr<const std::atomic<bool>> graph_is_gone,
               Poll poll)
      : rows_(std::move(rows)), count_(count), graph_is_gone_(std::move(graph_is_gone)), poll_(std::move(poll)) {}

  size_t count() const { return count_; }
  // Whether a replay has written it.
  bool is_written(size_t i) const { return stamp(i) > 0; }
  // As the last replay left it; to be read while none is running.
  const StatsRow& row(size_t i) const { return rows_.get()[i].row; }

  // Waits for what the current stream has to do.
  Wait wait(std::chrono::nanoseconds limit) const {
    return wait_until([] { return false; }, poll_, limit);
  }

  // How many replays have written all the rows.
  uint64_t replays() const {
    uint64_t fewest = ~uint64_t{0};
    for (size_t i = 0; i < count_; ++i) fewest = std::min(fewest, stamp(i));
    return fewest;
  }

  // Whether there will be no more of them.
  bool graph_is_gone() const { return *graph_is_gone_; }

 private:
  uint64_t stamp(size_t i) const { return __atomic_load_n(&rows_.get()[i].stamp, __ATOMIC_ACQUIRE); }

  const std::shared_ptr<StampedRow> rows_;
  const size_t count_;
  const std::shared_ptr<const std::atomic<bool>> graph_is_gone_;
  const Poll poll_;
};

}  // namespace overflowstat
