// What tests call, from Python.

#include <c10/cuda/CUDAGuard.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "control.h"
#include "cuda/recorder.h"
#include "decoding.h"
#include "layout.h"

using overflowstat::Detail;
using overflowstat::Format;
using overflowstat::Layout;
using overflowstat::Reading;
using overflowstat::StatsRow;
using overflowstat::cuda::Recorder;

namespace {

struct Tensor {
  const void* data;
  int32_t device;
  uint32_t format;
  int64_t rank;
  const int64_t* sizes;
  const int64_t* strides;
};

thread_local std::string text;  // of what was called last

std::chrono::nanoseconds from_seconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

CUstream_st* stream(int device, int64_t id) { return fake_cuda::stream(device, id); }

std::string lines(const std::vector<std::string>& all) {
  std::string joined;
  for (const std::string& one : all) joined += one + "\n";
  return joined;
}

}  // namespace

extern "C" {

const char* get_text() { return text.c_str(); }

void machine_reset(unsigned order) {
  fake_cuda::reset(order);
  for (int8_t device = 0; device < fake_cuda::kDevices; ++device) c10::cuda::setCurrentCUDAStream({device, 0});
}
const char* machine_counts() {
  text.clear();
  for (const auto& [name, count] : fake_cuda::counts()) text += std::to_string(count) + " " + name + "\n";
  return text.c_str();
}
const char* machine_faults() { return (text = lines(fake_cuda::take_faults())).c_str(); }
void machine_clear_counts() { fake_cuda::clear_counts(); }
long machine_launches() { return static_cast<long>(fake_cuda::launches().size()); }
void machine_launch(long i, uint64_t* fields) {
  const auto all = fake_cuda::launches();
  const auto& [device, id, capture, launch] = all.at(i);
  const auto number = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const uint64_t found[] = {
      static_cast<uint64_t>(device), static_cast<uint64_t>(id), capture,     launch.count, number(launch.table),
      number(launch.workspace),      number(launch.rows),       launch.stamp};
  std::copy(std::begin(found), std::end(found), fields);
}
long machine_bytes(int device) { return fake_cuda::bytes_of_memory(device); }
void machine_fail_call(const char* name, int skip, int error) {
  fake_cuda::fail_call(name, skip, static_cast<cudaError_t>(error));
}
void machine_assert_after(int device, long kernels) { fake_cuda::assert_after(device, kernels); }
long machine_waiting(int device, long id) { return static_cast<long>(fake_cuda::waiting(stream(device, id))); }
void machine_run(int device, long id, long most) { fake_cuda::run_operations(stream(device, id), most); }
long machine_run_turns(long most) { return static_cast<long>(fake_cuda::run_all_turns(most)); }
void machine_turns_a_query(int turns) { fake_cuda::set_turns_a_query(turns); }
void machine_start_workers(int count) { fake_cuda::start_workers(count); }
void machine_stop_workers() { fake_cuda::stop_workers(); }

int get_device() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
}
void set_device(int device) { cudaSetDevice(device); }
long current_stream(int device) { return c10::cuda::getCurrentCUDAStream(static_cast<int8_t>(device)).id(); }
void set_current_stream(int device, long id) { c10::cuda::setCurrentCUDAStream({static_cast<int8_t>(device), id}); }
long pooled_stream(int device) { return c10::cuda::getStreamFromPool(false, static_cast<int8_t>(device)).id(); }
void stream_wait_for(int device, long waiter, int other_device, long other) {
  fake_cuda::wait_for(stream(device, waiter), stream(other_device, other));
}

int capture_begin(int device, long id, int mode) {
  return fake_cuda::begin_capture(stream(device, id), static_cast<cudaStreamCaptureMode>(mode));
}
int capture_end(int device, long id, int* graph) { return fake_cuda::end_capture(stream(device, id), graph); }
const char* graph_nodes(int graph) { return (text = lines(fake_cuda::kinds_of_nodes(graph))).c_str(); }
int graph_replay(int graph, int device, long id) { return fake_cuda::replay(graph, stream(device, id)); }
void graph_destroy(int graph) { fake_cuda::destroy_graph(graph); }
uint64_t current_capture() { return overflowstat::cuda::current_capture(); }

Recorder* recorder_new(long rows, double limit) { return new Recorder(rows, from_seconds(limit)); }
void recorder_delete(Recorder* recorder) { delete recorder; }

// Null, with a text, if it throws.
std::shared_ptr<Reading>* recorder_launch(Recorder* recorder, const Tensor* tensors, long count, int detail) {
  std::vector<Layout> layouts;
  std::vector<Reading::Entry> entries;
  std::vector<overflowstat::cuda::Source> sources;
  for (long i = 0; i < count; ++i) {
    layouts.push_back(overflowstat::make_layout(tensors[i].sizes, tensors[i].strides, tensors[i].rank));
    entries.push_back(
        {static_cast<Format>(tensors[i].format), layouts.back().repeat, false, StatsRow{}, "", std::nullopt});
  }
  for (long i = 0; i < count; ++i) {
    sources.push_back({tensors[i].data, static_cast<c10::DeviceIndex>(tensors[i].device), entries[i].format,
                       &layouts[i], static_cast<size_t>(i)});
  }
  auto reading = std::make_shared<Reading>(std::move(entries));
  try {
    recorder->launch(sources, *reading, detail != 0);
  } catch (const std::exception& error) {
    text = error.what();
    return nullptr;
  }
  return new std::shared_ptr<Reading>(std::move(reading));
}

void reading_delete(std::shared_ptr<Reading>* reading) { delete reading; }
int reading_ready(std::shared_ptr<Reading>* reading) { return (*reading)->ready(); }

// All of `count`, or one entry after the other; `details` may be null. The text has a line for each row: why it is
// missing, or nothing. Null, with another text, if it throws.
const char* reading_rows(std::shared_ptr<Reading>* reading, double limit, StatsRow* rows, Detail* details, long count,
                         int one_by_one) {
  std::vector<Reading::Entry> entries;
  try {
    if (!one_by_one) entries = (*reading)->rows(from_seconds(limit));
    for (long i = 0; one_by_one && i < count; ++i) entries.push_back((*reading)->entry(i, from_seconds(limit)));
  } catch (const std::exception& error) {
    text = error.what();
    return nullptr;
  }
  text.clear();
  for (size_t i = 0; i < entries.size(); ++i) {
    rows[i] = entries[i].row;
    if (details != nullptr) details[i] = entries[i].detail.value_or(Detail{});
    text += entries[i].missing + "\n";
  }
  return text.c_str();
}

// Whole replays so far, -1 if it is not in a graph.
long reading_replays(std::shared_ptr<Reading>* reading, double limit, int* over) {
  const auto replays = (*reading)->replays(from_seconds(limit));
  text = replays ? replays->failure : "";
  *over = replays && replays->over;
  return replays ? static_cast<long>(replays->count) : -1;
}

}  // extern "C"
