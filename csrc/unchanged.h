// Which tensors have been read already, and have not been written to since.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "measured.h"

namespace overflowstat {

// A tensor is known by its object, never by an address: the weak pointers keep these from being used again, and keep
// no memory that the tensor's elements are in. Another version, storage or view of it is another content. Not seen are
// writes that touch none of these, as into what `.data` gives, through NumPy or by a raw kernel.
class Unchanged {
 public:
  // Not tensors made in inference mode: they have no version, and could be written to unseen.
  static bool can_know(const at::Tensor& tensor) { return tensor.has_storage() && !tensor.is_inference(); }

  // Null if the tensor is not known, or was written to since.
  std::shared_ptr<Measured> find(const at::Tensor& tensor) const {
    if (!can_know(tensor)) return nullptr;
    const auto found = known_.find(tensor.unsafeGetTensorImpl());
    if (found == known_.end()) return nullptr;
    const Known& known = found->second;
    const Measured& measured = *known.measured;
    const bool same = known.version == version(tensor) && known.offset == tensor.storage_offset() &&
                      tensor.sizes() == at::IntArrayRef(measured.sizes()) &&
                      tensor.strides() == at::IntArrayRef(measured.strides()) &&
                      tensor.scalar_type() == measured.dtype() &&
                      known.storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl() &&
                      known.data == tensor.storage().data();
    return same ? known.measured : nullptr;
  }

  void insert(const at::Tensor& tensor, std::shared_ptr<Measured> measured) {
    if (!can_know(tensor)) return;
    if (known_.size() >= sweep_at_) sweep();
    known_.insert_or_assign(
        tensor.unsafeGetTensorImpl(),
        Known{WeakTensor(tensor.getIntrusivePtr()), tensor.storage().getWeakStorageImpl(), version(tensor),
              tensor.storage_offset(), tensor.storage().data(), std::move(measured)});
  }

  void clear() { known_.clear(); }

 private:
  // A batch may have any number of calls, if nobody ends it; what is gone is of no use.
  void sweep() {
    for (auto it = known_.begin(); it != known_.end();) it = it->second.tensor.expired() ? known_.erase(it) : ++it;
    sweep_at_ = std::max(kFewest, 2 * known_.size());
  }

  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  static uint32_t version(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->version_counter().current_version();
  }

  struct Known {
    WeakTensor tensor;
    WeakStorage storage;
    uint32_t version;
    int64_t offset;
    const void* data;  // storage may be freed and come back as it was, without a word
    std::shared_ptr<Measured> measured;
  };

  static constexpr size_t kFewest = 1024;

  ska::flat_hash_map<const c10::TensorImpl*, Known> known_;
  size_t sweep_at_ = kFewest;
};

}  // namespace overflowstat
