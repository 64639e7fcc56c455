// csrc/recorder.h for a device that is late: it reads host memory when it is told to, or waited for, and not before.
// With it in place of csrc/recorder.cpp the extension runs as on a GPU, where a test decides when what comes.

#define describe describe_host_memory
#define record record_host_memory
#define current_capture no_capture
#include "../../csrc/recorder.cpp"
#undef describe
#undef record
#undef current_capture

#include <atomic>
#include <map>

namespace overflowstat {
namespace {

constexpr size_t kRows = 4096;

struct Launch {
  std::vector<StatsRow> found;  // of each slot, as they were at the launch
  std::shared_ptr<Frame> frame;
};

struct CapturedLaunch {
  std::vector<cpu::Tensor> tensors;  // read in each replay
  bool detail;
  std::shared_ptr<StampedRow> rows;
};

struct Graph {
  std::vector<CapturedLaunch> launches;
  std::shared_ptr<std::atomic<bool>> is_gone = std::make_shared<std::atomic<bool>>(false);
};

struct Device {
  std::mutex mutex;
  std::vector<StampedRow> memory = std::vector<StampedRow>(kRows);
  Ring ring{memory.data(), kRows, std::chrono::seconds(1)};
  std::deque<Launch> launches;
  std::map<uint64_t, Graph> graphs;
  std::string failure;
  uint64_t capture = 0;
};

std::unique_ptr<Device>& device() {
  static auto& device = *new std::unique_ptr<Device>(new Device);
  return device;
}

// What a device writes into the slots.
std::vector<StatsRow> read(const std::vector<cpu::Tensor>& tensors, bool detail) {
  std::vector<StatsRow> rows(tensors.size()), slots;
  std::vector<Detail> details(tensors.size());
  cpu::reduce(tensors.data(), tensors.size(), rows.data(), detail ? details.data() : nullptr);
  for (size_t i = 0; i < rows.size(); ++i) {
    slots.push_back(rows[i]);
    if (detail) slots.push_back(as_row(details[i]));
  }
  return slots;
}

void write(StampedRow* slot, const StatsRow& row, uint64_t stamp) {
  slot->row = row;
  __atomic_store_n(&slot->stamp, stamp, __ATOMIC_RELEASE);
}

// The first `count` launches are done, or all.
void finish(int64_t count) {
  Device& it = *device();
  const std::lock_guard<std::mutex> lock(it.mutex);
  for (; count != 0 && !it.launches.empty(); --count) {
    const Launch& launch = it.launches.front();
    for (size_t i = launch.found.size(); i-- > 0;) {  // a detail before its row
      write(launch.frame->rows() + i, launch.found[i], launch.frame->stamp());
    }
    it.launches.pop_front();
  }
}

// Whoever waits sees it finish.
std::pair<Progress, std::string> poll() {
  if (!device()->failure.empty()) return {Progress::kFailed, device()->failure};
  finish(-1);
  return {Progress::kRunning, ""};
}

std::pair<Progress, std::string> poll_replays() {
  if (!device()->failure.empty()) return {Progress::kFailed, device()->failure};
  return {Progress::kFinished, ""};
}

}  // namespace

std::string describe(const at::Tensor& tensor, Readable& readable) {
  std::string reason = describe_host_memory(tensor, readable);
  if (reason.empty()) readable.device = at::Device(at::kCUDA, 0);
  return reason;
}

std::shared_ptr<Reading> record(std::vector<Readable> tensors, bool detail) {
  std::vector<Reading::Entry> entries;
  std::vector<cpu::Tensor> memory;
  std::vector<size_t> places;
  for (Readable& tensor : tensors) {
    entries.push_back(
        {tensor.memory.format, tensor.memory.layout.repeat, tensor.negated, StatsRow{}, "", std::nullopt});
    places.push_back(places.size());
    memory.push_back(std::move(tensor.memory));
  }
  const auto reading = std::make_shared<Reading>(std::move(entries));
  const size_t slots = memory.size() * slots_each(detail);
  Device& it = *device();
  if (it.capture != 0) {
    Graph& graph = it.graphs[it.capture];
    const std::shared_ptr<StampedRow> rows(new StampedRow[slots], std::default_delete<StampedRow[]>());
    graph.launches.push_back({memory, detail, rows});
    reading->add(std::make_shared<ReplayedRows>(rows, slots, graph.is_gone, poll_replays), places, 1, detail);
    return reading;
  }
  const std::shared_ptr<Frame> frame = it.ring.begin(slots, poll);
  std::vector<StatsRow> found = read(memory, detail);
  const std::lock_guard<std::mutex> lock(it.mutex);
  it.launches.push_back({std::move(found), frame});
  reading->add(frame, places, 1, detail);
  return reading;
}

uint64_t current_capture() { return device()->capture; }

}  // namespace overflowstat

// What a test tells the device.
extern "C" {
#define FOR_TESTS __attribute__((visibility("default")))
FOR_TESTS void late_reset() { overflowstat::device() = std::make_unique<overflowstat::Device>(); }
FOR_TESTS void late_finish(int64_t launches) { overflowstat::finish(launches); }
FOR_TESTS int64_t late_pending() { return static_cast<int64_t>(overflowstat::device()->launches.size()); }
FOR_TESTS void late_fail(const char* reason) { overflowstat::device()->failure = reason; }
FOR_TESTS void late_capture(uint64_t graph) { overflowstat::device()->capture = graph; }
FOR_TESTS void late_replay(uint64_t graph, int64_t launches) {
  for (auto& [tensors, detail, rows] : overflowstat::device()->graphs[graph].launches) {
    if (launches-- == 0) return;
    const auto found = overflowstat::read(tensors, detail);
    for (size_t i = 0; i < found.size(); ++i) {
      overflowstat::write(rows.get() + i, found[i], rows.get()[i].stamp + 1);
    }
  }
}
FOR_TESTS void late_drop(uint64_t graph) { *overflowstat::device()->graphs[graph].is_gone = true; }
}
