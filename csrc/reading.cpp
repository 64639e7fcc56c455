#include "reading.h"

#include <algorithm>

namespace overflowstat {

bool Reading::ready() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;  // somebody waits for it just now
  return std::all_of(awaited_.begin(), awaited_.end(), [](const auto& part) { return part.rows->ready(); });
}

std::vector<Reading::Entry> Reading::rows(std::chrono::nanoseconds limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fetch(limit);
  return entries_;
}

Reading::Entry Reading::entry(size_t i, std::chrono::nanoseconds limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fetch(limit);
  return entries_[i];
}

bool Reading::is_replayed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !replayed_.empty();
}

void Reading::fetch(std::chrono::nanoseconds limit) {
  for (const auto& [frame, entries] : awaited_) {
    uint64_t waits = 0;
    const Frame::Result& result = frame->result(limit, waits);
    waits_ += waits;
    for (size_t i = 0; i < entries.size(); ++i) {
      Entry& entry = entries_[entries[i]];
      const auto& [arrived, row] = result.rows[i];
      if (arrived) {
        entry.row = row;
      } else {
        entry.missing = result.failure;
      }
    }
  }
  awaited_.clear();
  for (const auto& [rows, entries] : replayed_) {
    const bool there = rows->replays() > 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      entries_[entries[i]].row = rows->row(i);
      entries_[entries[i]].missing = there ? "" : "the CUDA graph that reads it has not been replayed";
    }
  }
}

std::optional<Reading::Replays> Reading::replays(std::chrono::nanoseconds limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (replayed_.empty()) return std::nullopt;
  Replays replays{~uint64_t{0}, false, ""};
  for (const auto& part : replayed_) {
    const bool over = part.rows->graph_is_gone();  // before the count, so that none comes after it
    Wait wait = part.rows->wait(limit);
    if (!wait.failure.empty()) replays.failure = std::move(wait.failure);
    replays.count = std::min(replays.count, part.rows->replays());
    replays.over = replays.over || over;
  }
  return replays;
}

}  // namespace overflowstat
