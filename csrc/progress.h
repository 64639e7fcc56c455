// Waiting for a device: never inside of it, never for ever.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>

namespace overflowstat {

enum class Progress {
  kRunning,   // there may still come something
  kFinished,  // all that was launched is done
  kFailed     // nothing will come any more
};

// What a device is doing and, if it failed, why. Called while waiting, from the thread that waits.
using Poll = std::function<std::pair<Progress, std::string>()>;

struct Wait {
  std::string failure;     // of the device, or that it took longer than the limit; empty if it finished
  bool timed_out = false;  // it may still go on
  bool waited = false;     // there was something to wait for
};

// Waits until done() or nothing more will come, for `limit` at most.
template <class Done>
Wait wait_until(Done done, const Poll& poll, std::chrono::nanoseconds limit) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + limit;
  Wait wait;
  for (int64_t round = 0; !done(); ++round) {
    wait.waited = true;
    auto [progress, reason] = poll();
    if (progress == Progress::kFinished) return wait;
    if (progress == Progress::kFailed) {
      wait.failure = std::move(reason);
      return wait;
    }
    if (Clock::now() >= deadline) {
      wait.failure = "the device did not answer in time";
      wait.timed_out = true;
      return wait;
    }
    // A row is microseconds away, or most of a forward: look often at first, then leave the core to others.
    if (round < 1000) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  return wait;
}

}  // namespace overflowstat
