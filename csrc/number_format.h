// What a number format is: how its bits order by magnitude, which of them are not finite, what they are worth.
// The only file that knows a format (but for cuda/packed.cuh, which has the same keys several to a word); plain C++17,
// compiled for the host and by nvcc for the device.
//
// Every format maps an element to a *key*: an unsigned integer that orders as the magnitude does, with
//     key(finite) < key(inf) < key(NaN)
// so that the extrema of a tensor are integer extrema. Keys below kFirstNonZero are of zeros, those from there to below
// kFirstNormal of subnormals. No float is ever compared (but for the parts of complex numbers,
// whose modulus is computed), hence NaN payloads, signed zeros and subnormals cannot change an answer.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __FAST_MATH__
#error "-ffast-math lets the compiler assume that there is no NaN and no infinity, which is what this code looks for"
#endif

#ifdef __CUDACC__
#define OVERFLOWSTAT_HOST_DEVICE __host__ __device__
#else
#define OVERFLOWSTAT_HOST_DEVICE
#endif

namespace overflowstat {

enum class Format : uint32_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBfloat16,
  kFloat8E4m3fn,
  kFloat8E5m2,
  kFloat8E4m3fnuz,
  kFloat8E5m2fnuz,
  kFloat8E8m0fnu,
  kComplex128,
  kComplex64,
  kComplex32,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUint64,
  kUint32,
  kUint16,
  kUint8,
  kBool,
};

template <class To, class From>
OVERFLOWSTAT_HOST_DEVICE inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// 2**exponent for -1022 <= exponent <= 1023.
OVERFLOWSTAT_HOST_DEVICE inline double power_of_two(int exponent) {
  return bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Which codes of a floating-point format are set aside for what is not finite.
enum class Specials {
  kIeee,            // top exponent: infinity when the mantissa is 0, else NaN
  kOneNan,          // "fn": NaN where all bits but the sign are set, no infinity
  kNanForMinusZero  // "fnuz": NaN in the place of -0, no infinity
};

// A sign bit, an exponent, a mantissa. The key is the code without its sign.
template <Format kFormatValue, class BitsType, int kMantissaBits, int kBias, Specials kSpecials>
struct SignedFloat {
  using Element = BitsType;
  using Key = BitsType;
  static constexpr Format kFormat = kFormatValue;
  static constexpr bool kIsInteger = false;
  static constexpr Key kSign = static_cast<Key>(Key{1} << (8 * sizeof(Key) - 1));
  static constexpr Key kFirstNonFinite = kSpecials == Specials::kIeee
                                             ? static_cast<Key>((kSign - 1) >> kMantissaBits << kMantissaBits)
                                         : kSpecials == Specials::kOneNan ? static_cast<Key>(kSign - 1)
                                                                          : kSign;
  static constexpr Key kFirstNan =
      kSpecials == Specials::kIeee ? static_cast<Key>(kFirstNonFinite + 1) : kFirstNonFinite;
  static constexpr Key key_of_power_of_two(int exponent) {
    return static_cast<Key>(static_cast<Key>(exponent + kBias) << kMantissaBits);
  }
  static constexpr int kFirstNormalExponent = 1 - kBias;
  static constexpr Key kFirstNonZero = 1;
  static constexpr Key kFirstNormal = key_of_power_of_two(kFirstNormalExponent);

  OVERFLOWSTAT_HOST_DEVICE static Key key(Element code) {
    const Key magnitude = static_cast<Key>(code & static_cast<Key>(kSign - 1));
    if constexpr (kSpecials == Specials::kNanForMinusZero) {
      return code == kSign ? kSign : magnitude;
    } else {
      return magnitude;
    }
  }
  OVERFLOWSTAT_HOST_DEVICE static bool is_nan(Element code) { return key(code) >= kFirstNan; }
  OVERFLOWSTAT_HOST_DEVICE static bool is_inf(Element code) {
    return key(code) >= kFirstNonFinite && key(code) < kFirstNan;
  }
  OVERFLOWSTAT_HOST_DEVICE static bool is_negative(Element code) { return (code & kSign) != 0; }

  // Exact: every value of these formats is a double. A NaN's key gives NaN.
  OVERFLOWSTAT_HOST_DEVICE static double value(Key key) {
    if (key >= kFirstNan) return bit_cast<double>(uint64_t{0x7ff8000000000000});
    if constexpr (sizeof(Key) == 8) {
      return bit_cast<double>(key);
    } else {
      if (key >= kFirstNonFinite) return bit_cast<double>(uint64_t{0x7ff0000000000000});
      const uint64_t wide = key;
      const uint64_t exponent = wide >> kMantissaBits;
      const uint64_t mantissa = wide & ((uint64_t{1} << kMantissaBits) - 1);
      if (exponent == 0) return static_cast<double>(mantissa) * power_of_two(1 - kBias - kMantissaBits);
      return bit_cast<double>((exponent + (1023 - kBias)) << 52 | mantissa << (52 - kMantissaBits));
    }
  }
};

using Float64 = SignedFloat<Format::kFloat64, uint64_t, 52, 1023, Specials::kIeee>;
using Float32 = SignedFloat<Format::kFloat32, uint32_t, 23, 127, Specials::kIeee>;
using Float16 = SignedFloat<Format::kFloat16, uint16_t, 10, 15, Specials::kIeee>;
using Bfloat16 = SignedFloat<Format::kBfloat16, uint16_t, 7, 127, Specials::kIeee>;
// The 8-bit formats: "FP8 Formats for Deep Learning" (arXiv 2209.05433) and, for fnuz, arXiv 2206.02915.
using Float8E4m3fn = SignedFloat<Format::kFloat8E4m3fn, uint8_t, 3, 7, Specials::kOneNan>;
using Float8E5m2 = SignedFloat<Format::kFloat8E5m2, uint8_t, 2, 15, Specials::kIeee>;
using Float8E4m3fnuz = SignedFloat<Format::kFloat8E4m3fnuz, uint8_t, 3, 8, Specials::kNanForMinusZero>;
using Float8E5m2fnuz = SignedFloat<Format::kFloat8E5m2fnuz, uint8_t, 2, 16, Specials::kNanForMinusZero>;

// A bare exponent: the scale of the OCP microscaling (MX) formats. No sign, no zero, no infinity; 0xff is NaN.
struct Float8E8m0fnu {
  using Element = uint8_t;
  using Key = uint8_t;
  static constexpr Format kFormat = Format::kFloat8E8m0fnu;
  static constexpr bool kIsInteger = false;
  static constexpr Key kFirstNonFinite = 0xff;
  static constexpr Key kFirstNan = 0xff;
  static constexpr Key kFirstNonZero = 0;
  static constexpr Key kFirstNormal = 0;
  OVERFLOWSTAT_HOST_DEVICE static Key key(Element code) { return code; }
  OVERFLOWSTAT_HOST_DEVICE static bool is_nan(Element code) { return code == kFirstNan; }
  OVERFLOWSTAT_HOST_DEVICE static bool is_inf(Element) { return false; }
  OVERFLOWSTAT_HOST_DEVICE static bool is_negative(Element) { return false; }
  OVERFLOWSTAT_HOST_DEVICE static double value(Key key) {
    return key >= kFirstNan ? bit_cast<double>(uint64_t{0x7ff8000000000000})
                            : power_of_two(static_cast<int>(key) - 127);
  }
};

// sqrt(re**2 + im**2) in double, for finite parts. Scaling by powers of two keeps the squares in range where only a
// part near the ends of double's range could leave it; each step is one IEEE operation (no fused multiply-add), so
// that every implementation gets the same bits. May still round to infinity, which the caller treats as saturation.
OVERFLOWSTAT_HOST_DEVICE inline double modulus(double re, double im) {
  re = re < 0 ? -re : re;
  im = im < 0 ? -im : im;
  const double larger = re > im ? re : im;
  const double down = power_of_two(-600), up = power_of_two(600);
  const double scale = larger > power_of_two(500) ? down : larger < power_of_two(-500) ? up : 1.0;
  const double unscale = larger > power_of_two(500) ? up : larger < power_of_two(-500) ? down : 1.0;
  re *= scale;
  im *= scale;
  const double squares = re * re + im * im;
#ifdef __CUDA_ARCH__
  return sqrt(squares) * unscale;
#else
  return __builtin_sqrt(squares) * unscale;
#endif
}

// A complex number by its modulus, computed in double and rounded once to `Magnitude`'s format, where it saturates:
// a finite number whose modulus is beyond the format is not an infinity. As in C99 annex G an infinite part makes the
// modulus infinite whatever the other part is; a NaN part is counted as NaN all the same. It is subnormal where its
// modulus is below the smallest normal number of its parts' format.
template <Format kFormatValue, class PartFormat, class Magnitude>
struct Complex {
  using Part = PartFormat;
  struct Element {
    typename Part::Element re, im;
  };
  using Key = typename Magnitude::Key;
  static constexpr Format kFormat = kFormatValue;
  static constexpr bool kIsInteger = false;
  static constexpr Key kFirstNonFinite = Magnitude::kFirstNonFinite;
  static constexpr Key kFirstNan = Magnitude::kFirstNan;
  static constexpr Key kFirstNonZero = Magnitude::kFirstNonZero;
  static constexpr Key kFirstNormal = Magnitude::key_of_power_of_two(Part::kFirstNormalExponent);

  OVERFLOWSTAT_HOST_DEVICE static bool is_nan(Element code) { return Part::is_nan(code.re) || Part::is_nan(code.im); }
  OVERFLOWSTAT_HOST_DEVICE static bool is_inf(Element code) { return Part::is_inf(code.re) || Part::is_inf(code.im); }
  OVERFLOWSTAT_HOST_DEVICE static bool is_negative(Element) { return false; }
  OVERFLOWSTAT_HOST_DEVICE static Key key(Element code) {
    if (is_inf(code)) return kFirstNonFinite;
    if (is_nan(code)) return kFirstNan;
    const double exact = modulus(Part::value(Part::key(code.re)), Part::value(Part::key(code.im)));
    Key rounded;
    if constexpr (sizeof(Key) == 8) {
      rounded = bit_cast<Key>(exact);
    } else {
      rounded = bit_cast<Key>(static_cast<float>(exact));
    }
    return rounded < kFirstNonFinite ? rounded : kFirstNonFinite - 1;
  }
  OVERFLOWSTAT_HOST_DEVICE static double value(Key key) { return Magnitude::value(key); }
};

using Complex128 = Complex<Format::kComplex128, Float64, Float64>;
using Complex64 = Complex<Format::kComplex64, Float32, Float32>;
// In float32, where the modulus of any two float16 parts fits.
using Complex32 = Complex<Format::kComplex32, Float16, Float32>;

// |x| as an unsigned integer of the same width, which holds the magnitude of the smallest value too. The keys of
// non-finite elements are never reached: kFirstNonFinite is only there so that all formats have the same members.
template <Format kFormatValue, class Integer>
struct IntegerFormat {
  using Element = Integer;
  using Key = std::make_unsigned_t<Integer>;
  static constexpr Format kFormat = kFormatValue;
  static constexpr bool kIsInteger = true;
  static constexpr Key kFirstNonFinite = std::numeric_limits<Key>::max();
  static constexpr Key kFirstNan = std::numeric_limits<Key>::max();
  static constexpr Key kFirstNonZero = 1;
  static constexpr Key kFirstNormal = 1;
  OVERFLOWSTAT_HOST_DEVICE static Key key(Element x) {
    if constexpr (std::is_signed_v<Integer>) {
      const Key bits = static_cast<Key>(x);
      return x < 0 ? static_cast<Key>(0u - bits) : bits;
    } else {
      return x;
    }
  }
  OVERFLOWSTAT_HOST_DEVICE static bool is_nan(Element) { return false; }
  OVERFLOWSTAT_HOST_DEVICE static bool is_inf(Element) { return false; }
  OVERFLOWSTAT_HOST_DEVICE static bool is_negative(Element x) { return x < 0; }
  OVERFLOWSTAT_HOST_DEVICE static double value(Key key) { return static_cast<double>(key); }
};

using Int64 = IntegerFormat<Format::kInt64, int64_t>;
using Int32 = IntegerFormat<Format::kInt32, int32_t>;
using Int16 = IntegerFormat<Format::kInt16, int16_t>;
using Int8 = IntegerFormat<Format::kInt8, int8_t>;
using Uint64 = IntegerFormat<Format::kUint64, uint64_t>;
using Uint32 = IntegerFormat<Format::kUint32, uint32_t>;
using Uint16 = IntegerFormat<Format::kUint16, uint16_t>;
using Uint8 = IntegerFormat<Format::kUint8, uint8_t>;

// A byte that is not 0 is true, whatever wrote it.
struct Bool : IntegerFormat<Format::kBool, uint8_t> {
  OVERFLOWSTAT_HOST_DEVICE static Key key(Element x) { return x != 0 ? 1 : 0; }
};

// Of a key: zero, and below the normal numbers, which zeros are too.
template <class F>
OVERFLOWSTAT_HOST_DEVICE inline bool is_zero(typename F::Key key) {
  if constexpr (F::kFirstNonZero == 0) {
    return false;
  } else {
    return key < F::kFirstNonZero;
  }
}
template <class F>
OVERFLOWSTAT_HOST_DEVICE inline bool is_below_normal(typename F::Key key) {
  if constexpr (F::kFirstNormal == 0) {
    return false;
  } else {
    return key < F::kFirstNormal;
  }
}

// Calls visitor(F{}) with the struct of a format.
#ifdef __CUDACC__
#pragma nv_exec_check_disable  // the visitor may be for the host or for the device alone
#endif
template <class Visitor>
OVERFLOWSTAT_HOST_DEVICE inline auto with_format(Format format, Visitor&& visitor) {
  switch (format) {
    case Format::kFloat64: return visitor(Float64{});
    case Format::kFloat32: return visitor(Float32{});
    case Format::kFloat16: return visitor(Float16{});
    case Format::kBfloat16: return visitor(Bfloat16{});
    case Format::kFloat8E4m3fn: return visitor(Float8E4m3fn{});
    case Format::kFloat8E5m2: return visitor(Float8E5m2{});
    case Format::kFloat8E4m3fnuz: return visitor(Float8E4m3fnuz{});
    case Format::kFloat8E5m2fnuz: return visitor(Float8E5m2fnuz{});
    case Format::kFloat8E8m0fnu: return visitor(Float8E8m0fnu{});
    case Format::kComplex128: return visitor(Complex128{});
    case Format::kComplex64: return visitor(Complex64{});
    case Format::kComplex32: return visitor(Complex32{});
    case Format::kInt64: return visitor(Int64{});
    case Format::kInt32: return visitor(Int32{});
    case Format::kInt16: return visitor(Int16{});
    case Format::kInt8: return visitor(Int8{});
    case Format::kUint64: return visitor(Uint64{});
    case Format::kUint32: return visitor(Uint32{});
    case Format::kUint16: return visitor(Uint16{});
    case Format::kUint8: return visitor(Uint8{});
    case Format::kBool: break;
  }
  return visitor(Bool{});
}

OVERFLOWSTAT_HOST_DEVICE inline int64_t element_size(Format format) {
  return with_format(format, [](auto f) { return static_cast<int64_t>(sizeof(typename decltype(f)::Element)); });
}

}  // namespace overflowstat
