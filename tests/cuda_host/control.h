// What tests do with the machine of machine.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "machine.h"

namespace fake_cuda {

// As new, but that streams, memory and numbers of captures go on. `order` is the seed of the order in which streams
// have their turns.
void reset(unsigned order);

// Calls of the runtime and allocations of torch's, by name, and launches, since the last clear_counts().
std::map<std::string, int64_t> counts();
struct LaunchRecord {
  int device;
  int64_t stream;
  uint64_t capture;
  Launch launch;
};
std::vector<LaunchRecord> launches();
void clear_counts();
std::vector<std::string> take_faults();
int64_t bytes_of_memory(int device);  // pinned memory: -1

// The call of this name returns an error, after so many that do not.
void fail_call(const std::string& name, int skip, cudaError_t error);
// The context of a device is gone with an assertion when so many more kernels have run.
void assert_after(int device, int64_t kernels);

// Letting devices work. A turn is one block of a kernel, of any stream, or another operation.
uint64_t waiting(CUstream_st* stream);
void run_operations(CUstream_st* stream, uint64_t most);
uint64_t run_all_turns(uint64_t most);  // returns how many there were
void set_turns_a_query(int turns);      // that devices have before a query of a stream is answered; 1 if not set
void start_workers(int count);          // threads that give turns all the time
void stop_workers();

// What a user of torch does: events, and CUDA graphs.
void wait_for(CUstream_st* waiter, CUstream_st* other);
cudaError_t begin_capture(CUstream_st* stream, cudaStreamCaptureMode mode);
cudaError_t end_capture(CUstream_st* stream, int* graph);
std::vector<std::string> kinds_of_nodes(int graph);
cudaError_t replay(int graph, CUstream_st* stream);
void destroy_graph(int graph);

}  // namespace fake_cuda
