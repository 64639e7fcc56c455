// What the tests call: one launch over tensors in host memory, by way of the launcher that a CUDA build has.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/reduce.cu"
#include "decoding.h"
#include "layout.h"

using overflowstat::Detail;
using overflowstat::Format;
using overflowstat::StampedRow;
using overflowstat::StatsRow;

namespace {

// Zeroed workspace of exactly the size that the launcher asks for.
class Workspace {
 public:
  explicit Workspace(size_t slots) : words_(overflowstat::cuda::workspace_bytes(slots) / sizeof(uint64_t)) {}
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

// What is found wrong here; CUDA's own errors are positive.
enum Fault { kNone = 0, kWorkspaceLeftDirty = -1, kRowNotStamped = -2, kWroteBeyondRows = -3, kStampOutOfOrder = -4 };

constexpr uint64_t kUntouched = 0xeeeeeeeeeeeeeeee;

// The host's side of one launch: rows with some that are not the launch's after them, a stamp that no launch had
// before, and a look at both whenever the device orders its writes for the host. Every other launch is one as a CUDA
// graph replays it, which makes that stamp itself of the one that is there.
class Rows {
 public:
  Rows(size_t tensors, bool detail)
      : detail_(detail), count_(tensors * overflowstat::slots_each(detail)), rows_(count_ + kBeyond) {
    static uint64_t launches = 0;
    stamp_ = 0x0123456789abcdef + ++launches;
    is_replay_ = launches % 2 == 0;
    memset(static_cast<void*>(rows_.data()), 0xee, rows_.size() * sizeof(StampedRow));
    for (size_t i = 0; is_replay_ && i < count_; ++i) rows_[i].stamp = stamp_ - 1;
    cuda_on_cpu::on_system_fence = [this] { look(); };
  }
  ~Rows() { cuda_on_cpu::on_system_fence = nullptr; }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  StampedRow* data() { return rows_.data(); }
  uint64_t stamp() const { return is_replay_ ? overflowstat::kNextStamp : stamp_; }

  size_t count() const { return count_; }

  Fault take(StatsRow* rows, Detail* details) const {
    const size_t each = overflowstat::slots_each(detail_);
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (i < count_ && rows_[i].stamp != stamp_) return kRowNotStamped;
      if (i >= count_ && (rows_[i].stamp != kUntouched || is_written(rows_[i].row))) return kWroteBeyondRows;
      if (i >= count_) continue;
      if (i % each == 0) {
        rows[i / each] = rows_[i].row;
      } else {
        details[i / each] = overflowstat::as_detail(rows_[i].row);
      }
    }
    return in_order_ && (fences_ == count_ || count_ > kMostLookedAt) ? kNone : kStampOutOfOrder;
  }

 private:
  static constexpr size_t kBeyond = 2, kMostLookedAt = 256;

  CUDA_ON_CPU_UNSEEN static bool is_written(const StatsRow& row) {
    uint64_t words[sizeof(StatsRow) / sizeof(uint64_t)];
    memcpy(words, &row, sizeof(row));
    return std::count(std::begin(words), std::end(words), kUntouched) == 0;
  }

  // At each fence there must be one more row written, whole, and not one more stamped; and where a tensor has several
  // slots, none is stamped before the one after it. Each look is at all rows, which for a long list would take longer
  // than the rest.
  CUDA_ON_CPU_UNSEEN void look() {
    if (count_ > kMostLookedAt) return;
    size_t written = 0, stamped = 0;
    for (size_t i = 0; i < count_; ++i) {
      written += is_written(rows_.data()[i].row);
      stamped += rows_.data()[i].stamp == stamp_;
      const bool is_first = detail_ && i % 2 == 0;
      in_order_ = in_order_ && !(is_first && rows_.data()[i].stamp == stamp_ && rows_.data()[i + 1].stamp != stamp_);
    }
    in_order_ = in_order_ && stamped == fences_ && written == fences_ + 1;
    ++fences_;
  }

  const bool detail_;
  const size_t count_;
  size_t fences_ = 0;
  uint64_t stamp_;
  bool is_replay_, in_order_ = true;
  std::vector<StampedRow> rows_;
};

// A list as a launch takes it, its table a heap block of exactly its size; what is not to be used cannot be.
class List {
 public:
  explicit List(std::vector<overflowstat::cuda::DenseTensor> tensors) : tensors_(std::move(tensors)) {
    memset(static_cast<void*>(&list_), 0xee, sizeof(list_));
    list_.count = static_cast<uint32_t>(tensors_.size());
    list_.total_chunks = overflowstat::cuda::plan_chunks(tensors_.data(), tensors_.size());
    list_.table = nullptr;
    if (tensors_.size() <= overflowstat::cuda::kInlineTensors) {
      std::copy(tensors_.begin(), tensors_.end(), list_.inlined);
    } else {
      list_.table = tensors_.data();
    }
  }
  const overflowstat::cuda::TensorList& get() const { return list_; }

 private:
  std::vector<overflowstat::cuda::DenseTensor> tensors_;
  overflowstat::cuda::TensorList list_;
};

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
void set_stream_state(int error) { cuda_on_cpu::stream_state = static_cast<cudaError_t>(error); }
int query_stream() { return overflowstat::cuda::query(nullptr); }
int not_ready() { return overflowstat::cuda::kNotReady; }
unsigned get_last_grid() { return cuda_on_cpu::last_grid; }

int64_t bytes_per_element(uint32_t format) { return overflowstat::element_size(static_cast<Format>(format)); }

// Chunks of a list of one tensor; nothing is read.
uint64_t count_chunks(uint32_t format, uint64_t numel) {
  overflowstat::cuda::DenseTensor tensor{nullptr, numel, static_cast<Format>(format), 0};
  return overflowstat::cuda::plan_chunks(&tensor, 1);
}

// `details` may be null.
int run_dense(uint64_t count, const void* const* data, const uint32_t* formats, const uint64_t* numels, StatsRow* rows,
              Detail* details) {
  std::vector<overflowstat::cuda::DenseTensor> tensors(count);
  for (uint64_t t = 0; t < count; ++t) tensors[t] = {data[t], numels[t], static_cast<Format>(formats[t]), 0};
  const List list(std::move(tensors));
  Rows stamped(count, details != nullptr);
  Workspace workspace(stamped.count());
  const int error = overflowstat::cuda::launch_dense(list.get(), workspace.data(), stamped.data(), stamped.stamp(),
                                                     details != nullptr, nullptr);
  if (error != 0) return error;
  return workspace.is_zero() ? stamped.take(rows, details) : kWorkspaceLeftDirty;
}

// Where an element of a strided tensor lies; nothing is read, so that the tensor may be larger than any memory.
int64_t strided_offset(int64_t rank, const int64_t* sizes, const int64_t* strides, uint64_t index) {
  return overflowstat::cuda::element_offset(
      describe(nullptr, Format::kFloat32, overflowstat::make_layout(sizes, strides, rank)), index);
}

// Sizes and strides as torch has them; *repeat is how often the tensor shows each element of the row.
int run_strided(const void* data, uint32_t format, int64_t rank, const int64_t* sizes, const int64_t* strides,
                StatsRow* row, Detail* detail, int64_t* repeat) {
  const overflowstat::Layout layout = overflowstat::make_layout(sizes, strides, rank);
  const overflowstat::cuda::StridedTensor tensor = describe(data, static_cast<Format>(format), layout);
  *repeat = layout.repeat;
  Rows stamped(1, detail != nullptr);
  Workspace workspace(stamped.count());
  const int error = overflowstat::cuda::launch_strided(tensor, workspace.data(), stamped.data(), stamped.stamp(),
                                                       detail != nullptr, nullptr);
  if (error != 0) return error;
  return workspace.is_zero() ? stamped.take(row, detail) : kWorkspaceLeftDirty;
}

}  // extern "C"
