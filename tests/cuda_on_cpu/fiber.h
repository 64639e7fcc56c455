// A stack of its own and a switch to it: what one CUDA thread becomes on the CPU.
//
// The sanitizers are told of each switch. To ThreadSanitizer a fiber is a thread, and a switch orders nothing.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#ifndef __x86_64__
#include <ucontext.h>
#endif

#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif
#ifdef __SANITIZE_ADDRESS__
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_size);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}
#endif

// The scheduler's own data are shared by all fibers without any order that ThreadSanitizer could know of.
#define CUDA_ON_CPU_UNSEEN __attribute__((noinline, no_sanitize("thread")))

namespace cuda_on_cpu {

inline void acquire([[maybe_unused]] void* address) {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(address);
#endif
}
inline void release([[maybe_unused]] void* address) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(address);
#endif
}

#ifdef __x86_64__
// Saves what the System V ABI lets a callee keep, and changes stacks: ten times as fast as swapcontext, which also
// calls the kernel for the signal mask.
extern "C" void cuda_on_cpu_switch(void** save, void* load);
asm(R"(
.text
.weak cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size cuda_on_cpu_switch, . - cuda_on_cpu_switch
)");
#endif

class Fiber {
 public:
  static constexpr size_t kStackBytes = 128 << 10;

  // The fiber of an OS thread that is already running.
  CUDA_ON_CPU_UNSEEN void adopt_current() {
#ifdef __SANITIZE_THREAD__
    tsan_ = __tsan_get_current_fiber();
#endif
  }

  // `entry` runs on `stack` at the first switch and must never return.
  CUDA_ON_CPU_UNSEEN void prepare(char* stack, void (*entry)()) {
#ifdef __SANITIZE_THREAD__
    tsan_ = __tsan_create_fiber(0);
#endif
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack, kStackBytes);
    bottom_ = stack;
    size_ = kStackBytes;
#endif
#ifdef __x86_64__
    void** top = reinterpret_cast<void**>(stack + kStackBytes - 16);
    *--top = nullptr;  // where entry would return to; leaves the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack_pointer_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  CUDA_ON_CPU_UNSEEN void destroy() {
#ifdef __SANITIZE_THREAD__
    __tsan_destroy_fiber(tsan_);
#endif
  }

  // From here to another fiber; returns when something switches back.
  CUDA_ON_CPU_UNSEEN void switch_to(Fiber& other, [[maybe_unused]] bool ends) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack_, other.bottom_, other.size_);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(other.tsan_, /*no synchronisation*/ 1);
#endif
#ifdef __x86_64__
    cuda_on_cpu_switch(&stack_pointer_, other.stack_pointer_);
#else
    swapcontext(&context_, &other.context_);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  // First thing on a new fiber, entered from `from`.
  CUDA_ON_CPU_UNSEEN void arrived_from([[maybe_unused]] Fiber& from) {
#ifdef __SANITIZE_ADDRESS__
    const void* bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (from.size_ == 0) {
      from.bottom_ = bottom;
      from.size_ = size;
    }
#endif
  }

 private:
#ifdef __x86_64__
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
#ifdef __SANITIZE_THREAD__
  void* tsan_ = nullptr;
#endif
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack_ = nullptr;
  const void* bottom_ = nullptr;
  size_t size_ = 0;
#endif
};

// The stacks of one OS thread's fibers, each above a page that must not be touched.
class Stacks {
 public:
  explicit Stacks(unsigned count) : bytes_(count * kEach) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      perror("cuda_on_cpu: mmap of stacks");
      abort();
    }
    memory_ = static_cast<char*>(memory);
    for (unsigned i = 0; i < count; ++i) mprotect(memory_ + i * kEach, kGuard, PROT_NONE);
  }
  ~Stacks() { munmap(memory_, bytes_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  char* operator[](unsigned i) const { return memory_ + i * kEach + kGuard; }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr size_t kEach = Fiber::kStackBytes + kGuard;
  size_t bytes_;
  char* memory_;
};

}  // namespace cuda_on_cpu
