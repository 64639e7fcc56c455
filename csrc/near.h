// From which magnitude on a number is near the limit of its format.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "number_format.h"

namespace overflowstat {

class NearLimit {
 public:
  // At `share` of the largest number: 0 < share <= 1, or 0 for never. Integers and bool are never near.
  explicit NearLimit(double share) : share_(share) {
    for (size_t i = 0; i < smallest_.size(); ++i) {
      smallest_[i] = with_format(static_cast<Format>(i), [=](auto f) { return smallest<decltype(f)>(share); });
    }
  }

  double share() const { return share_; }
  bool is_asked() const { return share_ > 0; }
  // Of a row's finite_abs_max.
  bool operator()(Format format, uint64_t key) const { return key >= smallest_[static_cast<size_t>(format)]; }

 private:
  // A complex number by the format of its parts, whose limit its modulus may pass.
  template <class F, class = void>
  struct Real {
    using Format = F;
  };
  template <class F>
  struct Real<F, std::void_t<typename F::Part>> {
    using Format = typename F::Part;
  };

  template <class F>
  static uint64_t smallest(double share) {
    if (F::kIsInteger || share <= 0) return ~uint64_t{0};
    using Limit = typename Real<F>::Format;
    const double least = share * Limit::value(Limit::kFirstNonFinite - 1);
    uint64_t below = 0, at = F::kFirstNonFinite;  // a row without finite elements has 0
    while (at - below > 1) {
      const uint64_t middle = below + (at - below) / 2;
      (F::value(static_cast<typename F::Key>(middle)) >= least ? at : below) = middle;
    }
    return at;
  }

  double share_;
  std::array<uint64_t, static_cast<size_t>(Format::kBool) + 1> smallest_;
};

}  // namespace overflowstat
