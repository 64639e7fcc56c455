#include "reading.h"

#include <algorithm>

namespace overflowstat {

bool Reading::ready() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;  // somebody waits for it just now
  return std::all_of(awaited_.begin(), awaited_.end(), [](const auto& part) { return part.frame->ready(); });
}

std::vector<Reading::Entry> Reading::rows(std::chrono::nanoseconds limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fetch(limit);
  std::vector<Entry> all;
  for (size_t i = 0; i < entries_.size(); ++i) all.push_back(found(i));
  return all;
}

Reading::Entry Reading::entry(size_t i, std::chrono::nanoseconds limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fetch(limit);
  return found(i);
}

bool Reading::is_replayed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !replayed_.empty();
}

void Reading::fetch(std::chrono::nanoseconds limit) {
  for (const auto& [frame, entries, detail] : awaited_) {
    uint64_t waits = 0;
    const Frame::Result& result = frame->result(limit, waits);
    waits_ += waits;
    for (size_t i = 0; i < entries.size(); ++i) {
      Entry& entry = entries_[entries[i]];
      const size_t slot = i * slots_each(detail);
      if (result.rows[slot].first) {  // after its detail
        entry.row = result.rows[slot].second;
        if (detail) entry.detail = as_detail(result.rows[slot + 1].second);
      } else {
        entry.missing = result.failure;
      }
    }
  }
  awaited_.clear();
}

Reading::Entry Reading::found(size_t i) const {
  Entry entry = entries_[i];
  if (replayed_places_.empty() || replayed_places_[i].rows == nullptr) return entry;
  const auto& [rows, slot, detail] = replayed_places_[i];
  if (rows->is_written(slot)) {  // after its detail
    entry.row = rows->row(slot);
    if (detail) entry.detail = as_detail(rows->row(slot + 1));
  } else {
    entry.missing = "the CUDA graph that reads it has not been replayed";
  }
  return entry;
}

std::optional<Reading::Replays> Reading::replays(std::chrono::nanoseconds limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (replayed_.empty()) return std::nullopt;
  Replays replays{~uint64_t{0}, false, ""};
  for (const auto& rows : replayed_) {
    const bool over = rows->graph_is_gone();  // before the count, so that none comes after it
    Wait wait = rows->wait(limit);
    if (!wait.failure.empty()) replays.failure = std::move(wait.failure);
    replays.count = std::min(replays.count, rows->replays());
    replays.over = replays.over || over;
  }
  return replays;
}

}  // namespace overflowstat
