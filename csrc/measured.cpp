#include "measured.h"

#include <algorithm>
#include <utility>

namespace overflowstat {

Measured::Measured(const at::Tensor& tensor, const Readable& readable)
    : dtype_(tensor.scalar_type()),
      sizes_(tensor.sizes().begin(), tensor.sizes().end()),
      strides_(tensor.strides().begin(), tensor.strides().end()),
      bytes_(readable.memory.layout.count * element_size(readable.memory.format)),
      entry_{readable.memory.format, readable.memory.layout.repeat, readable.negated, StatsRow{}, ""} {}

const Reading::Entry& Measured::entry() {
  if (reading_ != nullptr) {
    entry_ = reading_->entry(position_, kLongestWait);
    if (!reading_->is_replayed()) reading_ = nullptr;
  }
  return entry_;
}

std::vector<std::shared_ptr<Measured>> measure(const std::vector<at::Tensor>& tensors, std::vector<Readable> readable,
                                               Cost& cost) {
  std::vector<std::shared_ptr<Measured>> measured;
  measured.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    measured.push_back(std::make_shared<Measured>(tensors[i], readable[i]));
    cost.bytes_read += measured[i]->bytes();
  }
  cost.tensors += tensors.size();
  if (std::all_of(readable.begin(), readable.end(), [](const Readable& r) { return r.device.is_cpu(); })) {
    c10::SmallVector<cpu::Tensor, 4> list;
    c10::SmallVector<StatsRow, 4> rows(tensors.size());
    for (Readable& r : readable) list.push_back(std::move(r.memory));
    cpu::reduce(list.data(), list.size(), rows.data());
    for (size_t i = 0; i < rows.size(); ++i) measured[i]->set_row(rows[i]);
  } else {
    const std::shared_ptr<Reading> reading = record(std::move(readable));
    cost.launches += reading->launches();
    for (size_t i = 0; i < measured.size(); ++i) measured[i]->set_reading(reading, i);
  }
  return measured;
}

}  // namespace overflowstat
