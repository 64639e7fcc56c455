// Launches inside CUDA graphs: memory of their own, which is theirs for as long as the graph can be replayed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "../stats_row.h"
#include "memory.h"
#include "reduce.h"
#include "stream.h"

namespace overflowstat::cuda {

// What the launches inside one graph work in. The graph owns it, and so do those who read its rows. Filled while the
// capture goes on, by work that is not captured and that is waited for. Not thread-safe.
class GraphMemory : public std::enable_shared_from_this<GraphMemory> {
 public:
  // That of the graph into which the stream is captured; null if it is not. Made where there is none yet; then no wait
  // for it to be ready is longer than `limit`.
  static std::shared_ptr<GraphMemory> of_capture(const c10::cuda::CUDAStream& stream, std::chrono::nanoseconds limit);

  explicit GraphMemory(std::chrono::nanoseconds limit) : limit_(limit) {}
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  // All three throw as memory.h has it. Nothing is given out twice but a workspace, since the launches on one stream
  // come one after the other in every replay, too.
  std::shared_ptr<StampedRow> rows(size_t count);
  void* workspace(size_t tensors, const c10::cuda::CUDAStream& stream);
  const DenseTensor* table(const std::vector<DenseTensor>& list, const c10::cuda::CUDAStream& stream);

  std::shared_ptr<const std::atomic<bool>> graph_is_gone() const { return graph_is_gone_; }

 private:
  static void release(void* holder);

  const std::chrono::nanoseconds limit_;
  std::vector<std::unique_ptr<PinnedRows>> slabs_;
  size_t used_of_last_slab_ = 0;
  std::map<StreamKey, at::Tensor> workspaces_;
  std::vector<at::Tensor> kept_;  // tables, and workspaces that a later launch outgrew
  const std::shared_ptr<std::atomic<bool>> graph_is_gone_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace overflowstat::cuda
