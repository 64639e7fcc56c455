// In place of csrc/cuda/reduce.cuh: the same kernels in their simplest form, one thread a block, for ThreadSanitizer.
//
// They touch a workspace, a table and rows as the real ones do, but without atomics, so that two kernels that work in
// the same memory at once are a race.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../number_format.h"
#include "../stats_row.h"
#include "reduce.h"

namespace overflowstat::cuda {

constexpr uint32_t kThreads = 1;
constexpr uint64_t kChunkBytes = 1024;

// A StatsRow whose identity is all zero.
struct Partial {
  StatsRow row;
  Detail detail;
  uint64_t is_there;
};
struct Workspace {
  uint64_t blocks_done;
  Partial partials[1];  // one for each tensor
};

template <class F>
Detail detail_of(typename F::Element element) {
  const auto key = F::key(element);
  Detail detail;
  detail.zero_count = is_zero<F>(key);
  detail.subnormal_count = is_below_normal<F>(key) && !is_zero<F>(key);
  if (!is_zero<F>(key) && (F::kIsInteger || key < F::kFirstNan)) detail.abs_min_nonzero = key;
  return detail;
}

template <class F>
StatsRow row_of(typename F::Element element, uint64_t index) {
  StatsRow row;
  const auto key = F::key(element);
  row.numel = 1;
  if (F::kIsInteger || key < F::kFirstNan) row.abs_min = key;
  if (F::kIsInteger || key < F::kFirstNonFinite) {
    row.finite_abs_max = key;
  } else {
    count_non_finite<F>(row, element, index);
  }
  return row;
}

// This block's share of a tensor: every gridDim.x'th element.
template <class Offset>
void read(const void* data, uint64_t numel, Format format, Offset offset, Partial& partial) {
  with_format(format, [&](auto f) {
    using F = decltype(f);
    for (uint64_t i = blockIdx.x; i < numel; i += gridDim.x) {
      const auto element = static_cast<const typename F::Element*>(data)[offset(i)];
      partial.row = merge(partial.is_there ? partial.row : StatsRow{}, row_of<F>(element, i));
      partial.detail = merge(partial.is_there ? partial.detail : Detail{}, detail_of<F>(element));
      partial.is_there = 1;
    }
  });
}

inline bool is_last_block(Workspace* workspace) {
  if (++workspace->blocks_done < gridDim.x) return false;
  workspace->blocks_done = 0;
  return true;
}

inline void publish(StampedRow* slot, const StatsRow& row, uint64_t stamp) {
  slot->row = row;
  __atomic_store_n(&slot->stamp, stamp == kNextStamp ? slot->stamp + 1 : stamp, __ATOMIC_RELEASE);
}
inline void publish_tensor(StampedRow* slots, Partial& partial, uint64_t stamp, bool detail) {
  if (detail) publish(slots + 1, as_row(partial.is_there ? partial.detail : Detail{}), stamp);
  publish(slots, partial.is_there ? partial.row : StatsRow{}, stamp);
  partial = Partial{};
}

inline void reduce_dense(const TensorList& list, Workspace* workspace, StampedRow* slots, uint64_t stamp, bool detail) {
  const DenseTensor* tensors = list.count <= kInlineTensors ? list.inlined : list.table;
  for (uint32_t t = 0; t < list.count; ++t) {
    const auto itself = [](uint64_t i) { return i; };
    read(tensors[t].data, tensors[t].numel, tensors[t].format, itself, workspace->partials[t]);
  }
  if (!is_last_block(workspace)) return;
  for (uint32_t t = 0; t < list.count; ++t) {
    publish_tensor(&slots[t * slots_each(detail)], workspace->partials[t], stamp, detail);
  }
}

inline void reduce_strided(const StridedTensor& tensor, Workspace* workspace, StampedRow* slots, uint64_t stamp,
                           bool detail) {
  const auto offset = [&](uint64_t index) {
    int64_t at = 0;
    for (int d = tensor.rank - 1; d >= 0; --d) {
      at += static_cast<int64_t>(index % tensor.sizes[d]) * tensor.strides[d];
      index /= tensor.sizes[d];
    }
    return at;
  };
  read(tensor.data, tensor.numel, tensor.format, offset, workspace->partials[0]);
  if (is_last_block(workspace)) publish_tensor(slots, workspace->partials[0], stamp, detail);
}

inline void dense_kernel(TensorList list, Workspace* workspace, StampedRow* rows, uint64_t stamp) {
  reduce_dense(list, workspace, rows, stamp, false);
}
inline void strided_kernel(StridedTensor tensor, Workspace* workspace, StampedRow* row, uint64_t stamp) {
  reduce_strided(tensor, workspace, row, stamp, false);
}
inline void dense_detail(TensorList list, Workspace* workspace, StampedRow* slots, uint64_t stamp) {
  reduce_dense(list, workspace, slots, stamp, true);
}
inline void strided_detail(StridedTensor tensor, Workspace* workspace, StampedRow* slots, uint64_t stamp) {
  reduce_strided(tensor, workspace, slots, stamp, true);
}

}  // namespace overflowstat::cuda
