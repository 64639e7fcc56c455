// A tensor as it was read: its row, now or later, and what the row needs to be understood without the tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "reading.h"
#include "recorder.h"
#include "tensor_state.h"

namespace overflowstat {

// Keeps no tensor. Not thread-safe.
class Measured {
 public:
  using Dimensions = c10::SmallVector<int64_t, 4>;

  Measured(const at::Tensor& tensor, const Readable& readable);

  // Exactly one of these gives it its row: at once, or the entry of a reading.
  void set_row(const StatsRow& row) { entry_.row = row; }
  void set_detail(const Detail& detail) { entry_.detail = detail; }  // of a row that is set
  void set_reading(std::shared_ptr<Reading> reading, size_t entry) {
    reading_ = std::move(reading);
    position_ = entry;
  }

  // Whether it is of this tensor, as that still is.
  bool is_of(const at::Tensor& tensor) const {
    return state_.is(tensor) && tensor.scalar_type() == dtype_ && tensor.sizes() == at::IntArrayRef(sizes_) &&
           tensor.strides() == at::IntArrayRef(strides_);
  }
  bool is_gone() const { return state_.is_gone(); }
  // The tensor; undefined if it is gone or was written to since.
  at::Tensor tensor() const {
    at::Tensor tensor = state_.tensor();
    return tensor.defined() && is_of(tensor) ? tensor : at::Tensor();
  }

  at::ScalarType dtype() const { return dtype_; }
  const Dimensions& sizes() const { return sizes_; }
  const Dimensions& strides() const { return strides_; }
  // Of memory that was read.
  int64_t bytes() const { return bytes_; }

  // Null where the row is there.
  const std::shared_ptr<Reading>& reading() const { return reading_; }
  // Whether entry() would not wait.
  bool ready() const { return reading_ == nullptr || reading_->ready(); }
  // Waits for its row, for kLongestWait at most.
  const Reading::Entry& entry() {
    if (reading_ != nullptr) fetch();
    return entry_;
  }
  // Keeps the row that there is, whatever the reading finds later.
  void finish() {
    entry();
    reading_ = nullptr;
  }
  // Which kinds of NonFinite it holds.
  uint8_t non_finite() {
    const StatsRow& row = entry().row;
    if (row.first_bad == StatsRow{}.first_bad || !entry_.missing.empty()) return 0;
    const uint64_t positive = entry_.negated ? row.neginf_count : row.posinf_count;
    const uint64_t negative = entry_.negated ? row.posinf_count : row.neginf_count;
    return (row.nan_count > 0) * kNan | (positive > 0) * kPosInf | (negative > 0) * kNegInf;
  }

 private:
  void fetch();

  TensorState state_;
  at::ScalarType dtype_;
  Dimensions sizes_, strides_;
  int64_t bytes_;
  Reading::Entry entry_;
  std::shared_ptr<Reading> reading_;
  size_t position_ = 0;
};

// What it has cost.
struct Cost {
  uint64_t tensors = 0, bytes_read = 0, bytes_reused = 0, launches = 0, waits = 0;
};

// A tensor to be read, and what it was read as. Of the few that a module call has none is allocated on its own: the
// calls of small modules take less time than that would.
struct Unread {
  at::Tensor tensor;
  Readable readable;  // left undefined by measure()
  std::shared_ptr<Measured> measured;
};
using UnreadList = c10::SmallVector<Unread, 4>;

// Reads a list as record() does, and throws what it throws.
void measure(UnreadList& list, bool detail, Cost& cost);

}  // namespace overflowstat
