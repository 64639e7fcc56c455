#include "recorder.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "reduce.h"

namespace overflowstat::cuda {
namespace {

// 1 MiB of pinned memory: some thousand module calls that nobody has looked at yet.
constexpr size_t kRingRows = 16384;

std::string words(Error error) { return std::string(error_name(error)) + " (" + error_text(error) + ")"; }

void check(Error error, const char* doing) {
  if (error != 0) throw std::runtime_error(std::string("CUDA error while ") + doing + ": " + words(error));
}

at::Tensor pinned_bytes(size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

// A ring in pinned memory, which every device can write to. Aligned to its rows, since torch promises less.
struct PinnedRing {
  explicit PinnedRing(size_t capacity)
      : memory(pinned_bytes((capacity + 1) * sizeof(StampedRow))),
        ring(aligned(memory.data_ptr()), capacity, kLongestWait) {}

  static StampedRow* aligned(void* start) {
    size_t space = 2 * sizeof(StampedRow);
    return static_cast<StampedRow*>(std::align(alignof(StampedRow), sizeof(StampedRow), start, space));
  }

  at::Tensor memory;
  Ring ring;
};

// What the launches on one stream work in. The stream orders them, so that they can share it.
struct StreamState {
  at::Tensor workspace;           // zero between launches
  std::vector<DenseTensor> list;  // that `table` holds, on the device
  at::Tensor table;

  void* workspace_for(size_t tensors, at::Device device) {
    const auto bytes = static_cast<int64_t>(workspace_bytes(tensors));
    if (!workspace.defined() || workspace.numel() < bytes) {
      workspace = at::zeros({2 * bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    }
    return workspace.data_ptr();
  }

  // The table of a long list, sent to the device only where it is not the one that is there: from batch to batch the
  // weights of a model seldom move. The copy is on the current stream; torch keeps its pinned source until it is done.
  const DenseTensor* table_for(const std::vector<DenseTensor>& wanted, at::Device device) {
    const size_t bytes = wanted.size() * sizeof(DenseTensor);
    if (wanted.size() != list.size() || memcmp(wanted.data(), list.data(), bytes) != 0) {
      const at::Tensor source = pinned_bytes(bytes);
      memcpy(source.data_ptr(), wanted.data(), bytes);
      list.clear();
      table = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
      table.copy_(source, /*non_blocking=*/true);
      list = wanted;
    }
    return static_cast<const DenseTensor*>(table.data_ptr());
  }
};

struct State {
  std::mutex mutex;
  std::unique_ptr<PinnedRing> ring;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, StreamState> streams;
};

State& state() {
  static State& state = *new State;  // not destroyed, since CUDA may be gone before static destructors run
  return state;
}

StridedTensor strided_descriptor(const Source& source) {
  StridedTensor tensor{};
  tensor.data = source.data;
  tensor.numel = source.layout->count;
  tensor.format = source.format;
  tensor.rank = static_cast<int32_t>(source.layout->dimensions.size());
  for (int32_t d = 0; d < tensor.rank; ++d) {
    tensor.sizes[d] = source.layout->dimensions[d].size;
    tensor.strides[d] = source.layout->dimensions[d].stride;
  }
  return tensor;
}

Poll poll_of(c10::cuda::CUDAStream stream) {
  return [stream]() -> std::pair<Progress, std::string> {
    const c10::cuda::CUDAGuard guard(stream.device_index());
    const Error error = query(stream.stream());
    if (error == 0) return {Progress::kFinished, ""};
    if (error == kNotReady) return {Progress::kRunning, ""};
    return {Progress::kFailed, words(error)};
  };
}

// `sources` are of one device and its dense ones come first. Rows are in their order.
void launch_on(const c10::cuda::CUDAStream& stream, const std::vector<const Source*>& sources, Frame& frame) {
  const at::Device device = stream.device();
  StreamState& of_stream = state().streams[{stream.device_index(), stream.id()}];
  void* workspace = of_stream.workspace_for(sources.size(), device);

  std::vector<DenseTensor> dense;
  for (const Source* s : sources) {
    if (s->layout->is_dense()) dense.push_back({s->data, static_cast<uint64_t>(s->layout->count), s->format, 0});
  }
  if (!dense.empty()) {
    TensorList list{};
    list.count = static_cast<uint32_t>(dense.size());
    list.total_chunks = plan_chunks(dense.data(), dense.size());
    if (dense.size() <= kInlineTensors) {
      std::copy(dense.begin(), dense.end(), list.inlined);
    } else {
      list.table = of_stream.table_for(dense, device);
    }
    check(launch_dense(list, workspace, frame.rows(), frame.stamp(), stream.stream()), "launching the pass");
  }
  for (size_t i = dense.size(); i < sources.size(); ++i) {
    check(launch_strided(strided_descriptor(*sources[i]), workspace, frame.rows() + i, frame.stamp(), stream.stream()),
          "launching the strided pass");
  }
}

}  // namespace

void launch(const std::vector<Source>& sources, Reading& reading) {
  std::map<c10::DeviceIndex, std::vector<const Source*>> by_device;
  for (const Source& source : sources) by_device[source.device].push_back(&source);

  // Held over the launches, so that frames are launched in the order in which they were begun.
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (auto& [device, list] : by_device) {
    const c10::cuda::CUDAGuard guard(device);
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
      throw std::runtime_error("tensors are not read while a CUDA graph is captured");
    }
    std::stable_partition(list.begin(), list.end(), [](const Source* s) { return s->layout->is_dense(); });
    if (!state().ring || list.size() > state().ring->ring.capacity()) {
      // An outgrown ring lives as long as the frames that are in it, which nobody can tell: it is left to them.
      state().ring.release();
      state().ring = std::make_unique<PinnedRing>(std::max(kRingRows, 2 * list.size()));
    }
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    const std::shared_ptr<Frame> frame = state().ring->ring.begin(list.size(), poll_of(stream));
    try {
      launch_on(stream, list, *frame);
    } catch (...) {
      state().streams.erase({stream.device_index(), stream.id()});  // a workspace left half done is of no use
      throw;
    }
    std::vector<size_t> entries;
    for (const Source* source : list) entries.push_back(source->entry);
    reading.add(frame, std::move(entries));
  }
}

}  // namespace overflowstat::cuda
