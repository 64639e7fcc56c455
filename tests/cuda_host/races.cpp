// A program for ThreadSanitizer: threads that launch on streams of their own, hand their readings to others, and
// capture and replay graphs, all at once, on devices that work meanwhile.

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "c10/cuda/CUDAStream.h"
#include "control.h"
#include "cuda/recorder.h"
#include "layout.h"

using overflowstat::Layout;
using overflowstat::Reading;

namespace {

constexpr int kRounds = 200;
std::atomic<int> wrong{0};

struct List {
  std::vector<float> data;
  std::vector<Layout> layouts;

  explicit List(size_t count, float value) : data(count * 100, value) {
    const int64_t size = 90, dense = 1, strided = 3;
    for (size_t i = 0; i < count; ++i) {
      const int64_t third = size / 3;
      layouts.push_back(i == 0 ? overflowstat::make_layout(&third, &strided, 1)
                               : overflowstat::make_layout(&size, &dense, 1));
    }
  }

  std::shared_ptr<Reading> launch(overflowstat::cuda::Recorder& recorder, int device, bool detail = false) const {
    std::vector<Reading::Entry> entries(layouts.size());
    std::vector<overflowstat::cuda::Source> sources;
    for (size_t i = 0; i < layouts.size(); ++i) {
      entries[i].format = overflowstat::Format::kFloat32;
      sources.push_back({data.data() + 100 * i, static_cast<int8_t>(device), entries[i].format, &layouts[i], i});
    }
    auto reading = std::make_shared<Reading>(std::move(entries));
    recorder.launch(sources, *reading, detail);
    return reading;
  }

  void check(Reading& reading) const {
    const float value = data[0];
    uint32_t key;
    memcpy(&key, &value, sizeof(key));
    const auto entries = reading.rows(std::chrono::seconds(60));
    for (size_t i = 0; i < entries.size(); ++i) {
      const auto& [format, repeat, negated, row, missing, detail] = entries[i];
      const bool right = missing.empty() && row.abs_min == key && row.finite_abs_max == key &&
                         row.numel == static_cast<uint64_t>(layouts[i].count);
      if (!right) {
        fprintf(stderr, "row %zu of %zu is wrong: numel %lu, %s\n", i, entries.size(), row.numel, missing.c_str());
        ++wrong;
      }
    }
  }
};

void launch_and_hand_on(overflowstat::cuda::Recorder& recorder, int device, int64_t stream) {
  c10::cuda::setCurrentCUDAStream({static_cast<int8_t>(device), stream});
  for (int round = 0; round < kRounds; ++round) {
    const List short_list(2 + round % 3, 1.0f + stream), long_list(70, 2.0f + round + stream);
    const auto first = short_list.launch(recorder, device),
               second = long_list.launch(recorder, device, /*detail=*/true);
    std::thread reader([&] {
      while (!first->ready()) std::this_thread::yield();
      short_list.check(*first);
      long_list.check(*second);
    });
    long_list.check(*second);
    short_list.check(*first);
    reader.join();
  }
}

void capture_and_replay(overflowstat::cuda::Recorder& recorder, int device, int64_t stream,
                        cudaStreamCaptureMode mode) {
  c10::cuda::setCurrentCUDAStream({static_cast<int8_t>(device), stream});
  CUstream_st* const handle = fake_cuda::stream(device, stream);
  for (int round = 0; round < kRounds / 4; ++round) {
    const List list(70 + round % 3, 3.0f + round);
    int graph = 0;
    fake_cuda::begin_capture(handle, mode);
    const auto reading = list.launch(recorder, device);
    wrong += fake_cuda::end_capture(handle, &graph) != cudaSuccess;
    for (int replay = 0; replay < 3; ++replay) fake_cuda::replay(graph, handle);
    const auto replays = reading->replays(std::chrono::seconds(60));
    wrong += !replays || replays->count != 3 || !replays->failure.empty();
    list.check(*reading);
    fake_cuda::destroy_graph(graph);
  }
}

}  // namespace

int main() {
  overflowstat::cuda::Recorder recorder(256);
  fake_cuda::start_workers(3);
  std::vector<std::thread> threads;
  for (int n = 0; n < 3; ++n) threads.emplace_back([&, n] { launch_and_hand_on(recorder, n % 2, 1 + n); });
  threads.emplace_back([&] { capture_and_replay(recorder, 0, 10, cudaStreamCaptureModeGlobal); });
  threads.emplace_back([&] { capture_and_replay(recorder, 1, 10, cudaStreamCaptureModeThreadLocal); });
  for (std::thread& thread : threads) thread.join();
  fake_cuda::stop_workers();
  for (const std::string& fault : fake_cuda::take_faults()) {
    fprintf(stderr, "fault: %s\n", fault.c_str());
    ++wrong;
  }
  return wrong == 0 ? 0 : 1;
}
