#include "machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "control.h"
#include "cuda/reduce.h"

namespace fake_cuda {
namespace {

constexpr int kPinned = -1;

// An operation. Parts come one after the other; between two of them other streams may have their turn.
struct Work {
  std::string kind;
  int device;
  unsigned parts;
  std::function<void(unsigned)> run;
  std::function<std::string()> fault = nullptr;  // why it must not run, or nothing
  CUstream_st* after = nullptr;                  // of which so many operations have to be done before
  uint64_t after_count = 0;
  std::vector<std::shared_ptr<void>> kept = {};
};

struct Node {
  std::shared_ptr<Work> work;
  std::vector<size_t> after;
};

struct Capture {
  uint64_t id;
  std::shared_ptr<CUgraph_st> graph;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  CUstream_st* origin;
  bool invalid = false;
};

struct Device {
  cudaError_t failed = cudaSuccess;
  int64_t kernels_until_assert = -1;
};

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

struct CUuserObject_st {
  void* pointer;
  cudaHostFn_t destroy;
  unsigned references;
};

struct CUgraph_st {
  std::vector<Node> nodes;
  std::vector<std::pair<cudaUserObject_t, unsigned>> objects;
  std::vector<void*> memory;  // of allocations on streams that were being captured

  ~CUgraph_st();
};

struct CUstream_st {
  int device;
  int64_t id;
  std::deque<std::shared_ptr<Work>> queue;
  unsigned part = 0;     // next of the first operation
  bool in_turn = false;  // somebody runs it
  bool skipped = false;  // it has a fault
  uint64_t enqueued = 0, done = 0;
  std::shared_ptr<Capture> capture;
  std::vector<size_t> tail;  // nodes of the graph that the next one comes after
};

namespace fake_cuda {
namespace {

struct Freed {
  CUstream_st* stream;
  uint64_t after_count;
  void* memory;
};

struct Machine {
  std::mutex mutex;
  Device devices[kDevices];
  std::map<std::pair<int, int64_t>, std::unique_ptr<CUstream_st>> streams;
  std::map<const char*, std::pair<size_t, int>> memory;  // bytes, device
  std::vector<Freed> freed;
  std::vector<std::shared_ptr<Capture>> captures;
  uint64_t last_capture = 0;
  std::map<std::string, int64_t> counts;
  std::vector<std::string> faults;
  std::map<std::string, std::deque<std::pair<int, cudaError_t>>> errors;
  std::vector<LaunchRecord> launches;
  std::map<int, std::shared_ptr<CUgraph_st>> graphs;
  int last_graph = 0;
  int turns_a_query = 1;
  std::mt19937 order;
  std::vector<std::thread> workers;
  std::atomic<bool> stop{false};
};

Machine& machine() {
  static Machine& machine = *new Machine;
  return machine;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local bool in_callback = false;

using Lock = std::unique_lock<std::mutex>;

cudaError_t remembered(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// What every call of the runtime begins with. `error` is what it has to return at once.
struct Call {
  explicit Call(const char* name, int device = current_device) : lock(machine().mutex) {
    ++machine().counts[name];
    if (in_callback) machine().faults.push_back(std::string(name) + " in a destructor of a user object");
    auto& errors = machine().errors[name];
    if (!errors.empty() && errors.front().first-- == 0) {
      error = remembered(errors.front().second);
      errors.pop_front();
    } else if (machine().devices[device].failed != cudaSuccess) {
      error = remembered(machine().devices[device].failed);
    }
  }
  Lock lock;
  cudaError_t error = cudaSuccess;
};

void invalidate(Capture& capture, const std::string& why) {
  capture.invalid = true;
  machine().faults.push_back(why + " ends a capture");
}

// Whether the calling thread may do what could depend on work that is only captured.
bool is_prohibited(const char* name) {
  bool prohibited = false;
  for (const auto& capture : machine().captures) {
    const bool own = capture->thread == std::this_thread::get_id();
    if (capture_mode == cudaStreamCaptureModeRelaxed) continue;
    if (own ? capture->mode != cudaStreamCaptureModeRelaxed
            : capture->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal) {
      invalidate(*capture, name);
      prohibited = true;
    }
  }
  return prohibited;
}

CUstream_st* stream_of(int device, int64_t id) {
  auto& stream = machine().streams[{device, id}];
  if (!stream) {
    stream = std::make_unique<CUstream_st>();
    stream->device = device;
    stream->id = id;
  }
  return stream.get();
}

CUstream_st* resolved(cudaStream_t stream) { return stream ? stream : stream_of(current_device, 0); }

bool is_there(const void* start, size_t bytes, int device) {
  const char* address = static_cast<const char*>(start);
  auto block = machine().memory.upper_bound(address);
  if (block == machine().memory.begin()) return false;
  --block;
  return block->second.second == device && address + bytes <= block->first + block->second.first;
}

// The capture that a default stream would have to wait for, or null.
Capture* in_the_way_of(const CUstream_st* stream) {
  if (stream->id != 0) return nullptr;
  for (auto& [key, other] : machine().streams) {
    if (key.first == stream->device && key.second > kStreamsOfTorch && other->capture) return other->capture.get();
  }
  return nullptr;
}

cudaError_t add(Lock&, CUstream_st* stream, Work work) {
  if (Capture* capture = in_the_way_of(stream)) {
    invalidate(*capture, work.kind + " on the default stream");
    return remembered(cudaErrorStreamCaptureImplicit);
  }
  auto shared = std::make_shared<Work>(std::move(work));
  if (stream->capture) {
    if (stream->capture->invalid) return remembered(cudaErrorStreamCaptureInvalidated);
    auto& nodes = stream->capture->graph->nodes;
    nodes.push_back({std::move(shared), stream->tail});
    stream->tail = {nodes.size() - 1};
    return cudaSuccess;
  }
  stream->queue.push_back(std::move(shared));
  ++stream->enqueued;
  return cudaSuccess;
}

void free_what_is_due() {
  auto& freed = machine().freed;
  const auto due =
      std::stable_partition(freed.begin(), freed.end(), [](const Freed& f) { return f.stream->done < f.after_count; });
  for (auto it = due; it != freed.end(); ++it) {
    machine().memory.erase(static_cast<const char*>(it->memory));
    free(it->memory);
  }
  freed.erase(due, freed.end());
}

void* allocated(size_t bytes, int device) {
  void* memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  memset(memory, 0xcc, bytes);
  machine().memory[static_cast<const char*>(memory)] = {bytes, device};
  return memory;
}

// What was waiting on a device that has failed will never run. Returns what must die without the lock.
std::vector<std::shared_ptr<void>> fail(int device, cudaError_t error) {
  std::vector<std::shared_ptr<void>> dropped;
  machine().devices[device].failed = error;
  for (auto& [key, stream] : machine().streams) {
    if (key.first != device) continue;
    while (stream->queue.size() > (stream->in_turn ? 1 : 0)) {
      dropped.push_back(std::move(stream->queue.back()));
      stream->queue.pop_back();
      ++stream->done;
    }
    if (!stream->in_turn) stream->part = 0;
  }
  return dropped;
}

// `*skipped` is kept from part to part.
void run_part(const Work& work, unsigned part, bool* skipped) {
  {
    const Lock lock(machine().mutex);
    if (machine().devices[work.device].failed != cudaSuccess) return;
    if (part == 0) {
      const std::string fault = work.fault ? work.fault() : "";
      *skipped = !fault.empty();
      if (*skipped) machine().faults.push_back(work.kind + ": " + fault);
    }
  }
  if (!*skipped && work.run) work.run(part);
  if (part + 1 < work.parts || work.kind != "kernel") return;
  std::vector<std::shared_ptr<void>> dropped;
  const Lock lock(machine().mutex);
  int64_t& left = machine().devices[work.device].kernels_until_assert;
  if (left > 0 && --left == 0) dropped = fail(work.device, cudaErrorAssert);
}

bool can_run(const CUstream_st& stream) {
  if (stream.in_turn || stream.queue.empty()) return false;
  const Work& work = *stream.queue.front();
  return work.after == nullptr || work.after->done >= work.after_count;
}

// One part of the first operation of a stream.
void run_turn(Lock& lock, CUstream_st* stream) {
  std::shared_ptr<Work> work = stream->queue.front();
  const unsigned part = stream->part;
  stream->in_turn = true;
  lock.unlock();
  run_part(*work, part, &stream->skipped);
  lock.lock();
  stream->in_turn = false;
  if (++stream->part >= work->parts || machine().devices[stream->device].failed != cudaSuccess) {
    stream->queue.pop_front();
    stream->part = 0;
    ++stream->done;
    free_what_is_due();
  }
  lock.unlock();
  work.reset();  // what it kept may be a graph's last
  lock.lock();
}

// Of any stream; whether there was one.
bool run_any_turn(Lock& lock) {
  std::vector<CUstream_st*> ready;
  for (auto& [key, stream] : machine().streams) {
    if (can_run(*stream)) ready.push_back(stream.get());
  }
  if (ready.empty()) return false;
  run_turn(lock, ready[machine().order() % ready.size()]);
  return true;
}

std::string fault_of(const Launch& launch, int device) {
  namespace ours = overflowstat::cuda;
  if (!is_there(launch.workspace, ours::workspace_bytes(launch.slots), device)) return "a workspace that is not there";
  if (!is_there(launch.rows, launch.slots * sizeof(overflowstat::StampedRow), kPinned)) {
    return "rows that are not there";
  }
  if (launch.table && !is_there(launch.table, launch.count * sizeof(ours::DenseTensor), device)) {
    return "a table that is not there";
  }
  return "";
}

void release(cudaUserObject_t object, unsigned references) {
  if ((object->references -= references) > 0) return;
  std::thread([object] {
    in_callback = true;
    object->destroy(object->pointer);
  }).join();
  delete object;
}

}  // namespace
}  // namespace fake_cuda

CUgraph_st::~CUgraph_st() {
  for (auto [object, references] : objects) release(object, references);
  const Lock lock(machine().mutex);
  for (void* block : memory) {
    machine().memory.erase(static_cast<const char*>(block));
    free(block);
  }
}

// ---- the runtime

cudaError_t cudaGetLastError() {
  const Lock lock(machine().mutex);
  return std::exchange(last_error, machine().devices[current_device].failed);
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    default: return "another error";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorAssert: return "device-side assert triggered";
    default: return cudaGetErrorName(error);
  }
}

cudaError_t cudaGetDevice(int* device) {
  const Lock lock(machine().mutex);  // answered by a failed device, too
  ++machine().counts["cudaGetDevice"];
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return remembered(cudaErrorInvalidDevice);
  const Call call("cudaSetDevice", device);
  if (call.error == cudaSuccess) current_device = device;
  return call.error;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  const Call call("cudaDeviceGetAttribute", device);
  *value = kMultiprocessors;
  return call.error;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  const Call call("cudaMalloc");
  if (call.error != cudaSuccess) return call.error;
  if (is_prohibited("cudaMalloc")) return remembered(cudaErrorStreamCaptureUnsupported);
  *memory = allocated(bytes, current_device);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  const Call call("cudaHostAlloc");
  if (call.error != cudaSuccess) return call.error;
  if (is_prohibited("cudaHostAlloc")) return remembered(cudaErrorStreamCaptureUnsupported);
  *memory = allocated(bytes, kPinned);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  const Call call("cudaFreeHost");
  if (call.error != cudaSuccess) return call.error;
  if (is_prohibited("cudaFreeHost")) return remembered(cudaErrorStreamCaptureUnsupported);
  machine().memory.erase(static_cast<const char*>(memory));
  free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t handle) {
  Call call("cudaMemsetAsync");
  if (call.error != cudaSuccess) return call.error;
  CUstream_st* stream = resolved(handle);
  const int device = stream->device;
  return add(call.lock, stream,
             {"memset", device, 1, [=](unsigned) { memset(memory, value, bytes); },
              [=] { return is_there(memory, bytes, device) ? "" : "memory that is not there"; }});
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  Call call("cudaMemcpyAsync");
  if (call.error != cudaSuccess) return call.error;
  CUstream_st* stream = resolved(handle);
  const int device = stream->device;
  return add(call.lock, stream,
             {"copy", device, 1, [=](unsigned) { memcpy(to, from, bytes); },
              [=] {
                return is_there(to, bytes, device) && is_there(from, bytes, kPinned) ? "" : "memory that is not there";
              }});
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  {
    Lock lock(machine().mutex);
    for (int i = 0; i < machine().turns_a_query; ++i) run_any_turn(lock);
  }
  const int device = handle ? handle->device : current_device;
  const Call call("cudaStreamQuery", device);
  if (call.error != cudaSuccess) return call.error;
  CUstream_st* stream = resolved(handle);
  if (is_prohibited("cudaStreamQuery")) return remembered(cudaErrorStreamCaptureUnsupported);
  if (Capture* capture = in_the_way_of(stream)) {
    invalidate(*capture, "cudaStreamQuery of the default stream");
    return remembered(cudaErrorStreamCaptureImplicit);
  }
  if (stream->capture) {
    invalidate(*stream->capture, "cudaStreamQuery of a stream in it");
    return remembered(cudaErrorStreamCaptureUnsupported);
  }
  return stream->queue.empty() ? cudaSuccess : remembered(cudaErrorNotReady);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph) {
  const Call call("cudaStreamGetCaptureInfo", handle ? handle->device : current_device);
  if (call.error != cudaSuccess) return call.error;
  const CUstream_st* stream = resolved(handle);
  if (in_the_way_of(stream)) return remembered(cudaErrorStreamCaptureImplicit);  // which ends no capture
  const auto& capture = stream->capture;
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  if (*status == cudaStreamCaptureStatusActive) {
    *id = capture->id;
    *graph = capture->graph.get();
  }
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const Lock lock(machine().mutex);
  ++machine().counts["cudaThreadExchangeStreamCaptureMode"];
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* pointer, cudaHostFn_t destroy, unsigned references,
                                 unsigned) {
  const Call call("cudaUserObjectCreate");
  if (call.error != cudaSuccess) return call.error;
  *object = new CUuserObject_st{pointer, destroy, references};
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned references) {
  {
    const Call call("cudaUserObjectRelease");
    if (call.error != cudaSuccess) return call.error;
  }
  release(object, references);
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned references, unsigned) {
  const Call call("cudaGraphRetainUserObject");
  if (call.error != cudaSuccess) return call.error;
  graph->objects.push_back({object, references});
  return cudaSuccess;
}

// ---- what stands in for torch and for nvcc

namespace fake_cuda {

cudaError_t launch(cudaStream_t handle, const Launch& launch, unsigned blocks, std::function<void(unsigned)> run) {
  Call call("cudaLaunchKernelExC");
  if (call.error != cudaSuccess) return call.error;
  CUstream_st* stream = resolved(handle);
  if (stream->device != current_device) return remembered(cudaErrorInvalidResourceHandle);
  const int device = stream->device;
  const uint64_t capture = stream->capture ? stream->capture->id : 0;
  machine().launches.push_back({device, stream->id, capture, launch});
  return add(call.lock, stream,
             {"kernel", device, blocks, std::move(run), [launch, device] { return fault_of(launch, device); }});
}

cudaError_t occupancy(int* blocks) {
  const Call call("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  *blocks = 1;
  return call.error;
}

void count(const std::string& what) {
  const Lock lock(machine().mutex);
  ++machine().counts[what];
}

CUstream_st* stream(int device, int64_t id) {
  const Lock lock(machine().mutex);
  return stream_of(device, id);
}

int device_of(const CUstream_st* stream) { return stream->device; }

bool is_captured(const CUstream_st* stream) {
  const Lock lock(machine().mutex);
  return stream->capture != nullptr;
}

void keep_with_last(CUstream_st* stream, std::shared_ptr<void> object) {
  const Lock lock(machine().mutex);
  if (!stream->capture && !stream->queue.empty()) stream->queue.back()->kept.push_back(std::move(object));
}

void free_in_order(CUstream_st* stream, void* memory) {
  const Lock lock(machine().mutex);
  if (stream->capture) {
    stream->capture->graph->memory.push_back(memory);
    return;
  }
  machine().freed.push_back({stream, stream->enqueued, memory});
  free_what_is_due();
}

void free_pinned(void* memory) {
  const Lock lock(machine().mutex);
  machine().memory.erase(static_cast<const char*>(memory));
  free(memory);
}

// ---- what a test has in its hands

void reset(unsigned order) {
  run_all_turns(~uint64_t{0});
  std::map<int, std::shared_ptr<CUgraph_st>> graphs;  // these two die without the lock
  std::vector<std::shared_ptr<Capture>> captures;
  const Lock lock(machine().mutex);
  graphs.swap(machine().graphs);
  captures.swap(machine().captures);
  for (auto& [key, stream] : machine().streams) stream->capture = nullptr;
  for (Device& device : machine().devices) device = Device{};
  machine().counts.clear();
  machine().faults.clear();
  machine().errors.clear();
  machine().launches.clear();
  machine().turns_a_query = 1;
  machine().order.seed(order);
  current_device = 0;
  last_error = cudaSuccess;
}

std::map<std::string, int64_t> counts() {
  const Lock lock(machine().mutex);
  return machine().counts;
}
std::vector<std::string> take_faults() {
  const Lock lock(machine().mutex);
  if (last_error != cudaSuccess && last_error != cudaErrorAssert) {  // which nothing can take away
    machine().faults.push_back("an error is left for the next check to find");
  }
  return std::exchange(machine().faults, {});
}
std::vector<LaunchRecord> launches() {
  const Lock lock(machine().mutex);
  return machine().launches;
}
void clear_counts() {
  const Lock lock(machine().mutex);
  machine().counts.clear();
  machine().launches.clear();
}

int64_t bytes_of_memory(int device) {
  const Lock lock(machine().mutex);
  int64_t bytes = 0;
  for (const auto& [start, block] : machine().memory) bytes += block.second == device ? block.first : 0;
  return bytes;
}

void fail_call(const std::string& name, int skip, cudaError_t error) {
  const Lock lock(machine().mutex);
  machine().errors[name].push_back({skip, error});
}
void assert_after(int device, int64_t kernels) {
  const Lock lock(machine().mutex);
  machine().devices[device].kernels_until_assert = kernels;
}

uint64_t waiting(CUstream_st* stream) {
  const Lock lock(machine().mutex);
  return stream->queue.size();
}
void set_turns_a_query(int turns) {
  const Lock lock(machine().mutex);
  machine().turns_a_query = turns;
}
void run_operations(CUstream_st* stream, uint64_t most) {
  Lock lock(machine().mutex);
  const uint64_t until = most > stream->enqueued - stream->done ? stream->enqueued : stream->done + most;
  while (stream->done < until && can_run(*stream)) run_turn(lock, stream);
}
uint64_t run_all_turns(uint64_t most) {
  Lock lock(machine().mutex);
  uint64_t turns = 0;
  while (turns < most && run_any_turn(lock)) ++turns;
  return turns;
}

void start_workers(int count) {
  machine().stop = false;
  for (int i = 0; i < count; ++i) {
    machine().workers.emplace_back([] {
      while (!machine().stop) {
        bool ran = false;
        {
          Lock lock(machine().mutex);
          ran = run_any_turn(lock);
        }
        if (!ran) std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    });
  }
}
void stop_workers() {
  machine().stop = true;
  for (std::thread& worker : machine().workers) worker.join();
  machine().workers.clear();
}

void wait_for(CUstream_st* waiter, CUstream_st* other) {
  Lock lock(machine().mutex);
  if (!other->capture && !waiter->capture) {
    add(lock, waiter, {"wait", waiter->device, 1, nullptr, nullptr, other, other->enqueued});
  } else if (other->capture && (!waiter->capture || waiter->capture == other->capture)) {
    waiter->capture = other->capture;
    waiter->tail.insert(waiter->tail.end(), other->tail.begin(), other->tail.end());
  } else {
    invalidate(*waiter->capture, "waiting for work outside of it");
  }
}

cudaError_t begin_capture(CUstream_st* stream, cudaStreamCaptureMode mode) {
  const Lock lock(machine().mutex);
  if (stream->id == 0 || stream->capture) return cudaErrorStreamCaptureUnsupported;
  stream->capture = std::make_shared<Capture>(
      Capture{++machine().last_capture, std::make_shared<CUgraph_st>(), mode, std::this_thread::get_id(), stream});
  stream->tail.clear();
  machine().captures.push_back(stream->capture);
  return cudaSuccess;
}

cudaError_t end_capture(CUstream_st* stream, int* handle) {
  std::shared_ptr<Capture> capture;  // dies without the lock
  const Lock lock(machine().mutex);
  if (!stream->capture || stream->capture->origin != stream) return cudaErrorStreamCaptureUnmatched;
  capture = stream->capture;
  std::set<size_t> joined;
  std::vector<size_t> next = stream->tail;
  while (!next.empty()) {
    const size_t node = next.back();
    next.pop_back();
    if (!joined.insert(node).second) continue;
    const auto& after = capture->graph->nodes[node].after;
    next.insert(next.end(), after.begin(), after.end());
  }
  for (auto& [key, other] : machine().streams) {
    if (other->capture == capture) {
      other->capture = nullptr;
      other->tail.clear();
    }
  }
  auto& captures = machine().captures;
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (joined.size() != capture->graph->nodes.size()) return cudaErrorStreamCaptureUnjoined;
  *handle = ++machine().last_graph;
  machine().graphs[*handle] = std::move(capture->graph);
  return cudaSuccess;
}

std::vector<std::string> kinds_of_nodes(int graph) {
  const Lock lock(machine().mutex);
  std::vector<std::string> kinds;
  for (const Node& node : machine().graphs.at(graph)->nodes) kinds.push_back(node.work->kind);
  return kinds;
}

// In any order that the graph leaves open, parts of nodes that may run at once in turn.
cudaError_t replay(int handle, CUstream_st* stream) {
  struct Turn {
    size_t node;
    unsigned part;
  };
  Lock lock(machine().mutex);
  const std::shared_ptr<CUgraph_st> graph = machine().graphs.at(handle);
  auto turns = std::make_shared<std::vector<Turn>>();
  std::vector<unsigned> parts(graph->nodes.size());
  const auto is_done = [&](size_t node) { return parts[node] == graph->nodes[node].work->parts; };
  for (;;) {
    std::vector<size_t> ready;
    for (size_t n = 0; n < parts.size(); ++n) {
      const auto& after = graph->nodes[n].after;
      if (!is_done(n) && std::all_of(after.begin(), after.end(), is_done)) ready.push_back(n);
    }
    if (ready.empty()) break;
    const size_t node = ready[machine().order() % ready.size()];
    turns->push_back({node, parts[node]++});
  }
  auto skipped = std::make_shared<std::deque<bool>>(parts.size());
  Work work{"graph", stream->device, static_cast<unsigned>(std::max<size_t>(turns->size(), 1)),
            [graph = graph.get(), turns, skipped](unsigned turn) {
              if (turns->empty()) return;
              const auto [node, part] = (*turns)[turn];
              run_part(*graph->nodes[node].work, part, &(*skipped)[node]);
            }};
  work.kept.push_back(graph);
  return add(lock, stream, std::move(work));
}

void destroy_graph(int handle) {
  std::shared_ptr<CUgraph_st> graph;  // dies without the lock
  const Lock lock(machine().mutex);
  graph = std::move(machine().graphs.at(handle));
  machine().graphs.erase(handle);
}

}  // namespace fake_cuda
