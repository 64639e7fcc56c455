// What reading some tensors gives: rows, now or later.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "number_format.h"
#include "replayed_rows.h"
#include "ring.h"
#include "stats_row.h"

namespace overflowstat {

// The rows of one call of record(), some of them on their way. Thread-safe; needs no GIL, and holds no tensor.
class Reading {
 public:
  struct Entry {
    Format format;
    int64_t repeat;  // how often a view meets each element (layout.h)
    bool negated;    // a view that shows its elements with the other sign
    StatsRow row;
    std::string missing;  // why there is no row, empty if there is
    std::optional<Detail> detail;
  };

  explicit Reading(std::vector<Entry> entries) : entries_(std::move(entries)) {}

  // Entries whose rows a device writes, in order, each with slots_each(detail) slots.
  void add(std::shared_ptr<Frame> frame, std::vector<size_t> entries, uint64_t launches, bool detail) {
    launches_ += launches;
    awaited_.push_back({std::move(frame), std::move(entries), detail});
  }
  void add(std::shared_ptr<ReplayedRows> rows, const std::vector<size_t>& entries, uint64_t launches, bool detail) {
    launches_ += launches;
    replayed_places_.resize(entries_.size());
    for (size_t i = 0; i < entries.size(); ++i) {
      replayed_places_[entries[i]] = {rows.get(), i * slots_each(detail), detail};
    }
    replayed_.push_back(std::move(rows));
  }

  // Whether rows() would not wait.
  bool ready();
  // All entries; waits for those on a device until `limit` after they were launched. Those inside a CUDA graph are what
  // its last replay left, without a wait.
  std::vector<Entry> rows(std::chrono::nanoseconds limit);
  // One of these entries. Where they are all there it costs the same however many they are.
  Entry entry(size_t i, std::chrono::nanoseconds limit);

  struct Replays {
    uint64_t count;  // whole ones so far
    bool over;       // the graph is gone: there will be no more
    std::string failure;
  };
  // Nothing if this is not inside a CUDA graph, or else, after a wait for the current stream of its device, of `limit`
  // at most, how often that has been replayed.
  std::optional<Replays> replays(std::chrono::nanoseconds limit);
  // Whether it is inside of one. Never waits.
  bool is_replayed();

  // For the device, before it was there.
  void count_waits(uint64_t waits) { waits_ += waits; }

  // Launches that it took, and how often somebody had to wait for a device.
  uint64_t launches() const { return launches_; }
  uint64_t waits() const { return waits_; }

 private:
  void fetch(std::chrono::nanoseconds limit);
  Entry found(size_t i) const;

  struct Awaited {
    std::shared_ptr<Frame> frame;
    std::vector<size_t> entries;
    bool detail;
  };
  struct ReplayedPlace {
    const ReplayedRows* rows = nullptr;
    size_t slot = 0;
    bool detail = false;
  };
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<Awaited> awaited_;
  std::vector<std::shared_ptr<ReplayedRows>> replayed_;
  std::vector<ReplayedPlace> replayed_places_;  // of each entry; none at all outside of a graph
  uint64_t launches_ = 0;
  std::atomic<uint64_t> waits_{0};
};

// No wait for a device is longer: it may be busy with the forward of a large model, and not for ever.
constexpr std::chrono::minutes kLongestWait{10};

}  // namespace overflowstat
