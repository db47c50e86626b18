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

// One element at a time, with the conversions of torch's own scalar types.
struct Lanes {
  static constexpr int kSize = 1;
  using Register = float;

  template <typename From>
  static float load(const From* from) {
    return static_cast<float>(*from);
  }
  template <typename, typename To>
  static void store(To* to, float value) {
    *to = static_cast<To>(value);
  }
  template <typename From>
  static void store(Half* to, float value) {
    // As the processor's instruction does it; torch's scalar type drops the payload of a NaN.
    if (std::is_same_v<From, float> && value != value) {
      const auto bits = torch::headeronly::bit_cast<uint32_t>(value);
      to->x = static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x03ff));
    } else {
      *to = static_cast<Half>(value);
    }
  }
  template <typename>
  static void store(Float8_e4m3fn* to, float value) {
    to->x = to_float8<Float8_e4m3fn>(value, beyond_float8<Float8_e4m3fn>());
  }
  template <typename>
  static void store(Float8_e5m2* to, float value) {
    to->x = to_float8<Float8_e5m2>(value, beyond_float8<Float8_e5m2>());
  }
  template <typename From, typename To>
  static void stream(To* to, float value) {
    store<From>(to, value);
  }
  static void fence() {}
  static void prefetch(const void*) {}
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
    beyond_float8_e4m3fn = ask_beyond_float8_e4m3fn();
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
