#include "count.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <type_traits>

#include "blocks.h"

namespace overflowstat::cpu {
namespace {

// The smallest key that is worth `threshold` or more: kFirstNan where no number is.
template <class F>
uint64_t key_of(double threshold) {
  uint64_t low = 0, high = F::kFirstNan;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (F::value(static_cast<typename F::Key>(middle)) >= threshold) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Elements with begin <= key < kFirstNan, of a block that every threshold looks at again. Counted in integers of the
// key's width, so that compilers vectorise it: `count` may be no more than they hold.
template <class F>
OVERFLOWSTAT_INLINE uint64_t count_block(const char* data, int64_t count, typename F::Key begin) {
  using Element = typename F::Element;
  using Key = typename F::Key;
  const Key width = static_cast<Key>(F::kFirstNan - begin);
  Key found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found += static_cast<Key>(static_cast<Key>(F::key(load<Element>(data, i)) - begin) < width);
  }
  return found;
}

template <class F>
OVERFLOWSTAT_INLINE void count(const char* data, int64_t count, const std::vector<uint64_t>& keys, uint64_t* found) {
  constexpr int64_t kSize = sizeof(typename F::Element);
  constexpr uint64_t kMost = std::numeric_limits<typename F::Key>::max();
  constexpr int64_t kBlock = kMost < kBlockBytes / kSize ? static_cast<int64_t>(kMost) : kBlockBytes / kSize;
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t here = std::min(kBlock, count - i);
    for (size_t k = 0; k < keys.size(); ++k) {
      found[k] += count_block<F>(data + i * kSize, here, static_cast<typename F::Key>(keys[k]));
    }
  }
}

using Count = void (*)(const char* data, int64_t count, const std::vector<uint64_t>& keys, uint64_t* found);

template <class F>
void count_baseline(const char* data, int64_t elements, const std::vector<uint64_t>& keys, uint64_t* found) {
  count<F>(data, elements, keys, found);
}

// As in reduce.cpp: x86-64's baseline has no unsigned minimum.
#if defined(__x86_64__)
template <class F>
__attribute__((target("avx2"))) void count_avx2(const char* data, int64_t elements, const std::vector<uint64_t>& keys,
                                                uint64_t* found) {
  count<F>(data, elements, keys, found);
}
#endif

template <class F>
Count count_for() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return count_avx2<F>;
#endif
  return count_baseline<F>;
}

}  // namespace

std::optional<std::vector<uint64_t>> count_at_least(const Tensor& tensor, const std::vector<double>& thresholds) {
  using Counts = std::optional<std::vector<uint64_t>>;
  return with_format(tensor.format, [&](auto f) -> Counts {
    using F = decltype(f);
    constexpr bool kIsComplex = std::is_class_v<typename F::Element>;
    if constexpr (F::kIsInteger || kIsComplex) {
      return std::nullopt;
    } else {
      if (!tensor.layout.is_dense()) return std::nullopt;
      std::vector<uint64_t> keys(thresholds.size());
      std::transform(thresholds.begin(), thresholds.end(), keys.begin(), key_of<F>);
      std::vector<uint64_t> found(keys.size(), 0);
      std::mutex mutex;
      constexpr int64_t kSize = sizeof(typename F::Element);
      at::parallel_for(0, tensor.layout.count, kPieceBytes / kSize, [&](int64_t begin, int64_t end) {
        std::vector<uint64_t> here(keys.size(), 0);
        count_for<F>()(static_cast<const char*>(tensor.data) + begin * kSize, end - begin, keys, here.data());
        const std::lock_guard<std::mutex> lock(mutex);
        for (size_t k = 0; k < here.size(); ++k) found[k] += here[k];
      });
      return found;
    }
  });
}

}  // namespace overflowstat::cpu
