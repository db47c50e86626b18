// The conversions for every CPU, and the choice among those of all instruction sets.

#include "convert.h"

#include "../beyond_float8.h"
#include "capability.h"
#include "convert_loop.h"

#include <torch/headeronly/util/bit_cast.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;

// One element at a time, with the conversions of torch's own scalar types; loaded and stored as
// bytes, for it may have any address.
struct Lanes {
  static constexpr int kSize = 1;
  using Register = float;

  template <typename From>
  static float load(const From* from) {
    From number;
    std::memcpy(static_cast<void*>(&number), static_cast<const void*>(from), sizeof(number));
    return static_cast<float>(number);
  }
  template <typename From, typename To>
  static void store(To* to, float value) {
    const To number = convert<From, To>(value);
    std::memcpy(static_cast<void*>(to), static_cast<const void*>(&number), sizeof(number));
  }
  template <typename From, typename To>
  static void stream(To* to, float value) {
    store<From>(to, value);
  }
  static void fence() {}
  static void prefetch(const void*) {}

 private:
  template <typename From, typename To>
  static To convert(float value) {
    if constexpr (std::is_same_v<To, Half> && std::is_same_v<From, float>) {
      // As the processor's instruction does it; torch's scalar type drops the payload of a NaN.
      if (value != value) {
        const auto bits = torch::headeronly::bit_cast<uint32_t>(value);
        return from_bits<Half>(
            static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x03ff)));
      }
    }
    if constexpr (std::is_same_v<To, Float8_e4m3fn> || std::is_same_v<To, Float8_e5m2>) {
      return from_bits<To>(to_float8<To>(value, beyond_float8<To>()));
    } else {
      return static_cast<To>(value);
    }
  }
};

// Elements of one dtype, to themselves. A line of the cache at a time where the stores go around
// it.
template <int kItemSize>
void copy_run(void* to, const void* from, int64_t count, bool stream) {
  const auto size = static_cast<size_t>(count) * kItemSize;
#if defined(__x86_64__)
  if (stream && size >= 2 * kCacheLine) {
    auto* out = static_cast<char*>(to);
    const auto* in = static_cast<const char*>(from);
    const size_t head = (kCacheLine - reinterpret_cast<uintptr_t>(out) % kCacheLine) % kCacheLine;
    std::memcpy(out, in, head);
    size_t done = head;
    for (; done + kCacheLine <= size; done += kCacheLine) {
      for (int i = 0; i < kCacheLine; i += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + done + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + done + i)));
      }
    }
    std::memcpy(out + done, in + done, size - done);
    _mm_sfence();
    return;
  }
#endif
  (void)stream;
  std::memcpy(to, from, size);
}

smart_autocast::ConvertFunction find_copy(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return copy_run<8>;
    case ScalarType::Float:
      return copy_run<4>;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return copy_run<2>;
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
      return copy_run<1>;
    default:
      return nullptr;
  }
}

}  // namespace

namespace smart_autocast {

int32_t beyond_float8_e4m3fn = 0;

ConvertFunction find_convert_default(ScalarType to, ScalarType from) {
  return to == from ? find_copy(to) : find<Lanes>(to, from);
}

ConvertFunction find_convert(ScalarType to, ScalarType from) {
  if (to == ScalarType::Float8_e4m3fn) {
    // Once, not at each call: other threads may be reading it.
    [[maybe_unused]] static const int32_t known = beyond_float8_e4m3fn = ask_beyond_float8_e4m3fn();
  }
  ConvertFunction found = nullptr;
#if defined(__x86_64__)
  switch (cpu_capability()) {
    case Capability::kAvx512Bf16:
      found = find_convert_avx512_bf16(to, from);
      break;
    case Capability::kAvx512:
      found = find_convert_avx512(to, from);
      break;
    case Capability::kAvx2:
      found = find_convert_avx2(to, from);
      break;
    case Capability::kDefault:
      break;
  }
#endif
  return found != nullptr ? found : find_convert_default(to, from);
}

}  // namespace smart_autocast
