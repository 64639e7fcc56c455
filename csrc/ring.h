// The ring: host memory that devices write finished rows to, so that nobody waits for a row unless it is wanted.
//
// A frame takes the next few rows and a stamp, the number that a launch writes behind each of them. The host knows that
// a row is done when the frame's stamp is there. Knows neither torch nor CUDA: what a device is doing it asks a
// callback.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "progress.h"
#include "stats_row.h"

namespace overflowstat {

// The rows of one frame. Thread-safe.
class Frame {
 public:
  Frame(StampedRow* rows, size_t count, uint64_t stamp, Poll poll)
      : rows_(rows), count_(count), stamp_(stamp), poll_(std::move(poll)) {}

  // Where the device writes, and what it writes behind each row.
  StampedRow* rows() const { return rows_; }
  uint64_t stamp() const { return stamp_; }
  size_t count() const { return count_; }

  // Whether every row is there, or none is to be expected any more. Never waits.
  bool ready() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    return lock.owns_lock() && (retired_ || all_arrived());  // else somebody waits for it just now
  }

  // What arrived: rows that had not when the device failed, or in time, are missing.
  struct Result {
    std::vector<std::pair<bool, StatsRow>> rows;  // (whether it arrived, row)
    std::string failure;                          // why some are missing, empty if none is
    bool timed_out = false;                       // they may still be written
  };

  // Waits until ready, but not beyond `limit` after the frame was begun: so that many frames of a device that does not
  // answer take no longer than one. Its rows in the ring are free for others afterwards. The same result each time;
  // `waits` is one more if this call had to wait.
  const Result& result(std::chrono::nanoseconds limit, uint64_t& waits) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!retired_) {
      waits += wait(limit);
      for (size_t i = 0; i < count_; ++i) {
        const bool there = has_arrived(i);
        result_.rows.emplace_back(there, there ? rows_[i].row : StatsRow{});
      }
      retired_ = true;
      poll_ = nullptr;
    }
    return result_;
  }

 private:
  bool has_arrived(size_t i) const { return __atomic_load_n(&rows_[i].stamp, __ATOMIC_ACQUIRE) == stamp_; }

  bool all_arrived() {
    while (arrived_ < count_ && has_arrived(arrived_)) ++arrived_;
    return arrived_ == count_;
  }

  // Whether there was something to wait for.
  bool wait(std::chrono::nanoseconds limit) {
    const auto left = std::max(std::chrono::nanoseconds::zero(), limit - (Clock::now() - begun_));
    Wait wait = wait_until([this] { return all_arrived(); }, poll_, left);
    result_.timed_out = wait.timed_out;
    // A device that has come to an end wrote its rows before: only now is a missing one known to be missing.
    if (all_arrived()) return wait.waited;
    result_.failure = wait.failure.empty() ? "the device finished without writing its rows" : std::move(wait.failure);
    return wait.waited;
  }

  using Clock = std::chrono::steady_clock;

  StampedRow* const rows_;
  const size_t count_;
  const uint64_t stamp_;
  const Clock::time_point begun_ = Clock::now();
  Poll poll_;
  std::mutex mutex_;
  size_t arrived_ = 0;  // rows before this one are there
  bool retired_ = false;
  Result result_;
};

// Deals out rows of a piece of memory that must outlive it and all its frames' launches. Thread-safe.
class Ring {
 public:
  // No wait is longer than `limit`.
  Ring(StampedRow* rows, size_t capacity, std::chrono::nanoseconds limit)
      : rows_(rows), capacity_(capacity), limit_(limit) {
    for (size_t i = 0; i < capacity; ++i) rows_[i].stamp = 0;
  }

  size_t capacity() const { return capacity_; }
  std::chrono::nanoseconds limit() const { return limit_; }

  // Times that a full ring had to be waited for.
  uint64_t waits() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waits_;
  }

  // A frame of 1 to capacity() rows side by side. Where there is no room the oldest frame is waited for and keeps what
  // it got itself: none is dropped. Null if that frame's rows do not come in time, since they could then be written at
  // any time: this ring has no more room, and says so from then on without a wait.
  std::shared_ptr<Frame> begin(size_t count, Poll poll) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (count == 0 || count > capacity_) throw std::invalid_argument("a frame has 1 to capacity rows");
    uint64_t position = end_;
    if (position % capacity_ + count > capacity_) position += capacity_ - position % capacity_;
    while (!frames_.empty() && position + count - frames_.front().position > capacity_) {
      const Frame::Result& oldest = frames_.front().frame->result(limit_, waits_);
      if (oldest.timed_out) return nullptr;
      frames_.pop_front();
    }
    end_ = position + count;
    // From 1: a row that was never written has the stamp 0.
    frames_.push_back(
        {position, std::make_shared<Frame>(rows_ + position % capacity_, count, ++stamp_, std::move(poll))});
    return frames_.back().frame;
  }

 private:
  struct Live {
    uint64_t position;  // of its first row, in rows dealt out since the start, skipped ones included
    std::shared_ptr<Frame> frame;
  };

  StampedRow* const rows_;
  const size_t capacity_;
  const std::chrono::nanoseconds limit_;
  mutable std::mutex mutex_;
  std::deque<Live> frames_;  // oldest first
  uint64_t end_ = 0, stamp_ = 0, waits_ = 0;
};

}  // namespace overflowstat
