#include "graph.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "../progress.h"
#include "error.h"

namespace overflowstat::cuda {
namespace {

constexpr int kStreamsTried = 64;   // torch has 32 of a kind
constexpr size_t kSlabRows = 1024;  // 64 KiB: pinned memory is dear by the piece

// What a graph owns is left here when it goes, since CUDA tells so in a thread that must not use CUDA.
struct Leavings {
  using Holder = std::shared_ptr<GraphMemory>;

  std::mutex mutex;
  std::vector<std::unique_ptr<Holder>> of_graphs;
  std::vector<std::unique_ptr<PinnedRows>> slabs;  // for graphs to come: to free pinned memory waits for all devices
};

Leavings& leavings() {
  static Leavings& leavings = *new Leavings;  // not destroyed, since graphs may be gone only after static destructors
  return leavings;
}

std::unique_ptr<PinnedRows> make_slab(size_t count) {
  {
    const std::lock_guard<std::mutex> lock(leavings().mutex);
    auto& slabs = leavings().slabs;
    const auto fit = std::find_if(slabs.begin(), slabs.end(), [&](const auto& slab) { return slab->count() >= count; });
    if (fit != slabs.end()) {
      std::unique_ptr<PinnedRows> slab = std::move(*fit);
      slabs.erase(fit);
      std::fill_n(slab->data(), slab->count(), StampedRow{});
      return slab;
    }
  }
  return std::make_unique<PinnedRows>(std::max(kSlabRows, count));
}

// One that is not captured, since torch deals the same out in turn to everybody.
c10::cuda::CUDAStream stream_aside(c10::DeviceIndex device) {
  CaptureState state{};
  for (int tries = 0; tries < kStreamsTried; ++tries) {
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device);
    state = capture_state(stream);
    if (state.error == 0 && !state.capture) return stream;
  }
  check(state.error, "preparing a launch");
  throw std::runtime_error("every stream is captured into a CUDA graph");
}

// What is made here is made now and once, not whenever the graph is replayed; waits for it.
template <class Make>
at::Tensor outside_of_the_capture(at::Device device, std::chrono::nanoseconds limit, Make make) {
  const c10::cuda::CUDAStreamCaptureModeGuard allowed_anywhere(cudaStreamCaptureModeRelaxed);
  const c10::cuda::CUDAStream aside = stream_aside(device.index());
  const c10::cuda::CUDAStreamGuard guard(aside);
  at::Tensor made = make();
  const Wait wait = wait_until([] { return false; }, poll_of(aside), limit);
  if (!wait.failure.empty()) throw std::runtime_error("CUDA error while preparing a launch: " + wait.failure);
  return made;
}

// Makes the graph an owner.
void give(cudaGraph_t graph, std::unique_ptr<Leavings::Holder> holder, cudaHostFn_t release) {
  constexpr char kDoing[] = "making memory a CUDA graph's own";
  cudaUserObject_t object = nullptr;
  check(taken(cudaUserObjectCreate(&object, holder.get(), release, 1, cudaUserObjectNoDestructorSync)), kDoing);
  holder.release();
  const cudaError_t error = taken(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  if (error != cudaSuccess) taken(cudaUserObjectRelease(object, 1));
  check(error, kDoing);
}

}  // namespace

std::shared_ptr<GraphMemory> GraphMemory::of_capture(const c10::cuda::CUDAStream& stream,
                                                     std::chrono::nanoseconds limit) {
  const auto capture = capture_of(stream);
  if (!capture) return nullptr;
  static auto& live = *new std::map<uint64_t, std::weak_ptr<GraphMemory>>;
  if (auto known = live[capture->id].lock()) return known;

  decltype(Leavings::of_graphs) gone;
  {
    const std::lock_guard<std::mutex> lock(leavings().mutex);
    gone.swap(leavings().of_graphs);
  }
  gone.clear();
  for (auto it = live.begin(); it != live.end();) it = it->second.expired() ? live.erase(it) : std::next(it);

  const auto memory = std::make_shared<GraphMemory>(limit);
  give(capture->graph, std::make_unique<Leavings::Holder>(memory), &GraphMemory::release);
  live[capture->id] = memory;
  return memory;
}

void GraphMemory::release(void* pointer) {
  std::unique_ptr<Leavings::Holder> holder(static_cast<Leavings::Holder*>(pointer));
  *(*holder)->graph_is_gone_ = true;
  const std::lock_guard<std::mutex> lock(leavings().mutex);
  leavings().of_graphs.push_back(std::move(holder));
}

GraphMemory::~GraphMemory() {
  const std::lock_guard<std::mutex> lock(leavings().mutex);
  for (auto& slab : slabs_) leavings().slabs.push_back(std::move(slab));
}

std::shared_ptr<StampedRow> GraphMemory::rows(size_t count) {
  if (slabs_.empty() || slabs_.back()->count() - used_of_last_slab_ < count) {
    slabs_.push_back(make_slab(count));
    used_of_last_slab_ = 0;
  }
  StampedRow* rows = slabs_.back()->data() + used_of_last_slab_;
  used_of_last_slab_ += count;
  return {shared_from_this(), rows};
}

void* GraphMemory::workspace(size_t tensors, const c10::cuda::CUDAStream& stream) {
  at::Tensor& workspace = workspaces_[key_of(stream)];
  if (!workspace.defined() || static_cast<size_t>(workspace.numel()) < workspace_bytes(tensors)) {
    if (workspace.defined()) kept_.push_back(workspace);
    workspace = outside_of_the_capture(stream.device(), limit_, [&] {
      return make_workspace(std::max(2 * tensors, kInlineTensors), stream.device());
    });
  }
  return workspace.data_ptr();
}

const DenseTensor* GraphMemory::table(const std::vector<DenseTensor>& list, const c10::cuda::CUDAStream& stream) {
  kept_.push_back(outside_of_the_capture(stream.device(), limit_, [&] { return make_table(list, stream.device()); }));
  return static_cast<const DenseTensor*>(kept_.back().data_ptr());
}

}  // namespace overflowstat::cuda
