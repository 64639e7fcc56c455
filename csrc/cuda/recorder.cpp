#include "recorder.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "graph.h"
#include "reduce.h"

namespace overflowstat::cuda {
namespace {

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

// `sources` are of one device and its dense ones come first. Slots are in their order. `memory` is a StreamMemory or a
// GraphMemory. Returns how many launches it took.
template <class Memory>
uint64_t launch_on(const c10::cuda::CUDAStream& stream, const std::vector<const Source*>& sources, Memory& memory,
                   StampedRow* slots, uint64_t stamp, bool detail) {
  void* workspace = memory.workspace(sources.size() * slots_each(detail), stream);
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
      list.table = memory.table(dense, stream);
    }
    check(launch_dense(list, workspace, slots, stamp, detail, stream.stream()), "launching the pass");
  }
  for (size_t i = dense.size(); i < sources.size(); ++i) {
    check(launch_strided(strided_descriptor(*sources[i]), workspace, slots + i * slots_each(detail), stamp, detail,
                         stream.stream()),
          "launching the strided pass");
  }
  return sources.size() - dense.size() + !dense.empty();
}

}  // namespace

std::shared_ptr<Frame> Recorder::begin_frame(size_t rows, const Poll& poll, Reading& reading) {
  if (ring_ && 2 * rows <= ring_->ring.capacity()) {
    const uint64_t waits_before = ring_->ring.waits();
    auto frame = ring_->ring.begin(rows, poll);
    reading.count_waits(ring_->ring.waits() - waits_before);
    if (frame) return frame;
  }
  auto next = std::make_unique<PinnedRing>(std::max(rows_, 2 * rows), limit_);
  // An outgrown ring, or one that a device is stuck in, lives as long as the frames that are in it, which nobody can
  // tell: it is left to them. A ring cannot be found stuck before `limit` is over, so that these stay few.
  ring_.release();
  ring_ = std::move(next);
  return ring_->ring.begin(rows, poll);
}

void Recorder::launch(const std::vector<Source>& sources, Reading& reading, bool detail) {
  std::map<c10::DeviceIndex, std::vector<const Source*>> by_device;
  for (const Source& source : sources) by_device[source.device].push_back(&source);

  // Held over the launches, so that frames are launched in the order in which they were begun.
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [device, list] : by_device) {
    const c10::cuda::CUDAGuard guard(device);
    std::stable_partition(list.begin(), list.end(), [](const Source* s) { return s->layout->is_dense(); });
    std::vector<size_t> entries;
    for (const Source* source : list) entries.push_back(source->entry);
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    const size_t slots = list.size() * slots_each(detail);

    if (const auto graph = GraphMemory::of_capture(stream, limit_)) {
      const std::shared_ptr<StampedRow> rows = graph->rows(slots);
      const uint64_t launches = launch_on(stream, list, *graph, rows.get(), kNextStamp, detail);
      reading.add(std::make_shared<ReplayedRows>(rows, slots, graph->graph_is_gone(), poll_of_current_stream(device)),
                  entries, launches, detail);
      continue;
    }
    const std::shared_ptr<Frame> frame = begin_frame(slots, poll_of(stream), reading);
    const StreamKey key = key_of(stream);
    uint64_t launches = 0;
    try {
      launches = launch_on(stream, list, streams_[key], frame->rows(), frame->stamp(), detail);
    } catch (...) {
      streams_.erase(key);  // a workspace left half done is of no use
      throw;
    }
    reading.add(frame, std::move(entries), launches, detail);
  }
}

Recorder& recorder() {
  static Recorder& recorder = *new Recorder;  // not destroyed, since CUDA may be gone before static destructors run
  return recorder;
}

uint64_t current_capture() {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  // Asking would make a context, hundreds of megabytes, on a device that nothing else uses.
  if (!c10::cuda::hasPrimaryContext(stream.device_index())) return 0;
  const CaptureState state = capture_state(stream);
  return state.capture ? state.capture->id : 0;
}

}  // namespace overflowstat::cuda
