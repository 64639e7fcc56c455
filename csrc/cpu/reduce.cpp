#include "reduce.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "blocks.h"

namespace overflowstat::cpu {
namespace {

template <class F>
OVERFLOWSTAT_INLINE void scan_block_with_non_finite(const char* data, int64_t count, uint64_t index, StatsRow& row) {
  for (int64_t i = 0; i < count; ++i) {
    const auto element = load<typename F::Element>(data, i);
    const auto key = F::key(element);
    if (key < F::kFirstNan) row.abs_min = std::min<uint64_t>(row.abs_min, key);
    if (key < F::kFirstNonFinite) {
      row.finite_abs_max = std::max<uint64_t>(row.finite_abs_max, key);
    } else {
      count_non_finite<F>(row, element, index + i);
    }
  }
}

// Zeros, subnormals and the smallest that is no zero, of a block in L1. Counts in the width of the keys, so that
// compilers vectorise it: of 8-bit ones no more at a time than that holds.
template <class F>
OVERFLOWSTAT_INLINE void count_small_block(const char* data, int64_t count, Detail& detail) {
  using Key = typename F::Key;
  constexpr int64_t kAtOnce = sizeof(Key) == 1 ? 128 : kBlockBytes;
  Key smallest = static_cast<Key>(~Key{0});
  for (int64_t begin = 0; begin < count; begin += kAtOnce) {
    const int64_t end = std::min(begin + kAtOnce, count);
    Key zeros = 0, below_normal = 0;
    for (int64_t i = begin; i < end; ++i) {
      const Key key = F::key(load<typename F::Element>(data, i));
      zeros = static_cast<Key>(zeros + is_zero<F>(key));
      below_normal = static_cast<Key>(below_normal + is_below_normal<F>(key));
      const Key beyond_zero = static_cast<Key>(key - F::kFirstNonZero);  // of a zero the largest key
      smallest = beyond_zero < smallest ? beyond_zero : smallest;
    }
    detail.zero_count += zeros;
    detail.subnormal_count += below_normal - zeros;
  }
  if (smallest != static_cast<Key>(~Key{0})) {
    detail.abs_min_nonzero = std::min<uint64_t>(detail.abs_min_nonzero, uint64_t{smallest} + F::kFirstNonZero);
  }
}

// count_small_block, not inlined: there are many places where it is called.
using Count = void (*)(const char* data, int64_t count, Detail& detail);

// The loop that reads memory: `kStreams` blocks of `count` elements, `distance` elements apart. Kept to integer minima
// and maxima, which compilers vectorise. A core gets more from memory by following two places at once (256 MB in 0.9 of
// what torch's sum takes, with one place in 1.1 to 1.2, on two Zen 3 cores). Detail has no other loop: `kCount`, null
// where it is not asked for, looks again at a block that holds something below the normal numbers.
template <class F, Count kCount, int kStreams>
OVERFLOWSTAT_INLINE void scan_blocks(const char* data, int64_t count, int64_t distance, uint64_t index, StatsRow& row,
                                     Detail& detail) {
  using Element = typename F::Element;
  using Key = typename F::Key;
  Key smallest[kStreams], largest[kStreams];
  for (int s = 0; s < kStreams; ++s) {
    smallest[s] = static_cast<Key>(~Key{0});
    largest[s] = 0;
  }
#pragma GCC unroll 2  // of the vectorised loop: data in cache is read a seventh faster
  for (int64_t i = 0; i < count; ++i) {
    for (int s = 0; s < kStreams; ++s) {
      const Key key = F::key(load<Element>(data, i + s * distance));
      smallest[s] = key < smallest[s] ? key : smallest[s];
      largest[s] = key > largest[s] ? key : largest[s];
    }
  }
  for (int s = 0; s < kStreams; ++s) {
    const char* block = data + s * distance * static_cast<int64_t>(sizeof(Element));
    if constexpr (kCount != nullptr) {
      if (is_below_normal<F>(smallest[s])) {
        kCount(block, count, detail);
      } else {
        detail.abs_min_nonzero = std::min<uint64_t>(detail.abs_min_nonzero, smallest[s]);
      }
    }
    if (!F::kIsInteger && largest[s] >= F::kFirstNonFinite) {
      scan_block_with_non_finite<F>(block, count, index + s * distance, row);
    } else {
      row.abs_min = std::min<uint64_t>(row.abs_min, smallest[s]);
      row.finite_abs_max = std::max<uint64_t>(row.finite_abs_max, largest[s]);
    }
  }
}

template <class F, Count kCount>
OVERFLOWSTAT_INLINE void scan_contiguous(const char* data, int64_t count, uint64_t index, StatsRow& row,
                                         Detail& detail) {
  constexpr int64_t kSize = sizeof(typename F::Element);
  constexpr int64_t kBlock = kBlockBytes / kSize;
  row.numel += count;
  const int64_t half = count / (2 * kBlock) * kBlock;
  for (int64_t i = 0; i < half; i += kBlock) {
    scan_blocks<F, kCount, 2>(data + i * kSize, kBlock, half, index + i, row, detail);
  }
  for (int64_t i = 2 * half; i < count; i += kBlock) {
    scan_blocks<F, kCount, 1>(data + i * kSize, std::min(kBlock, count - i), 0, index + i, row, detail);
  }
}

// Walks elements [begin, end) of a tensor that is not dense, in memory order. Runs that are contiguous are scanned
// where they lie; others are gathered into a block on the stack, never more than kBlockBytes of them.
template <class F, Count kCount>
OVERFLOWSTAT_INLINE void scan_strided(const char* data, const Layout& layout, int64_t begin, int64_t end, StatsRow& row,
                                      Detail& detail) {
  using Element = typename F::Element;
  constexpr int64_t kSize = sizeof(Element);
  constexpr int64_t kBlock = kBlockBytes / kSize;
  const auto& dimensions = layout.dimensions;
  const int64_t rank = static_cast<int64_t>(dimensions.size());
  const Layout::Dimension inner = dimensions[rank - 1];

  std::vector<int64_t> position(rank);
  int64_t offset = 0;
  for (int64_t d = rank - 1, rest = begin; d >= 0; --d) {
    position[d] = rest % dimensions[d].size;
    rest /= dimensions[d].size;
    offset += position[d] * dimensions[d].stride;
  }

  alignas(64) char gathered[kBlockBytes];
  int64_t held = 0;
  for (int64_t at = begin; at < end;) {
    const int64_t run = std::min(inner.size - position[rank - 1], end - at);
    if (inner.stride == 1 && run * kSize >= 512) {
      scan_contiguous<F, kCount>(gathered, held, at - held, row, detail);
      held = 0;
      scan_contiguous<F, kCount>(data + offset * kSize, run, at, row, detail);
    } else {
      for (int64_t i = 0; i < run; ++i) {
        memcpy(gathered + held * kSize, data + (offset + i * inner.stride) * kSize, kSize);
        if (++held == kBlock) {
          scan_contiguous<F, kCount>(gathered, held, at + i + 1 - held, row, detail);
          held = 0;
        }
      }
    }
    at += run;
    offset += run * inner.stride;
    position[rank - 1] += run;
    for (int64_t d = rank - 1; d > 0 && position[d] == dimensions[d].size; --d) {
      offset += dimensions[d - 1].stride - dimensions[d].size * dimensions[d].stride;
      position[d] = 0;
      ++position[d - 1];
    }
  }
  scan_contiguous<F, kCount>(gathered, held, end - held, row, detail);
}

// While it lives, subnormals are what they are on this thread, also under torch.set_flush_denormal(True). Only the
// modulus of complex numbers is computed in floating point, and cares.
class SubnormalsKept {
#if defined(__x86_64__)
 public:
  SubnormalsKept() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ & ~(kFlushToZero | kAreZero)); }
  ~SubnormalsKept() { __builtin_ia32_ldmxcsr(saved_); }
  SubnormalsKept(const SubnormalsKept&) = delete;
  SubnormalsKept& operator=(const SubnormalsKept&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 1u << 15, kAreZero = 1u << 6;
  unsigned saved_;
#endif
};

template <class F, Count kCount>
OVERFLOWSTAT_INLINE void scan(const Tensor& tensor, int64_t begin, int64_t end, StatsRow& row, Detail& detail) {
  const char* data = static_cast<const char*>(tensor.data);
  if (tensor.layout.is_dense()) {
    const char* first = data + begin * static_cast<int64_t>(sizeof(typename F::Element));
    scan_contiguous<F, kCount>(first, end - begin, begin, row, detail);
  } else {
    scan_strided<F, kCount>(data, tensor.layout, begin, end, row, detail);
  }
}

using Scan = void (*)(const Tensor&, int64_t begin, int64_t end, StatsRow&, Detail&);

template <class F>
__attribute__((noinline)) void count_small(const char* data, int64_t count, Detail& detail) {
  count_small_block<F>(data, count, detail);
}
template <class F, bool kDetail>
void scan_baseline(const Tensor& tensor, int64_t begin, int64_t end, StatsRow& row, Detail& detail) {
  scan<F, kDetail ? count_small<F> : nullptr>(tensor, begin, end, row, detail);
}

// x86-64's baseline (SSE2) has no unsigned 16- and 32-bit minimum, AVX2 has; a wheel must run without it all the same.
#if defined(__x86_64__)
template <class F>
__attribute__((noinline, target("avx2"))) void count_small_avx2(const char* data, int64_t count, Detail& detail) {
  count_small_block<F>(data, count, detail);
}
template <class F, bool kDetail>
__attribute__((target("avx2"))) void scan_avx2(const Tensor& tensor, int64_t begin, int64_t end, StatsRow& row,
                                               Detail& detail) {
  scan<F, kDetail ? count_small_avx2<F> : nullptr>(tensor, begin, end, row, detail);
}
#endif

template <bool kDetail>
Scan scan_for(Format format) {
  return with_format(format, [](auto f) -> Scan {
    using F = decltype(f);
#if defined(__x86_64__)
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    if (has_avx2) return scan_avx2<F, kDetail>;
#endif
    return scan_baseline<F, kDetail>;
  });
}

Scan scan_for(Format format, bool detail) { return detail ? scan_for<true>(format) : scan_for<false>(format); }

// The list cut into pieces, so that threads share one huge tensor as well as a thousand small ones.
struct Piece {
  size_t tensor;
  int64_t begin, end;
};

void reduce_in_parallel(const Tensor* tensors, const std::vector<Piece>& pieces, StatsRow* rows, Detail* details) {
  std::mutex rows_mutex;
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const SubnormalsKept kept;
    for (int64_t i = begin; i < end;) {
      const size_t t = pieces[i].tensor;
      const Scan scan = scan_for(tensors[t].format, details != nullptr);
      StatsRow row;
      Detail detail;
      for (; i < end && pieces[i].tensor == t; ++i) scan(tensors[t], pieces[i].begin, pieces[i].end, row, detail);
      const std::lock_guard<std::mutex> lock(rows_mutex);
      rows[t] = merge(rows[t], row);
      if (details != nullptr) details[t] = merge(details[t], detail);
    }
  });
}

}  // namespace

void reduce(const Tensor* tensors, size_t count, StatsRow* rows, Detail* details) {
  int64_t bytes = 0;
  for (size_t t = 0; t < count; ++t) bytes += tensors[t].layout.count * element_size(tensors[t].format);
  std::fill(rows, rows + count, StatsRow{});
  if (details != nullptr) std::fill(details, details + count, Detail{});

  if (bytes < 2 * kPieceBytes) {
    [[maybe_unused]] const SubnormalsKept kept;
    Detail unused;
    for (size_t t = 0; t < count; ++t) {
      if (tensors[t].layout.count == 0) continue;
      const Scan scan = scan_for(tensors[t].format, details != nullptr);
      scan(tensors[t], 0, tensors[t].layout.count, rows[t], details != nullptr ? details[t] : unused);
    }
    return;
  }
  std::vector<Piece> pieces;
  pieces.reserve(bytes / kPieceBytes + count);
  for (size_t t = 0; t < count; ++t) {
    const int64_t step = kPieceBytes / element_size(tensors[t].format);
    for (int64_t begin = 0; begin < tensors[t].layout.count; begin += step) {
      pieces.push_back({t, begin, std::min(begin + step, tensors[t].layout.count)});
    }
  }
  reduce_in_parallel(tensors, pieces, rows, details);
}

}  // namespace overflowstat::cpu
