#include "measured.h"

#include <algorithm>
#include <vector>

namespace overflowstat {

Measured::Measured(const at::Tensor& tensor, const Readable& readable)
    : state_(tensor),
      dtype_(tensor.scalar_type()),
      sizes_(tensor.sizes().begin(), tensor.sizes().end()),
      strides_(tensor.strides().begin(), tensor.strides().end()),
      bytes_(readable.memory.layout.count * element_size(readable.memory.format)),
      entry_{readable.memory.format, readable.memory.layout.repeat, readable.negated, StatsRow{}, "", std::nullopt} {}

void Measured::fetch() {
  entry_ = reading_->entry(position_, kLongestWait);
  if (!reading_->is_replayed()) reading_ = nullptr;
}

void measure(UnreadList& list, bool detail, Cost& cost) {
  for (Unread& one : list) {
    one.measured = std::make_shared<Measured>(one.tensor, one.readable);
    cost.bytes_read += one.measured->bytes();
  }
  cost.tensors += list.size();
  if (std::all_of(list.begin(), list.end(), [](const Unread& one) { return one.readable.device.is_cpu(); })) {
    c10::SmallVector<cpu::Tensor, 4> tensors;
    c10::SmallVector<StatsRow, 4> rows(list.size());
    for (Unread& one : list) tensors.push_back(std::move(one.readable.memory));
    c10::SmallVector<Detail, 4> details(detail ? list.size() : 0);
    cpu::reduce(tensors.data(), tensors.size(), rows.data(), detail ? details.data() : nullptr);
    for (size_t i = 0; i < rows.size(); ++i) list[i].measured->set_row(rows[i]);
    for (size_t i = 0; i < details.size(); ++i) list[i].measured->set_detail(details[i]);
  } else {
    std::vector<Readable> readable;
    for (Unread& one : list) readable.push_back(std::move(one.readable));
    const std::shared_ptr<Reading> reading = record(std::move(readable), detail);
    cost.launches += reading->launches();
    cost.waits += reading->waits();
    for (size_t i = 0; i < list.size(); ++i) list[i].measured->set_reading(reading, i);
  }
}

}  // namespace overflowstat
