// A tensor, and what of it differs after a write.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

namespace overflowstat {

// A tensor is known by its object, never by an address: the weak pointers keep these from being used again, and keep
// no memory that the tensor's elements are in. Another version or storage is another content. Not seen are writes that
// touch neither, as through `.data`, NumPy or a raw kernel, and all writes in inference mode.
class TensorState {
 public:
  explicit TensorState(const at::Tensor& tensor)
      : tensor_(tensor.getIntrusivePtr()),
        storage_(tensor.storage().getWeakStorageImpl()),
        version_(version(tensor)),
        offset_(tensor.storage_offset()),
        data_(tensor.storage().data()) {}

  bool is_gone() const { return tensor_.expired(); }
  // Whether it is this tensor, which has not been written to since.
  bool is(const at::Tensor& tensor) const {
    return tensor_._unsafe_get_target() == tensor.unsafeGetTensorImpl() && version_ == version(tensor) &&
           offset_ == tensor.storage_offset() &&
           storage_._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl() && data_ == tensor.storage().data();
  }
  // The tensor; undefined if it is gone.
  at::Tensor tensor() const {
    const auto alive = tensor_.lock();
    return alive ? at::Tensor(alive) : at::Tensor();
  }

 private:
  static uint32_t version(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version();
  }

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  uint32_t version_;
  int64_t offset_;
  const void* data_;  // storage may be freed and come back as it was, without a word
};

}  // namespace overflowstat
