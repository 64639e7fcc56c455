// What the tests call: one launch over tensors in host memory, by way of the launcher that a CUDA build has.

#include <cstring>
#include <vector>

#include "cuda/reduce.cu"
#include "layout.h"

using overflowstat::Format;
using overflowstat::StatsRow;

namespace {

// Zeroed workspace of exactly the size that the launcher asks for.
class Workspace {
 public:
  explicit Workspace(size_t tensors) : words_(overflowstat::cuda::workspace_bytes(tensors) / sizeof(uint64_t)) {}
  void* data() { return words_.data(); }
  bool is_zero() const {
    for (uint64_t word : words_) {
      if (word != 0) return false;
    }
    return true;
  }

 private:
  std::vector<uint64_t> words_;
};

constexpr int kWorkspaceLeftDirty = -1;

overflowstat::cuda::StridedTensor describe(const void* data, Format format, const overflowstat::Layout& layout) {
  overflowstat::cuda::StridedTensor tensor{};
  tensor.data = data;
  tensor.numel = static_cast<uint64_t>(layout.count);
  tensor.format = format;
  tensor.rank = static_cast<int32_t>(layout.dimensions.size());
  for (size_t d = 0; d < layout.dimensions.size(); ++d) {
    tensor.sizes[d] = layout.dimensions[d].size;
    tensor.strides[d] = layout.dimensions[d].stride;
  }
  return tensor;
}

}  // namespace

extern "C" {

void set_machine(int device, unsigned lane_order, unsigned workers) {
  cuda_on_cpu::device = device;
  cuda_on_cpu::lane_order = lane_order;
  cuda_on_cpu::workers = workers;
}
void set_next_launch(int error) { cuda_on_cpu::next_launch = static_cast<cudaError_t>(error); }
int get_last_error() { return cuda_on_cpu::last_error; }
unsigned get_attribute_queries() { return cuda_on_cpu::attribute_queries; }
unsigned get_last_grid() { return cuda_on_cpu::last_grid; }

int64_t bytes_per_element(uint32_t format) { return overflowstat::element_size(static_cast<Format>(format)); }

double key_value(uint32_t format, uint64_t key) {
  return overflowstat::with_format(static_cast<Format>(format), [=](auto f) {
    using F = decltype(f);
    return F::value(static_cast<typename F::Key>(key));
  });
}
int row_has_finite(uint32_t format, const StatsRow* row) {
  return overflowstat::with_format(static_cast<Format>(format),
                                   [=](auto f) { return overflowstat::has_finite<decltype(f)>(*row); });
}
int row_has_magnitude(uint32_t format, const StatsRow* row) {
  return overflowstat::with_format(static_cast<Format>(format),
                                   [=](auto f) { return overflowstat::has_magnitude<decltype(f)>(*row); });
}

// Chunks of a list of one tensor; nothing is read.
uint64_t count_chunks(uint32_t format, uint64_t numel) {
  overflowstat::cuda::DenseTensor tensor{nullptr, numel, static_cast<Format>(format), 0};
  return overflowstat::cuda::plan_chunks(&tensor, 1);
}

int run_dense(uint64_t count, const void* const* data, const uint32_t* formats, const uint64_t* numels,
              StatsRow* rows) {
  std::vector<overflowstat::cuda::DenseTensor> tensors(count);
  for (uint64_t t = 0; t < count; ++t) tensors[t] = {data[t], numels[t], static_cast<Format>(formats[t]), 0};
  const uint64_t chunks = overflowstat::cuda::plan_chunks(tensors.data(), count);
  Workspace workspace(count);
  const int error = overflowstat::cuda::launch_dense(tensors.data(), count, chunks, workspace.data(), rows, nullptr);
  if (error != 0) return error;
  return workspace.is_zero() ? overflowstat::cuda::wait(nullptr) : kWorkspaceLeftDirty;
}

// Where an element of a strided tensor lies; nothing is read, so that the tensor may be larger than any memory.
int64_t strided_offset(int64_t rank, const int64_t* sizes, const int64_t* strides, uint64_t index) {
  return overflowstat::cuda::element_offset(
      describe(nullptr, Format::kFloat32, overflowstat::make_layout(sizes, strides, rank)), index);
}

// Sizes and strides as torch has them; *repeat is how often the tensor shows each element of the row.
int run_strided(const void* data, uint32_t format, int64_t rank, const int64_t* sizes, const int64_t* strides,
                StatsRow* row, int64_t* repeat) {
  const overflowstat::Layout layout = overflowstat::make_layout(sizes, strides, rank);
  const overflowstat::cuda::StridedTensor tensor = describe(data, static_cast<Format>(format), layout);
  *repeat = layout.repeat;
  Workspace workspace(1);
  const int error = overflowstat::cuda::launch_strided(tensor, workspace.data(), row, nullptr);
  if (error != 0) return error;
  return workspace.is_zero() ? overflowstat::cuda::wait(nullptr) : kWorkspaceLeftDirty;
}

}  // extern "C"
