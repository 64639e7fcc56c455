// What CUDA's headers give device code, for g++: it compiles that as it is, and runs a grid on the CPU.
//
// A block is one OS thread, its CUDA threads are fibers on it, so __shared__ is `static thread_local`. Fibers switch
// only where CUDA threads may wait for each other: __syncthreads and the *_sync collectives. Only __syncthreads and
// __syncwarp order memory for ThreadSanitizer; shuffles and votes do not, as in CUDA's memory model.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "fiber.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// An OS thread runs one block at a time, and each turn of a fiber begins with its own threadIdx.
inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

namespace cuda_on_cpu {

constexpr unsigned kWarpSize = 32;

struct Site {
  const char* file;
  int line;
  bool operator==(const Site& other) const { return line == other.line && strcmp(file, other.file) == 0; }
};

[[noreturn]] inline void fail(const char* what, Site site) {
  fprintf(stderr, "cuda_on_cpu: %s at %s:%d\n", what, site.file, site.line);
  fflush(stderr);
  abort();
}

// Where the threads of a block, or the lanes of a warp, wait for each other.
struct Meeting {
  unsigned arrived = 0;
  unsigned generation = 0;
  Site site{nullptr, 0};
  char order[2];  // addresses for ThreadSanitizer, one for each of two consecutive generations
};

struct Warp {
  Meeting collective, barrier;
  unsigned mask = 0;
  uint64_t exchanged[2][kWarpSize];
};

struct Block;
struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  unsigned index = 0, lane = 0;
  uint3 thread_idx{};
  bool done = false;
  bool fenced = false;
  std::vector<void*> observed;  // addresses of atomics since the last fence
};

struct Block {
  const std::function<void()>* body = nullptr;
  Thread host;
  std::unique_ptr<Thread[]> threads;
  std::unique_ptr<Warp[]> warps;
  std::unique_ptr<unsigned[]> order, position;  // turn -> thread, thread -> turn
  unsigned size = 0, alive = 0;
  Meeting barrier;
  unsigned turns_without_progress = 0;
};

inline thread_local Thread* current = nullptr;

CUDA_ON_CPU_UNSEEN inline Warp& current_warp() { return current->block->warps.get()[current->index / kWarpSize]; }

CUDA_ON_CPU_UNSEEN inline void give_turn_to(Thread* next) {
  Thread* self = current;
  current = next;
  threadIdx = next->thread_idx;
  self->fiber.switch_to(next->fiber, self->done);
}

CUDA_ON_CPU_UNSEEN inline Thread* next_alive(Thread* self) {
  Block* block = self->block;
  const unsigned turn = block->position.get()[self->index];
  for (unsigned ahead = 1; ahead <= block->size; ++ahead) {
    Thread* candidate = &block->threads.get()[block->order.get()[(turn + ahead) % block->size]];
    if (!candidate->done) return candidate;
  }
  return &block->host;
}

CUDA_ON_CPU_UNSEEN inline void open(Meeting& meeting, Block* block) {
  meeting.arrived = 0;
  ++meeting.generation;
  block->turns_without_progress = 0;
}

CUDA_ON_CPU_UNSEEN inline void meet(Meeting& meeting, unsigned expected, bool orders_memory, Site site) {
  Block* block = current->block;
  const unsigned generation = meeting.generation;
  void* order = &meeting.order[generation % 2];
  if (orders_memory) release(order);
  if (meeting.arrived == 0) {
    meeting.site = site;
  } else if (!(meeting.site == site)) {
    fail("threads wait at different places", site);
  }
  if (++meeting.arrived == expected) {
    open(meeting, block);
  } else {
    while (meeting.generation == generation) {
      if (++block->turns_without_progress > 2 * block->alive + 2) fail("some threads never arrive", site);
      give_turn_to(next_alive(current));
    }
  }
  if (orders_memory) acquire(order);
}

CUDA_ON_CPU_UNSEEN inline void meet_block(Site site) {
  meet(current->block->barrier, current->block->alive, true, site);
}

CUDA_ON_CPU_UNSEEN inline void meet_warp(Meeting& meeting, unsigned mask, bool orders_memory, Site site) {
  Warp& warp = current_warp();
  if (!(mask >> current->lane & 1)) fail("the calling lane is not in its mask", site);
  if (meeting.arrived != 0 && warp.mask != mask) fail("the lanes of a warp name different masks", site);
  warp.mask = mask;
  meet(meeting, static_cast<unsigned>(__builtin_popcount(mask)), orders_memory, site);
}

// Every lane's value, for every lane of the mask to read until its next collective.
CUDA_ON_CPU_UNSEEN inline const uint64_t* exchange(unsigned mask, uint64_t value, Site site) {
  Warp& warp = current_warp();
  uint64_t* values = warp.exchanged[warp.collective.generation % 2];
  values[current->lane] = value;
  meet_warp(warp.collective, mask, false, site);
  return values;
}

CUDA_ON_CPU_UNSEEN inline void leave() {
  Thread* self = current;
  Block* block = self->block;
  self->done = true;
  --block->alive;
  block->turns_without_progress = 0;
  if (block->alive > 0 && block->barrier.arrived == block->alive) open(block->barrier, block);
  release(&block->host);
  give_turn_to(next_alive(self));
}

CUDA_ON_CPU_UNSEEN inline const std::function<void()>* current_body() {
  current->fiber.arrived_from(current->block->host.fiber);
  return current->block->body;
}

inline void thread_entry() {
  (*current_body())();
  leave();
  abort();
}

enum LaneOrder : unsigned { kRising, kFalling, kShuffled };  // from kShuffled on, the seed

inline unsigned lane_order = kRising;
inline unsigned workers = 1;  // OS threads that run blocks at once

inline void run_block(const Stacks& stacks, const std::function<void()>& body) {
  const unsigned size = blockDim.x * blockDim.y * blockDim.z;
  Block block;
  block.body = &body;
  block.size = block.alive = size;
  block.threads.reset(new Thread[size]);
  block.warps.reset(new Warp[(size + kWarpSize - 1) / kWarpSize]);
  block.order.reset(new unsigned[size]);
  block.position.reset(new unsigned[size]);
  for (unsigned i = 0; i < size; ++i) block.order[i] = lane_order == kFalling ? size - 1 - i : i;
  if (lane_order >= kShuffled) {
    std::shuffle(&block.order[0], &block.order[0] + size, std::mt19937(lane_order + blockIdx.x));
  }
  block.host.block = &block;
  block.host.fiber.adopt_current();
  current = &block.host;  // before there are fibers, which read it
  for (unsigned i = 0; i < size; ++i) {
    Thread& thread = block.threads[i];
    block.position[block.order[i]] = i;
    thread.block = &block;
    thread.index = i;
    thread.lane = i % kWarpSize;
    thread.thread_idx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    thread.fiber.prepare(stacks[i], thread_entry);
  }
  give_turn_to(&block.threads[block.order[0]]);
  acquire(&block.host);
  for (unsigned i = 0; i < size; ++i) block.threads[i].fiber.destroy();
}

// One block of a grid, on the calling thread.
inline void run_one_block(dim3 grid, dim3 block_dim, unsigned index, const Stacks& stacks,
                          const std::function<void()>& body) {
  gridDim = grid;
  blockDim = block_dim;
  blockIdx = {index % grid.x, index / grid.x % grid.y, index / (grid.x * grid.y)};
  run_block(stacks, body);
}

inline void run_grid(dim3 grid, dim3 block_dim, const std::function<void()>& body) {
  const unsigned blocks = grid.x * grid.y * grid.z;
  std::atomic<unsigned> next{0};
  auto run_some = [&](unsigned first, unsigned most) {
    const Stacks stacks(block_dim.x * block_dim.y * block_dim.z);
    for (unsigned i = first; most > 0 && i < blocks; i = next.fetch_add(1), --most) {
      run_one_block(grid, block_dim, i, stacks, body);
    }
  };
#ifdef __SANITIZE_THREAD__
  const unsigned count = blocks, most = 1;  // an OS thread's blocks would be ordered with each other
#else
  const unsigned count = std::min(blocks, workers), most = blocks;
#endif
  next = count;
  if (count == 1) return run_some(0, most);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < count; ++i) threads.emplace_back(run_some, i, most);
  for (std::thread& thread : threads) thread.join();
}

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(value));
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Atomic, but unordered with everything else: CUDA's atomics are relaxed. What a thread did before a fence is ordered
// before what another does after its own, if the first then writes an atomic and the other first reads what was
// written.
template <class T, class Change>
T change_atomically(T* address, Change change) {
  if (current->fenced) release(address);
  current->observed.push_back(address);
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, change(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUDA_ON_CPU_SITE) { cuda_on_cpu::meet_block({file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_ON_CPU_SITE) {
  cuda_on_cpu::meet_warp(cuda_on_cpu::current_warp().barrier, mask, true, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_ON_CPU_SITE) {
  const uint64_t* votes = cuda_on_cpu::exchange(mask, predicate != 0, {file, line});
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < cuda_on_cpu::kWarpSize; ++lane) {
    if (mask >> lane & 1) ballot |= static_cast<unsigned>(votes[lane]) << lane;
  }
  return ballot;
}
inline int __any_sync(unsigned mask, int predicate, CUDA_ON_CPU_SITE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, CUDA_ON_CPU_SITE) {
  const uint64_t* values = cuda_on_cpu::exchange(mask, cuda_on_cpu::to_bits(value), {file, line});
  return cuda_on_cpu::from_bits<T>(values[cuda_on_cpu::current->lane ^ static_cast<unsigned>(distance)]);
}

inline void __threadfence() {
  for (void* address : cuda_on_cpu::current->observed) cuda_on_cpu::acquire(address);
  cuda_on_cpu::current->observed.clear();
  cuda_on_cpu::current->fenced = true;
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
namespace cuda_on_cpu {
inline std::function<void()> on_system_fence;  // what the host finds when it looks just then
}
inline void __threadfence_system() {
  __threadfence();
  if (cuda_on_cpu::on_system_fence) cuda_on_cpu::on_system_fence();
}
inline unsigned long long atomicMax(unsigned long long* address, unsigned long long value) {
  return cuda_on_cpu::change_atomically(address, [=](unsigned long long old) { return std::max(old, value); });
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return cuda_on_cpu::change_atomically(address, [=](unsigned long long old) { return old + value; });
}
inline unsigned long long atomicExch(unsigned long long* address, unsigned long long value) {
  return cuda_on_cpu::change_atomically(address, [=](unsigned long long) { return value; });
}
template <class T>
T __ldg(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0) {
    cuda_on_cpu::fail("misaligned load", {__FILE__, __LINE__});
  }
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline unsigned __vminu2(unsigned a, unsigned b) {
  return std::min(a >> 16, b >> 16) << 16 | std::min(a & 0xffff, b & 0xffff);
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
