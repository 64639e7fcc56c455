// Keys of as many elements as a register word holds (four of 8 bits, two of 16, one of 32 or 64) and their extremes, so
// that narrow formats, which bring more elements with each byte, cost not as many instructions more.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../number_format.h"

namespace overflowstat::cuda {

// One instruction compares a word's two halves from compute capability 9.0 on, where below it takes many.
#ifndef OVERFLOWSTAT_CUDA_LANE_BITS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define OVERFLOWSTAT_CUDA_LANE_BITS 16
#else
#define OVERFLOWSTAT_CUDA_LANE_BITS 32
#endif
#endif

template <class T>
__device__ __forceinline__ T larger(T a, T b) {
  return a < b ? b : a;
}
template <class T>
__device__ __forceinline__ T smaller(T a, T b) {
  return a < b ? a : b;
}

template <class F>
using Word = std::conditional_t<sizeof(typename F::Key) == 8, uint64_t, uint32_t>;

// 1 in each element of a word.
template <class F>
constexpr Word<F> kOnes = ~Word<F>{0} / static_cast<typename F::Key>(~typename F::Key{0});

// The keys of narrow elements, each in its element's place. No sum here carries from one element into the next.

template <Format kFormat, class Bits, int kMantissaBits, int kBias, Specials kSpecials>
__device__ __forceinline__ uint32_t narrow_keys(SignedFloat<kFormat, Bits, kMantissaBits, kBias, kSpecials> format,
                                                uint32_t word) {
  using F = decltype(format);
  constexpr uint32_t kSigns = F::kSign * kOnes<F>;
  if constexpr (kSpecials == Specials::kNanForMinusZero) {
    const uint32_t nonzero = (word & ~kSigns) + ~kSigns;  // in the place of the sign
    return word & ~(nonzero & kSigns);
  } else {
    return word & ~kSigns;
  }
}

__device__ __forceinline__ uint32_t narrow_keys(Float8E8m0fnu, uint32_t word) { return word; }

template <Format kFormat, class Integer>
__device__ __forceinline__ uint32_t narrow_keys(IntegerFormat<kFormat, Integer> format, uint32_t word) {
  using F = decltype(format);
  if constexpr (std::is_signed_v<Integer>) {
    const uint32_t negative = word >> (8 * sizeof(Integer) - 1) & kOnes<F>;
    return (word ^ negative * static_cast<typename F::Key>(~0u)) + negative;
  } else {
    return word;
  }
}

__device__ __forceinline__ uint32_t narrow_keys(Bool, uint32_t word) {
  constexpr uint32_t kTops = 0x80 * kOnes<Bool>;
  return (((word & ~kTops) + ~kTops) | word) >> 7 & kOnes<Bool>;
}

template <class F>
__device__ __forceinline__ Word<F> keys_of_word(Word<F> word) {
  if constexpr (sizeof(typename F::Key) < sizeof(Word<F>)) {
    return narrow_keys(F{}, word);
  } else {
    return F::key(bit_cast<typename F::Element>(word));
  }
}

// Smallest and largest key of the words taken. A word is compared by lanes, once for each key of a lane, shifted to its
// top: what is left below it only decides between keys that are equal.
template <class F>
class Extremes {
 public:
  __device__ __forceinline__ void take(Word<F> keys) {
    // Opaque to the compiler, which would mask each shifted word in place of the one: 12 instructions more for 16
    // bytes.
    if constexpr (kKeyBits == 8) asm("" : "+r"(keys));
#pragma unroll
    for (int shift = 0; shift < kLaneBits; shift += kKeyBits) {
      smallest_ = lane_min(smallest_, keys << shift);
      largest_ = lane_max(largest_, keys << shift);
    }
  }
  __device__ __forceinline__ void take_smallest(const Extremes& other) {
    smallest_ = lane_min(smallest_, other.smallest_);
  }
  __device__ __forceinline__ void take_largest(const Extremes& other) { largest_ = lane_max(largest_, other.largest_); }

  // All ones and 0 where nothing was taken.
  __device__ __forceinline__ Word<F> smallest() const {
    if constexpr (kLaneBits == 16) {
      return smaller(smallest_ & 0xffff, smallest_ >> 16) >> (kLaneBits - kKeyBits);
    } else {
      return smallest_ >> (kLaneBits - kKeyBits);
    }
  }
  __device__ __forceinline__ Word<F> largest() const {
    if constexpr (kLaneBits == 16) {
      return larger(largest_ & 0xffff, largest_ >> 16) >> (kLaneBits - kKeyBits);
    } else {
      return largest_ >> (kLaneBits - kKeyBits);
    }
  }

 private:
  static constexpr int kKeyBits = 8 * sizeof(typename F::Key);
  static constexpr int kLaneBits = kKeyBits < 32 ? OVERFLOWSTAT_CUDA_LANE_BITS : kKeyBits;

  __device__ __forceinline__ static Word<F> lane_min(Word<F> a, Word<F> b) {
    if constexpr (kLaneBits == 16) {
      return __vminu2(a, b);
    } else {
      return smaller(a, b);
    }
  }
  __device__ __forceinline__ static Word<F> lane_max(Word<F> a, Word<F> b) {
    if constexpr (kLaneBits == 16) {
      return __vmaxu2(a, b);
    } else {
      return larger(a, b);
    }
  }

  Word<F> smallest_ = ~Word<F>{0}, largest_ = 0;
};

}  // namespace overflowstat::cuda
