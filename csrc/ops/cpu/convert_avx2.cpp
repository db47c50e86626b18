// Compiled for AVX2 and F16C (CMakeLists.txt); called only where the CPU has them.

#include "convert.h"

#if defined(__AVX2__) && defined(__F16C__)

#include "convert_loop.h"

#include <immintrin.h>

namespace {

struct Lanes {
  static constexpr int kSize = 16;
  struct Register {
    __m256 low, high;
  };

  static Register load(const float* from) {
    return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
  }
  static Register load(const double* from) { return {load_8(from), load_8(from + 8)}; }
  static Register load(const Half* from) {
    return {_mm256_cvtph_ps(load_16_bytes(from)), _mm256_cvtph_ps(load_16_bytes(from + 8))};
  }
  static Register load(const BFloat16* from) {
    return {from_bf16(load_16_bytes(from)), from_bf16(load_16_bytes(from + 8))};
  }
  // Both as in avx512_lanes.h.
  static Register load(const Float8_e5m2* from) {
    return from_half(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_16_bytes(from)), 8));
  }
  static Register load(const Float8_e4m3fn* from) {
    const __m256i bytes = _mm256_cvtepi8_epi16(load_16_bytes(from));
    const __m256i magnitude = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_and_si256(bytes, _mm256_set1_epi16(INT16_MIN));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
    const Register value = from_half(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign));
    return {from_e4m3(value.low, _mm256_castsi256_si128(nan)),
            from_e4m3(value.high, _mm256_extracti128_si256(nan, 1))};
  }

  template <typename>
  static void store(float* to, Register value) {
    _mm256_storeu_ps(to, value.low);
    _mm256_storeu_ps(to + 8, value.high);
  }
  template <typename>
  static void store(double* to, Register value) {
    _mm256_storeu_pd(to, low_half(value.low));
    _mm256_storeu_pd(to + 4, high_half(value.low));
    _mm256_storeu_pd(to + 8, low_half(value.high));
    _mm256_storeu_pd(to + 12, high_half(value.high));
  }
  template <typename>
  static void store(Half* to, Register value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_half(value));
  }
  template <typename From>
  static void store(BFloat16* to, Register value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bf16(value, kBf16Nan<From>));
  }
  template <typename, typename To>
  static void store(To* to, Register value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), to_float8<To>(value));
  }

  template <typename>
  static void stream(float* to, Register value) {
    _mm256_stream_ps(to, value.low);
    _mm256_stream_ps(to + 8, value.high);
  }
  template <typename>
  static void stream(double* to, Register value) {
    _mm256_stream_pd(to, low_half(value.low));
    _mm256_stream_pd(to + 4, high_half(value.low));
    _mm256_stream_pd(to + 8, low_half(value.high));
    _mm256_stream_pd(to + 12, high_half(value.high));
  }
  template <typename>
  static void stream(Half* to, Register value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), to_half(value));
  }
  template <typename From>
  static void stream(BFloat16* to, Register value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), to_bf16(value, kBf16Nan<From>));
  }
  template <typename, typename To>
  static void stream(To* to, Register value) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), to_float8<To>(value));
  }
  static void fence() { _mm_sfence(); }
  // Zen 3 needs none: asked for as with AVX-512, 4 MiB took up to 26 % longer.
  static void prefetch(const void*) {}

 private:
  static Register from_half(__m256i bits) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
  }
  static __m256 from_e4m3(__m256 value, __m128i nan) {
    const __m256 sign = _mm256_and_ps(value, _mm256_set1_ps(-0.0F));
    const __m256 nans = _mm256_or_ps(sign, _mm256_castsi256_ps(_mm256_set1_epi32(0x7ff00000)));
    return _mm256_blendv_ps(_mm256_mul_ps(value, _mm256_set1_ps(256)), nans,
                            _mm256_castsi256_ps(_mm256_cvtepi16_epi32(nan)));
  }
  template <typename To>
  static __m128i to_float8(Register value) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packus_epi32(round_to_float8<To>(value.low), round_to_float8<To>(value.high)),
        0b11011000);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  template <typename To>
  static __m256i round_to_float8(__m256 value) {
    using Format = Float8<To>;
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(magnitude, Format::kDropped), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(Format::kRebiasAndHalf));
    __m256i result = _mm256_srli_epi32(_mm256_add_epi32(magnitude, half), Format::kDropped);
    result = _mm256_min_epi32(result, _mm256_set1_epi32(beyond_float8<To>()));

    const __m256i magic = _mm256_set1_epi32(Format::kMagicBits);
    const __m256i sum = _mm256_castps_si256(
        _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(magic)));
    const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(Format::kSmallestNormal), magnitude);
    result = _mm256_blendv_epi8(result, _mm256_sub_epi32(sum, magic), small);

    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    result = _mm256_blendv_epi8(result, _mm256_set1_epi32(Format::kNan), nan);
    const __m256i sign = _mm256_srli_epi32(_mm256_xor_si256(bits, magnitude), 24);
    return _mm256_or_si256(result, sign);
  }
  static __m256 load_8(const double* from) {
    const __m128 low = _mm256_cvtpd_ps(_mm256_loadu_pd(from));
    const __m128 high = _mm256_cvtpd_ps(_mm256_loadu_pd(from + 4));
    return _mm256_set_m128(high, low);
  }
  static __m128i load_16_bytes(const void* from) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
  }
  static __m256 from_bf16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static __m256d low_half(__m256 value) { return _mm256_cvtps_pd(_mm256_castps256_ps128(value)); }
  static __m256d high_half(__m256 value) {
    return _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
  }
  static __m256i to_half(Register value) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(value.high, kNearestEven),
                            _mm256_cvtps_ph(value.low, kNearestEven));
  }
  static __m256i to_bf16(Register value, int nan) {
    // packus works in each half of 128 bits on its own: the permutation puts them in order.
    const __m256i packed =
        _mm256_packus_epi32(round_to_bf16(value.low, nan), round_to_bf16(value.high, nan));
    return _mm256_permute4x64_epi64(packed, 0b11011000);
  }
  // As in avx512_lanes.h.
  static __m256i round_to_bf16(__m256 value, int nan) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(nan), is_nan);
  }
};

}  // namespace

namespace smart_autocast {

ConvertFunction find_convert_avx2(torch::headeronly::ScalarType to,
                                  torch::headeronly::ScalarType from) {
  return find<Lanes>(to, from);
}

}  // namespace smart_autocast

#endif
