// 32 elements in two registers of AVX-512 F, BW, DQ and VL: for the files compiled for these. With
// 32 of them, stores of 16-bit elements are whole lines of the cache.

#pragma once

#include "convert_loop.h"

#include <immintrin.h>

namespace {

struct Avx512Lanes {
  static constexpr int kSize = 32;
  struct Register {
    __m512 low, high;
  };

  static Register load(const float* from) {
    return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)};
  }
  static Register load(const double* from) { return {load_16(from), load_16(from + 16)}; }
  static Register load(const Half* from) { return from_half(_mm512_loadu_si512(from)); }
  static Register load(const BFloat16* from) {
    const __m512i bits = _mm512_loadu_si512(from);
    return {from_bf16(_mm512_castsi512_si256(bits)), from_bf16(_mm512_extracti64x4_epi64(bits, 1))};
  }
  static Register load(const Float8_e5m2* from) {
    // float16 with a shorter fraction.
    return from_half(_mm512_slli_epi16(_mm512_cvtepu8_epi16(load_bytes(from)), 8));
  }
  static Register load(const Float8_e4m3fn* from) {
    // As float16 with another bias of the exponent, 2^8 times too small; without infinities.
    const __m512i bytes = _mm512_cvtepi8_epi16(load_bytes(from));
    const __m512i magnitude = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
    const __m512i half = _mm512_ternarylogic_epi32(_mm512_slli_epi16(magnitude, 7), bytes,
                                                   _mm512_set1_epi16(INT16_MIN), 0xf8);
    const Register value = from_half(half);
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
    return {from_e4m3(value.low, static_cast<__mmask16>(nan)),
            from_e4m3(value.high, static_cast<__mmask16>(nan >> 16))};
  }

  template <typename>
  static void store(float* to, Register value) {
    _mm512_storeu_ps(to, value.low);
    _mm512_storeu_ps(to + 16, value.high);
  }
  template <typename>
  static void store(double* to, Register value) {
    _mm512_storeu_pd(to, low_half(value.low));
    _mm512_storeu_pd(to + 8, high_half(value.low));
    _mm512_storeu_pd(to + 16, low_half(value.high));
    _mm512_storeu_pd(to + 24, high_half(value.high));
  }
  template <typename>
  static void store(Half* to, Register value) {
    _mm512_storeu_si512(to, to_half(value));
  }
  template <typename From>
  static void store(BFloat16* to, Register value) {
    _mm512_storeu_si512(to, to_bf16(value, kBf16Nan<From>));
  }
  template <typename, typename To>
  static void store(To* to, Register value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_float8<To>(value));
  }

  template <typename>
  static void stream(float* to, Register value) {
    _mm512_stream_ps(to, value.low);
    _mm512_stream_ps(to + 16, value.high);
  }
  template <typename>
  static void stream(double* to, Register value) {
    _mm512_stream_pd(to, low_half(value.low));
    _mm512_stream_pd(to + 8, high_half(value.low));
    _mm512_stream_pd(to + 16, low_half(value.high));
    _mm512_stream_pd(to + 24, high_half(value.high));
  }
  template <typename>
  static void stream(Half* to, Register value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), to_half(value));
  }
  template <typename From>
  static void stream(BFloat16* to, Register value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), to_bf16(value, kBf16Nan<From>));
  }
  template <typename, typename To>
  static void stream(To* to, Register value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), to_float8<To>(value));
  }
  static void fence() { _mm_sfence(); }
  static void prefetch(const void* from) {
    _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T0);
  }

 private:
  static Register from_half(__m512i bits) {
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(bits)),
            _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
  }
  static __m256i load_bytes(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
  static __m512 from_e4m3(__m512 value, __mmask16 nan) {
    const __m512 sign = _mm512_and_ps(value, _mm512_set1_ps(-0.0F));
    const __m512 nans = _mm512_or_ps(sign, _mm512_castsi512_ps(_mm512_set1_epi32(0x7ff00000)));
    return _mm512_mask_mov_ps(_mm512_mul_ps(value, _mm512_set1_ps(256)), nan, nans);
  }
  template <typename To>
  static __m256i to_float8(Register value) {
    return _mm256_set_m128i(_mm512_cvtepi32_epi8(round_to_float8<To>(value.high)),
                            _mm512_cvtepi32_epi8(round_to_float8<To>(value.low)));
  }
  template <typename To>
  static __m512i round_to_float8(__m512 value) {
    using Format = Float8<To>;
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i odd =
        _mm512_and_si512(_mm512_srli_epi32(magnitude, Format::kDropped), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(Format::kRebiasAndHalf));
    __m512i result = _mm512_srli_epi32(_mm512_add_epi32(magnitude, half), Format::kDropped);
    result = _mm512_min_epi32(result, _mm512_set1_epi32(beyond_float8<To>()));

    const __m512i magic = _mm512_set1_epi32(Format::kMagicBits);
    const __m512i sum = _mm512_castps_si512(
        _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(magic)));
    const __mmask16 small =
        _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(Format::kSmallestNormal));
    result = _mm512_mask_sub_epi32(result, small, sum, magic);

    const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    result = _mm512_mask_mov_epi32(result, nan, _mm512_set1_epi32(Format::kNan));
    const __m512i sign = _mm512_srli_epi32(_mm512_xor_si512(bits, magnitude), 24);
    return _mm512_or_si512(result, sign);
  }
  static __m512 load_16(const double* from) {
    const __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(from));
    const __m256 high = _mm512_cvtpd_ps(_mm512_loadu_pd(from + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static __m512 from_bf16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static __m512d low_half(__m512 value) { return _mm512_cvtps_pd(_mm512_castps512_ps256(value)); }
  static __m512d high_half(__m512 value) {
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
  }
  static __m512i to_half(Register value) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(value.low, kNearestEven)),
                              _mm512_cvtps_ph(value.high, kNearestEven), 1);
  }
  static __m512i to_bf16(Register value, int nan) {
#if defined(__AVX512BF16__)
    // The instruction takes denormal numbers for zero and keeps some of a NaN: rare, so looked for.
    // A thread that takes denormals for zeros (torch.set_flush_denormal) has them in that class.
    constexpr int kZeroDenormalOrNan = 0x02 | 0x04 | 0x20 | 0x80 | 0x01;
    const __mmask16 low = _mm512_fpclass_ps_mask(value.low, kZeroDenormalOrNan);
    const __mmask16 high = _mm512_fpclass_ps_mask(value.high, kZeroDenormalOrNan);
    if (__builtin_expect((low | high) == 0, 1) ||
        (not_zero(low, value.low) | not_zero(high, value.high)) == 0) {
      return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(value.high, value.low));
    }
#endif
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtepi32_epi16(round_to_bf16(value.low, nan))),
        _mm512_cvtepi32_epi16(round_to_bf16(value.high, nan)), 1);
  }
#if defined(__AVX512BF16__)
  static __mmask16 not_zero(__mmask16 among, __m512 value) {
    return _mm512_mask_test_epi32_mask(among, _mm512_castps_si512(value),
                                       _mm512_set1_epi32(0x7fffffff));
  }
#endif
  // To nearest even: half a unit in the last place less one bit, and one bit more if the result
  // would be odd, then the lower half is cut off.
  static __m512i round_to_bf16(__m512 value, int nan) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(nan));
  }
};

}  // namespace
