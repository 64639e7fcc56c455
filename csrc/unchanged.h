// Which tensors have been read already, and have not been written to since.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "measured.h"

namespace overflowstat {

// Keeps no tensor. Not seen is what TensorState does not see.
class Unchanged {
 public:
  // Not tensors made in inference mode, which could be written to unseen.
  static bool can_know(const at::Tensor& tensor) { return tensor.has_storage() && !tensor.is_inference(); }

  // Null if the tensor is not known, or was written to since.
  std::shared_ptr<Measured> find(const at::Tensor& tensor) const {
    if (!can_know(tensor)) return nullptr;
    const auto known = known_.find(tensor.unsafeGetTensorImpl());
    return known != known_.end() && known->second->is_of(tensor) ? known->second : nullptr;
  }

  void insert(const at::Tensor& tensor, std::shared_ptr<Measured> measured) {
    if (!can_know(tensor)) return;
    if (known_.size() >= sweep_at_) sweep();
    known_.insert_or_assign(tensor.unsafeGetTensorImpl(), std::move(measured));
  }

  void clear() { known_.clear(); }

 private:
  // A batch may have any number of calls, if nobody ends it; what is gone is of no use.
  void sweep() {
    for (auto it = known_.begin(); it != known_.end();) it = it->second->is_gone() ? known_.erase(it) : ++it;
    sweep_at_ = std::max(kFewest, 2 * known_.size());
  }

  static constexpr size_t kFewest = 1024;

  ska::flat_hash_map<const c10::TensorImpl*, std::shared_ptr<Measured>> known_;
  size_t sweep_at_ = kFewest;
};

}  // namespace overflowstat
