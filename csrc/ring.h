// The ring: host memory that devices write finished rows to, so that nobody waits for a row unless it is wanted.
//
// A frame takes the next few rows, and a launch that writes each of them and then its stamp. The host knows a row is
// done when the frame's stamp is there. Knows neither torch nor CUDA; what a device is doing comes from a callback.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stats_row.h"

namespace overflowstat {

// One cache line. Whoever writes it writes the row, makes that visible to the host, then writes the stamp.
struct alignas(64) StampedRow {
  StatsRow row;
  uint64_t stamp;
};
static_assert(sizeof(StampedRow) == 64, "a row and its stamp share a cache line");

// The stamp of a row that this code writes in place of a device. Also how a host thread may stand in for one.
inline void write_stamped(StampedRow& slot, const StatsRow& row, uint64_t stamp) {
  slot.row = row;
  std::atomic_thread_fence(std::memory_order_release);
  __atomic_store_n(&slot.stamp, stamp, __ATOMIC_RELEASE);
}

enum class Progress {
  kRunning,   // there may still come something
  kFinished,  // all that was launched is done
  kFailed     // nothing will come any more
};

// What a frame's device is doing, and in words why it failed. Called while waiting, from any thread.
using Poll = std::function<std::pair<Progress, std::string>()>;

// The rows of one frame. Rows that have not arrived when its device failed are missing, and `failure` says why.
class Frame {
 public:
  Frame(StampedRow* slots, size_t count, uint64_t stamp, Poll poll)
      : slots_(slots), count_(count), stamp_(stamp), poll_(std::move(poll)) {}

  uint64_t stamp() const { return stamp_; }
  StampedRow* slots() const { return slots_; }

  // Whether every row is there, or none is to be expected any more. Never waits.
  bool ready() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return retired_ || all_arrived();
  }

  // Waits until ready, no longer than `limit`, and takes the rows out of the ring.
  void retire(std::chrono::nanoseconds limit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (retired_) return;
    wait(limit);
    rows_.resize(count_);
    arrived_.resize(count_);
    for (size_t i = 0; i < count_; ++i) {
      arrived_[i] = has_arrived(i);
      if (arrived_[i]) rows_[i] = slots_[i].row;
    }
    retired_ = true;
    poll_ = nullptr;
  }

  // After retire().
  bool arrived(size_t i) const { return arrived_[i]; }
  const StatsRow& row(size_t i) const { return rows_[i]; }
  const std::string& failure() const { return failure_; }
  size_t count() const { return count_; }
  bool waited() const { return waited_; }

 private:
  bool has_arrived(size_t i) const { return __atomic_load_n(&slots_[i].stamp, __ATOMIC_ACQUIRE) == stamp_; }

  bool all_arrived() {
    while (next_ < count_ && has_arrived(next_)) ++next_;
    return next_ == count_;
  }

  void wait(std::chrono::nanoseconds limit) {
    using Clock = std::chrono::steady_clock;
    if (all_arrived()) return;
    waited_ = true;
    const auto deadline = Clock::now() + limit;
    // A row is microseconds away or a whole forward: look often at first, then leave the core to others.
    for (int round = 0;; ++round) {
      if (all_arrived()) return;
      const auto [progress, reason] = poll_();
      // What is finished has stamped its rows before it finished.
      if (progress != Progress::kRunning) {
        if (all_arrived()) return;
        failure_ = progress == Progress::kFailed ? reason : "the device finished without having written its rows";
        return;
      }
      if (Clock::now() > deadline) {
        failure_ = "the device did not answer in time";
        return;
      }
      if (round < 1000) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  StampedRow* slots_;
  size_t count_;
  uint64_t stamp_;
  Poll poll_;
  std::mutex mutex_;
  size_t next_ = 0;  // first row that has not been seen to arrive
  bool waited_ = false, retired_ = false;
  std::vector<StatsRow> rows_;
  std::vector<char> arrived_;
  std::string failure_;
};

// Deals out rows of memory that outlives it, oldest frame first to be taken back. Thread-safe.
class Ring {
 public:
  // Frames begun on one device must be launched in the order in which they were begun.
  Ring(StampedRow* slots, size_t capacity, std::chrono::nanoseconds limit)
      : slots_(slots), capacity_(capacity), limit_(limit) {
    for (size_t i = 0; i < capacity; ++i) slots_[i].stamp = 0;
  }

  size_t capacity() const { return capacity_; }

  // A frame of `count` rows that lie side by side, 1 <= count <= capacity. Where there is no room the oldest frames are
  // waited for and keep their rows themselves from then on: none is dropped.
  std::shared_ptr<Frame> begin(size_t count, Poll poll) {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t first = head_;
    if (first + count > capacity_) first = 0;  // the rows up to the end stay unused this time round
    while (!frames_.empty() && overlaps_live(first, count)) {
      frames_.front()->retire(limit_);
      if (frames_.front()->waited()) ++waits_;
      frames_.pop_front();
    }
    head_ = first + count;
    frames_.push_back(std::make_shared<Frame>(slots_ + first, count, ++stamp_, std::move(poll)));
    return frames_.back();
  }

  std::chrono::nanoseconds limit() const { return limit_; }
  // Frames that had to be waited for because the ring was full.
  uint64_t waits() const { return waits_; }

 private:
  bool overlaps_live(size_t first, size_t count) const {
    for (const auto& frame : frames_) {
      const size_t begin = frame->slots() - slots_;
      if (first < begin + frame->count() && begin < first + count) return true;
    }
    return false;
  }

  StampedRow* slots_;
  size_t capacity_;
  std::chrono::nanoseconds limit_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Frame>> frames_;
  size_t head_ = 0;
  uint64_t stamp_ = 0, waits_ = 0;
};

}  // namespace overflowstat
