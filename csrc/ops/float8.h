// How a float32 number becomes one of float8: what processors and GPUs share.

#pragma once

#include <torch/headeronly/macros/Macros.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e5m2.h>

#include <cstdint>
#include <cstring>

// Unnamed, for the reason given in cpu/convert_loop.h.
namespace {

using torch::headeronly::Float8_e4m3fn;
using torch::headeronly::Float8_e5m2;

// In whole numbers, but for what is denormal in float8. That is added to a number with its last
// place where the denormal ones have theirs, which rounds it to nearest even.
template <int kFractionBits, int kBottom>  // see Grid
struct Float8Format {
  static constexpr int kDropped = 23 - kFractionBits;
  static constexpr int32_t kSmallestNormal = kBottom << 23;
  // Another bias of the exponent, and half a unit in the last place less one bit.
  static constexpr int32_t kRebiasAndHalf = (1 << (kDropped - 1)) - 1 - ((kBottom - 1) << 23);
  static constexpr int32_t kMagicBits = (kBottom + 23 - kFractionBits) << 23;
  static constexpr int32_t kNan = 0x7f;
};

template <typename To>
struct Float8;

template <>
struct Float8<Float8_e4m3fn> : Float8Format<3, 121> {};

template <>
struct Float8<Float8_e5m2> : Float8Format<2, 113> {
  static constexpr int32_t kInfinity = 0x7c;
};

template <typename Number, typename Bits>
C10_HOST_DEVICE inline Number from_bits(Bits bits) {
  static_assert(sizeof(Number) == sizeof(Bits));
  Number number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

// `beyond`: what lies beyond the largest number becomes, without its sign. Every case is computed
// and one chosen: with branches, each of the sixteen elements of a vector would divide a GPU's
// warp, and be loaded after the one before it where it is loaded by itself.
template <typename To>
C10_HOST_DEVICE inline uint8_t to_float8(float value, int32_t beyond) {
  using Format = Float8<To>;
  const auto bits = from_bits<uint32_t>(value);
  const auto magnitude = static_cast<int32_t>(bits & 0x7fffffff);
  const float sum = from_bits<float>(magnitude) + from_bits<float>(Format::kMagicBits);
  const int32_t small = from_bits<int32_t>(sum) - Format::kMagicBits;
  const int32_t odd = magnitude >> Format::kDropped & 1;
  // NaNs come here, too: in this order nothing overflows.
  const int32_t rounded = (magnitude + (odd + Format::kRebiasAndHalf)) >> Format::kDropped;
  const int32_t large = rounded < beyond ? rounded : beyond;
  const int32_t number = magnitude < Format::kSmallestNormal ? small : large;
  const int32_t result = magnitude > 0x7f800000 ? Format::kNan : number;
  return static_cast<uint8_t>(result | static_cast<int32_t>(bits >> 24 & 0x80));
}

// In a third of the instructions of torch's own: what its exponent lacks is a factor, which makes
// denormal numbers normal, too.
C10_HOST_DEVICE inline float to_float(Float8_e4m3fn number) {
  const uint32_t magnitude = number.x & 0x7f, sign = static_cast<uint32_t>(number.x & 0x80) << 24;
  constexpr uint32_t kFactor = (127 + 127 - 7) << 23;  // by the biases of the exponents
  const float product = from_bits<float>(magnitude << 20) * from_bits<float>(kFactor);
  const uint32_t bits = magnitude == 0x7f ? 0x7ff00000 : from_bits<uint32_t>(product);
  return from_bits<float>(bits | sign);
}

}  // namespace
