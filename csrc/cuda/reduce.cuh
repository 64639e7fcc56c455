// The pass on a CUDA device. Includes nothing but CUDA's own headers, so that tests/cuda_on_cpu can run this very file.
//
// A row is combined in three steps: each thread over what it reads, each block through shared memory, all blocks
// through integer atomics on a workspace that is all zero between launches. Integer minima, maxima and sums commute, so
// the result does not depend on which block or lane comes first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../number_format.h"
#include "../stats_row.h"
#include "packed.cuh"
#include "reduce.h"

namespace overflowstat::cuda {

// The tests make both small, so that little data has many blocks and many chunk edges.
#ifndef OVERFLOWSTAT_CUDA_THREADS
#define OVERFLOWSTAT_CUDA_THREADS 256
#endif
#ifndef OVERFLOWSTAT_CUDA_CHUNK_BYTES
#define OVERFLOWSTAT_CUDA_CHUNK_BYTES 65536
#endif

constexpr uint32_t kThreads = OVERFLOWSTAT_CUDA_THREADS;
constexpr uint32_t kWarpSize = 32;
constexpr uint32_t kWarps = kThreads / kWarpSize;
constexpr uint32_t kAllLanes = 0xffffffffu;
// What a multiprocessor should hold at once: 64 KiB of loads in flight, and 64 registers for a thread.
constexpr uint32_t kBlocksPerMultiprocessor = 4;

// The unit in which tensors are dealt out to blocks: a multiple of every element's size, and small enough that the
// shares of all blocks take about the same time.
constexpr uint64_t kChunkBytes = OVERFLOWSTAT_CUDA_CHUNK_BYTES;
constexpr uint64_t kVectorBytes = sizeof(uint4);
static_assert(kThreads % kWarpSize == 0 && kChunkBytes % kVectorBytes == 0, "whole warps, whole vectors");

// A StatsRow in a form whose identity is all zero: minima are complemented, so that every field is a maximum or a sum.
struct Partial {
  unsigned long long not_abs_min;
  unsigned long long finite_abs_max;
  unsigned long long not_first_bad;  // 0: every element was finite, and the counts are 0 too
  unsigned long long nan_count;
  unsigned long long posinf_count;
  unsigned long long neginf_count;
};

__device__ __forceinline__ Partial to_partial(const StatsRow& row) {
  return {~row.abs_min, row.finite_abs_max, ~row.first_bad, row.nan_count, row.posinf_count, row.neginf_count};
}

// The same with detail: then the minimum is over the elements that are not zero.
struct DetailedPartial : Partial {
  unsigned long long zero_count;
  unsigned long long subnormal_count;
};
static_assert(sizeof(DetailedPartial) <= slots_each(true) * sizeof(Partial), "workspace_bytes counts slots");

template <bool kDetail>
using PartialOf = std::conditional_t<kDetail, DetailedPartial, Partial>;

// What this thread found in items that are not all finite. In shared memory because it is rarely touched: in registers
// it would cost the common case its loads in flight.
__device__ __forceinline__ Partial& rare_partial() {
  __shared__ Partial of_thread[kThreads];
  return of_thread[threadIdx.x];
}

struct Workspace {
  unsigned long long blocks_done;
  Partial partials[1];  // one for each slot; with detail, a DetailedPartial for each tensor

  template <class P>
  __device__ __forceinline__ P* of(uint32_t tensor) {
    return reinterpret_cast<P*>(partials) + tensor;
  }
};

__device__ __forceinline__ void combine(Partial& into, const Partial& other) {
  into.not_abs_min = larger(into.not_abs_min, other.not_abs_min);
  into.finite_abs_max = larger(into.finite_abs_max, other.finite_abs_max);
  into.not_first_bad = larger(into.not_first_bad, other.not_first_bad);
  into.nan_count += other.nan_count;
  into.posinf_count += other.posinf_count;
  into.neginf_count += other.neginf_count;
}
__device__ __forceinline__ void combine(DetailedPartial& into, const DetailedPartial& other) {
  combine(static_cast<Partial&>(into), other);
  into.zero_count += other.zero_count;
  into.subnormal_count += other.subnormal_count;
}

template <class F>
constexpr bool kIsComplex = std::is_class_v<typename F::Element>;

// The key of a complex number takes a square root in float64. A call, because inlined for each element of a vector it
// needs more registers than there are.
template <class F>
__device__ __noinline__ typename F::Key called_key(typename F::Element element) {
  return F::key(element);
}

template <class F>
__device__ __forceinline__ typename F::Key key_of(typename F::Element element) {
  if constexpr (kIsComplex<F>) {
    return called_key<F>(element);
  } else {
    return F::key(element);
  }
}

// What one load brings: kCount elements, of which element(k) is one; their keys come in kWords words.
template <class F>
struct Vector {
  static constexpr int kCount = kVectorBytes / sizeof(typename F::Element);
  static constexpr int kWords = kIsComplex<F> ? kCount : kVectorBytes / sizeof(Word<F>);
  uint4 packed;

  __device__ __forceinline__ typename F::Element element(int k) const {
    struct Elements {
      typename F::Element of[kCount];
    };
    return bit_cast<Elements>(packed).of[k];
  }
  // The first element, in whose place the next one comes. By words of 32 bits, which is what registers are.
  __device__ __forceinline__ typename F::Element pop() {
    constexpr int kBits = 8 * sizeof(typename F::Element);
    const typename F::Element first = element(0);
    if constexpr (kBits < 32) {
      packed.x = packed.x >> kBits | packed.y << (32 - kBits);
      packed.y = packed.y >> kBits | packed.z << (32 - kBits);
      packed.z = packed.z >> kBits | packed.w << (32 - kBits);
      packed.w >>= kBits;
    } else if constexpr (kBits == 32) {
      packed = {packed.y, packed.z, packed.w, 0};
    } else if constexpr (kBits == 64) {
      packed = {packed.z, packed.w, 0, 0};
    }
    return first;
  }
  __device__ __forceinline__ Word<F> keys(int k) const {
    if constexpr (kIsComplex<F>) {
      return key_of<F>(element(k));
    } else {
      struct Words {
        Word<F> of[kWords];
      };
      return keys_of_word<F>(bit_cast<Words>(packed).of[k]);
    }
  }
};
template <class F>
struct Single {
  static constexpr int kCount = 1;
  static constexpr int kWords = 1;
  typename F::Element value;

  __device__ __forceinline__ typename F::Element element(int) const { return value; }
  __device__ __forceinline__ typename F::Element pop() { return value; }
  // Extremes may meet a key more than once, so it is every key of its word.
  __device__ __forceinline__ Word<F> keys(int) const { return key_of<F>(value) * kOnes<F>; }
};

// One thread's share of a tensor's row.
template <class F>
struct Accumulator {
  Extremes<F> extremes;  // smallest of all keys, that of a NaN being larger than any that matters; largest of the items
                         // that are all finite
  Partial& rare;

  __device__ __forceinline__ Accumulator() : rare(rare_partial()) { rare = Partial{}; }

  template <class Item>
  __device__ __forceinline__ void count(const Item& item, uint64_t index) {
    StatsRow row;
#pragma unroll
    for (int k = 0; k < Item::kCount; ++k) {
      const typename F::Element element = item.element(k);
      const Word<F> key = key_of<F>(element);
      if (key < F::kFirstNonFinite) {
        row.finite_abs_max = larger<uint64_t>(row.finite_abs_max, key);
      } else {
        count_non_finite<F>(row, element, index + k);
      }
    }
    combine(rare, to_partial(row));
  }

  __device__ __forceinline__ Partial partial() const {
    StatsRow row;
    if (F::kIsInteger || extremes.smallest() < F::kFirstNan) row.abs_min = extremes.smallest();
    row.finite_abs_max = extremes.largest();
    Partial both = rare;
    combine(both, to_partial(row));
    return both;
  }
};

// The same with detail, for any format: every element is looked at once, one after the other. Packed keys would not
// help where zeros are many, since then nearly every batch has to be counted, and would double what there is to
// compile.
struct DetailedAccumulator {
  uint64_t smallest = StatsRow{}.abs_min, largest = 0;  // of the keys that are not zero; of the finite ones
  uint32_t zero_count = 0, subnormal_count = 0;  // a thread meets fewer than 2**32 elements: they are dealt out to all
  Partial& rare;

  __device__ __forceinline__ DetailedAccumulator() : rare(rare_partial()) { rare = Partial{}; }

  template <class F>
  __device__ __forceinline__ void take(typename F::Element element, uint64_t index) {
    const uint64_t key = F::key(element);
    zero_count += is_zero<F>(key);
    subnormal_count += is_below_normal<F>(key) && !is_zero<F>(key);
    if (!is_zero<F>(key) && (F::kIsInteger || key < F::kFirstNan)) smallest = smaller(smallest, key);
    if constexpr (F::kIsInteger) {
      largest = larger(largest, key);
    } else if (key < F::kFirstNonFinite) {
      largest = larger(largest, key);
    } else {
      StatsRow row;
      count_non_finite<F>(row, element, index);
      combine(rare, to_partial(row));
    }
  }

  __device__ __forceinline__ DetailedPartial partial() const {
    StatsRow row;
    row.abs_min = smallest;
    row.finite_abs_max = largest;
    DetailedPartial both{rare, zero_count, subnormal_count};
    combine(static_cast<Partial&>(both), to_partial(row));
    return both;
  }
};

template <class F, class Source>
__device__ __forceinline__ void read(DetailedAccumulator& acc, const Source& source, uint64_t count) {
#pragma unroll 1
  for (uint64_t i = threadIdx.x; i < count; i += kThreads) {
    typename Source::Item item = source.load(i);
#pragma unroll 1
    for (int k = 0; k < Source::Item::kCount; ++k) acc.take<F>(item.pop(), source.index(i) + k);
  }
}

// Counts in items i, i + kThreads, ..., each once. Rare, so one copy of the code serves all items; they move down
// because registers cannot be indexed.
template <class F, class Source>
__device__ __forceinline__ void count_batch(Accumulator<F>& acc, const Source& source, uint64_t i, uint64_t count,
                                            typename Source::Item (&items)[Source::kInFlight]) {
  const uint64_t end = smaller<uint64_t>(count, i + Source::kInFlight * kThreads);
#pragma unroll 1
  for (; i < end; i += kThreads) {
    acc.count(items[0], source.index(i));
#pragma unroll
    for (int n = 1; n < Source::kInFlight; ++n) items[n - 1] = items[n];
  }
}

// Reads items i, i + kThreads, ... of a source, all loads in flight before the first is used. Past the last item it
// repeats the last: harmless for the extrema, left out where elements are counted.
template <bool kPastLast, class F, class Source>
__device__ __forceinline__ void read_batch(Accumulator<F>& acc, const Source& source, uint64_t i, uint64_t count) {
  typename Source::Item items[Source::kInFlight];
#pragma unroll
  for (int n = 0; n < Source::kInFlight; ++n) {
    const uint64_t at = i + n * kThreads;
    items[n] = source.load(kPastLast ? smaller(at, count - 1) : at);
  }
  Extremes<F> batch;
#pragma unroll
  for (int n = 0; n < Source::kInFlight; ++n) {
#pragma unroll
    for (int k = 0; k < Source::Item::kWords; ++k) batch.take(items[n].keys(k));
  }
  acc.extremes.take_smallest(batch);
  if constexpr (F::kIsInteger) {
    acc.extremes.take_largest(batch);
  } else if (__builtin_expect(batch.largest() < F::kFirstNonFinite, true)) {
    acc.extremes.take_largest(batch);
  } else {
    count_batch(acc, source, i, count, items);
  }
}

// Reads all `count` items of a source, dealt out to the threads of the block.
template <class F, class Source>
__device__ __forceinline__ void read(Accumulator<F>& acc, const Source& source, uint64_t count) {
  constexpr uint64_t kInFlight = Source::kInFlight;
  constexpr uint64_t kToLast = (kInFlight - 1) * kThreads;
  const uint64_t full_until = count - smaller(count, kToLast);
  uint64_t i = threadIdx.x;
#pragma unroll 1  // the compiler would join batches, and use the first before the last is on its way
  for (; i < full_until; i += kInFlight * kThreads) read_batch<false>(acc, source, i, count);
  if constexpr (kInFlight > 1) {
    if (i < count) read_batch<true>(acc, source, i, count);
  }
}

// `aligned`: the address is a multiple of the element's alignment, as torch's own always are.
template <class Element>
__device__ __forceinline__ Element load_element(const unsigned char* at, bool aligned) {
  if (aligned) return *reinterpret_cast<const Element*>(at);
  unsigned char bytes[sizeof(Element)];
#pragma unroll
  for (size_t k = 0; k < sizeof(Element); ++k) bytes[k] = at[k];
  Element element;
  memcpy(&element, bytes, sizeof(element));
  return element;
}

template <class Element>
__device__ __forceinline__ bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % alignof(Element) == 0;
}

// Where the strides put the element with this memory-order index, in elements from the first.
template <class Index>
__device__ __forceinline__ int64_t mixed_radix_offset(const StridedTensor& tensor, Index index) {
  int64_t offset = 0;
  for (int d = tensor.rank - 1; d > 0; --d) {
    const Index size = static_cast<Index>(tensor.sizes[d]);
    const Index outer = index / size;
    offset += static_cast<int64_t>(index - outer * size) * tensor.strides[d];
    index = outer;
  }
  return tensor.rank > 0 ? offset + static_cast<int64_t>(index) * tensor.strides[0] : 0;
}

// 32-bit division, where it suffices, costs a fraction of the 64-bit one.
__device__ __forceinline__ int64_t element_offset(const StridedTensor& tensor, uint64_t index) {
  return tensor.numel <= 0xffffffffu ? mixed_radix_offset(tensor, static_cast<uint32_t>(index))
                                     : mixed_radix_offset(tensor, index);
}

// A source has items; load(i) fetches one, index(i) is the memory-order index of its first element.

// Aligned 16-byte vectors.
template <class F>
struct Vectors {
  static constexpr int kInFlight = kIsComplex<F> ? 1 : 4;  // the call of called_key leaves few registers
  using Item = Vector<F>;
  const uint4* data;
  uint64_t first_index;

  __device__ __forceinline__ Item load(uint64_t i) const { return {__ldg(data + i)}; }
  __device__ __forceinline__ uint64_t index(uint64_t i) const { return first_index + i * Item::kCount; }
};

// What the vectors leave: the elements before the first and after the last, or all where no vector has whole elements.
template <class F>
struct Edges {
  static constexpr int kInFlight = 1;
  using Item = Single<F>;
  const unsigned char* data;
  uint64_t head_index, head_count, tail_index;
  bool aligned;

  __device__ __forceinline__ Item load(uint64_t i) const {
    using Element = typename F::Element;
    return {load_element<Element>(data + index(i) * sizeof(Element), aligned)};
  }
  __device__ __forceinline__ uint64_t index(uint64_t i) const {
    return i < head_count ? head_index + i : tail_index + (i - head_count);
  }
};

// Elements wherever the strides put them.
template <class F>
struct StridedElements {
  static constexpr int kInFlight = 1;
  using Item = Single<F>;
  const StridedTensor& tensor;
  uint64_t first_index;
  bool aligned;

  __device__ __forceinline__ Item load(uint64_t i) const {
    using Element = typename F::Element;
    const unsigned char* data = static_cast<const unsigned char*>(tensor.data);
    const int64_t offset = element_offset(tensor, index(i));
    return {load_element<Element>(data + offset * static_cast<int64_t>(sizeof(Element)), aligned)};
  }
  __device__ __forceinline__ uint64_t index(uint64_t i) const { return first_index + i; }
};

// Elements [first, last) of a dense tensor.
template <class F, bool kDetail>
__device__ __forceinline__ PartialOf<kDetail> read_dense(const void* start, uint64_t first, uint64_t last) {
  using Element = typename F::Element;
  const unsigned char* data = static_cast<const unsigned char*>(start);
  const uint64_t past_vector = reinterpret_cast<uintptr_t>(data + first * sizeof(Element)) % kVectorBytes;
  const uint64_t until_vector = (kVectorBytes - past_vector) % kVectorBytes;
  const bool whole_elements = until_vector % sizeof(Element) == 0;
  const uint64_t head = whole_elements ? smaller(until_vector / sizeof(Element), last - first) : last - first;
  const uint64_t vectors_index = first + head;
  const uint64_t vectors = (last - vectors_index) / Vector<F>::kCount;
  const uint64_t tail_index = vectors_index + vectors * Vector<F>::kCount;

  std::conditional_t<kDetail, DetailedAccumulator, Accumulator<F>> acc;
  read<F>(acc, Edges<F>{data, first, head, tail_index, is_aligned<Element>(data)}, head + (last - tail_index));
  const uint4* vector_data = reinterpret_cast<const uint4*>(data + vectors_index * sizeof(Element));
  read<F>(acc, Vectors<F>{vector_data, vectors_index}, vectors);
  return acc.partial();
}

// Elements [first, last) of a strided tensor, in memory order.
template <bool kDetail>
__device__ __forceinline__ PartialOf<kDetail> read_strided(const StridedTensor& tensor, uint64_t first, uint64_t last);

template <>
__device__ __forceinline__ Partial read_strided<false>(const StridedTensor& tensor, uint64_t first, uint64_t last) {
  return with_format(tensor.format, [&](auto format) {
    using F = decltype(format);
    Accumulator<F> acc;
    read<F>(acc, StridedElements<F>{tensor, first, is_aligned<typename F::Element>(tensor.data)}, last - first);
    return acc.partial();
  });
}

// The format is asked for at each element, so that there is one loop, and one way to an element's place, which is most
// of the code.
template <>
__device__ __forceinline__ DetailedPartial read_strided<true>(const StridedTensor& tensor, uint64_t first,
                                                              uint64_t last) {
  DetailedAccumulator acc;
#pragma unroll 1
  for (uint64_t i = first + threadIdx.x; i < last; i += kThreads) {
    const int64_t offset = element_offset(tensor, i);
    with_format(tensor.format, [&](auto format) {
      using Element = typename decltype(format)::Element;
      const unsigned char* at =
          static_cast<const unsigned char*>(tensor.data) + offset * static_cast<int64_t>(sizeof(Element));
      acc.take<decltype(format)>(load_element<Element>(at, is_aligned<Element>(at)), i);
    });
  }
  return acc.partial();
}

// Combines what the threads of the block hold into one tensor's partial in the workspace.
template <class P>
__device__ inline void combine_block(P partial, P* total) {
  constexpr bool kDetail = std::is_same_v<P, DetailedPartial>;
  __shared__ P of_warp[kWarps];
  const bool any_bad = __any_sync(kAllLanes, partial.not_first_bad != 0);
#pragma unroll
  for (uint32_t distance = kWarpSize / 2; distance > 0; distance /= 2) {
    P other{};
    other.not_abs_min = __shfl_xor_sync(kAllLanes, partial.not_abs_min, distance);
    other.finite_abs_max = __shfl_xor_sync(kAllLanes, partial.finite_abs_max, distance);
    if (any_bad) {
      other.not_first_bad = __shfl_xor_sync(kAllLanes, partial.not_first_bad, distance);
      other.nan_count = __shfl_xor_sync(kAllLanes, partial.nan_count, distance);
      other.posinf_count = __shfl_xor_sync(kAllLanes, partial.posinf_count, distance);
      other.neginf_count = __shfl_xor_sync(kAllLanes, partial.neginf_count, distance);
    }
    if constexpr (kDetail) {
      other.zero_count = __shfl_xor_sync(kAllLanes, partial.zero_count, distance);
      other.subnormal_count = __shfl_xor_sync(kAllLanes, partial.subnormal_count, distance);
    }
    combine(partial, other);
  }
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = partial;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint32_t w = 1; w < kWarps; ++w) combine(partial, of_warp[w]);
    atomicMax(&total->not_abs_min, partial.not_abs_min);
    atomicMax(&total->finite_abs_max, partial.finite_abs_max);
    if (partial.not_first_bad != 0) {
      atomicMax(&total->not_first_bad, partial.not_first_bad);
      atomicAdd(&total->nan_count, partial.nan_count);
      atomicAdd(&total->posinf_count, partial.posinf_count);
      atomicAdd(&total->neginf_count, partial.neginf_count);
    }
    if constexpr (kDetail) {
      atomicAdd(&total->zero_count, partial.zero_count);
      atomicAdd(&total->subnormal_count, partial.subnormal_count);
    }
  }
  __syncthreads();  // of_warp is free for the next tensor
}

// True in the block that comes here last; it then sees what all blocks have combined. Thread 0 did its block's atomics,
// so it is thread 0 that orders them before its ticket, and after it what the others have; the barrier passes this on.
__device__ inline bool is_last_block(Workspace* workspace) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&workspace->blocks_done, 1ull) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Takes a tensor's row out of the workspace, which is left as it was found: all zero.
__device__ __forceinline__ StatsRow take_row(Partial* partial, uint64_t numel) {
  StatsRow row;
  row.abs_min = ~__ldcg(&partial->not_abs_min);
  row.finite_abs_max = __ldcg(&partial->finite_abs_max);
  row.first_bad = ~__ldcg(&partial->not_first_bad);
  row.nan_count = __ldcg(&partial->nan_count);
  row.posinf_count = __ldcg(&partial->posinf_count);
  row.neginf_count = __ldcg(&partial->neginf_count);
  row.numel = numel;
  *partial = Partial{};
  return row;
}
__device__ __forceinline__ Detail take_detail(DetailedPartial* partial) {
  const Detail detail{~__ldcg(&partial->not_abs_min), __ldcg(&partial->zero_count), __ldcg(&partial->subnormal_count)};
  partial->zero_count = partial->subnormal_count = 0;
  return detail;
}

// Hands a row to whoever waits for its stamp: the host sees the one no earlier than the other. A volatile store is one
// that the compiler neither tears nor moves. Two stores, because one of a variable that is either stamp would hold that
// from the kernel's start on: two registers too many for sm_100.
__device__ __forceinline__ void publish(StampedRow* slot, const StatsRow& row, uint64_t stamp) {
  volatile uint64_t* there = &slot->stamp;
  slot->row = row;
  __threadfence_system();
  if (stamp == kNextStamp) {
    *there = *there + 1;
  } else {
    *there = stamp;
  }
}

// Takes what there is of a tensor out of the workspace, and hands it over in its slots.
__device__ __forceinline__ void publish_tensor(StampedRow* slots, Partial* partial, uint64_t numel, uint64_t stamp) {
  publish(slots, take_row(partial, numel), stamp);
}
__device__ __forceinline__ void publish_tensor(StampedRow* slots, DetailedPartial* partial, uint64_t numel,
                                               uint64_t stamp) {
  const Detail detail = take_detail(partial);
  publish(slots + 1, as_row(detail), stamp);
  StatsRow row = take_row(partial, numel);
  if (detail.zero_count > 0) row.abs_min = 0;
  publish(slots, row, stamp);
}

// An atomic, since the ticket was last touched by atomics of other blocks that nothing here is ordered after.
__device__ inline void reset_ticket(Workspace* workspace) { atomicExch(&workspace->blocks_done, 0ull); }

// Index of the tensor that holds a chunk: the last whose first_chunk is not beyond it, which skips empty ones. Each
// warp looks at 32 places at a time: two dependent loads for 1024 tensors.
__device__ inline uint32_t find_tensor(const DenseTensor* tensors, uint32_t count, uint32_t chunk) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  uint32_t low = 0;
  while (count > 1) {
    const uint32_t step = (count + kWarpSize - 1) / kWarpSize;
    const bool not_beyond = lane * step < count && tensors[low + lane * step].first_chunk <= chunk;
    const uint32_t skipped = (__popc(__ballot_sync(kAllLanes, not_beyond)) - 1) * step;
    low += skipped;
    count = smaller(count - skipped, step);
  }
  return low;
}

// Where this block's share of `total` starts; that of block + 1 is where it ends. Contiguous, so that a block meets few
// tensors.
template <class Size>
__device__ __forceinline__ Size share_start(Size total, uint32_t block) {
  return total / gridDim.x * block + smaller<Size>(total % gridDim.x, block);
}

template <bool kDetail>
__device__ __forceinline__ void reduce_dense(const TensorList& list, Workspace* workspace, StampedRow* slots,
                                             uint64_t stamp) {
  using P = PartialOf<kDetail>;
  const DenseTensor* tensors = list.count <= kInlineTensors ? list.inlined : list.table;
  const uint32_t total_chunks = static_cast<uint32_t>(list.total_chunks);
  uint32_t chunk = share_start(total_chunks, blockIdx.x);
  const uint32_t end = share_start(total_chunks, blockIdx.x + 1);
  for (uint32_t t = chunk < end ? find_tensor(tensors, list.count, chunk) : 0; chunk < end; ++t) {
    const DenseTensor tensor = tensors[t];
    const uint32_t next_first_chunk = t + 1 < list.count ? tensors[t + 1].first_chunk : total_chunks;
    const uint32_t stop = smaller(next_first_chunk, end);
    if (stop == chunk) continue;  // an empty tensor
    const P partial = with_format(tensor.format, [&](auto format) {
      using F = decltype(format);
      constexpr uint64_t kChunkElements = kChunkBytes / sizeof(typename F::Element);
      const uint64_t first = (chunk - tensor.first_chunk) * kChunkElements;
      const uint64_t last = smaller((stop - tensor.first_chunk) * kChunkElements, tensor.numel);
      return read_dense<F, kDetail>(tensor.data, first, last);
    });
    combine_block(partial, workspace->of<P>(t));
    chunk = stop;
  }
  if (!is_last_block(workspace)) return;
#pragma unroll 1  // for its registers
  for (uint32_t t = threadIdx.x; t < list.count; t += kThreads) {
    publish_tensor(&slots[t * slots_each(kDetail)], workspace->of<P>(t), tensors[t].numel, stamp);
  }
  if (threadIdx.x == 0) reset_ticket(workspace);
}

template <bool kDetail>
__device__ __forceinline__ void reduce_strided(const StridedTensor& tensor, Workspace* workspace, StampedRow* slots,
                                               uint64_t stamp) {
  using P = PartialOf<kDetail>;
  const uint64_t first = share_start(tensor.numel, blockIdx.x);
  const uint64_t last = share_start(tensor.numel, blockIdx.x + 1);
  if (first < last) {
    combine_block(read_strided<kDetail>(tensor, first, last), workspace->of<P>(0));
  }
  if (!is_last_block(workspace)) return;
  if (threadIdx.x == 0) {
    publish_tensor(slots, workspace->of<P>(0), tensor.numel, stamp);
    reset_ticket(workspace);
  }
}

// The kernels: who asks for no detail has none of its code in his.

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    dense_kernel(const __grid_constant__ TensorList list, Workspace* workspace, StampedRow* rows, uint64_t stamp) {
  reduce_dense<false>(list, workspace, rows, stamp);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    strided_kernel(const __grid_constant__ StridedTensor tensor, Workspace* workspace, StampedRow* row,
                   uint64_t stamp) {
  reduce_strided<false>(tensor, workspace, row, stamp);
}

// One block less at a time: in the registers that all of them leave, compute capability 10.0 spills.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor - 1)
    dense_detail(const __grid_constant__ TensorList list, Workspace* workspace, StampedRow* slots, uint64_t stamp) {
  reduce_dense<true>(list, workspace, slots, stamp);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    strided_detail(const __grid_constant__ StridedTensor tensor, Workspace* workspace, StampedRow* slots,
                   uint64_t stamp) {
  reduce_strided<true>(tensor, workspace, slots, stamp);
}

}  // namespace overflowstat::cuda
