// Compiled for AVX-512 F, BW, DQ and VL (CMakeLists.txt); called only where the CPU has them.
//
// AVX512-BF16's vcvtneps2bf16 is not used: it takes denormal numbers for zero and keeps the payload
// of NaNs, so its bits are not ATen's, and the loop waits for memory, not for the rounding.

#include "convert.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

#include "convert_loop.h"

namespace {

struct Lanes {
  static constexpr int kSize = 16;
  using Register = __m512;

  static Register load(const float* from) { return _mm512_loadu_ps(from); }
  static Register load(const double* from) {
    const __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(from));
    const __m256 high = _mm512_cvtpd_ps(_mm512_loadu_pd(from + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static Register load(const Half* from) { return _mm512_cvtph_ps(load_16_bits(from)); }
  static Register load(const BFloat16* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16_bits(from)), 16));
  }

  template <typename>
  static void store(float* to, Register value) {
    _mm512_storeu_ps(to, value);
  }
  template <typename>
  static void store(double* to, Register value) {
    _mm512_storeu_pd(to, low_half(value));
    _mm512_storeu_pd(to + 8, high_half(value));
  }
  template <typename>
  static void store(Half* to, Register value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_half(value));
  }
  template <typename From>
  static void store(BFloat16* to, Register value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bf16(value, kBf16Nan<From>));
  }

  template <typename>
  static void stream(float* to, Register value) {
    _mm512_stream_ps(to, value);
  }
  template <typename>
  static void stream(double* to, Register value) {
    _mm512_stream_pd(to, low_half(value));
    _mm512_stream_pd(to + 8, high_half(value));
  }
  template <typename>
  static void stream(Half* to, Register value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), to_half(value));
  }
  template <typename From>
  static void stream(BFloat16* to, Register value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), to_bf16(value, kBf16Nan<From>));
  }
  static void fence() { _mm_sfence(); }

 private:
  static __m256i load_16_bits(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
  static __m512d low_half(Register value) { return _mm512_cvtps_pd(_mm512_castps512_ps256(value)); }
  static __m512d high_half(Register value) {
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
  }
  static __m256i to_half(Register value) {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // To nearest even: half a unit in the last place less one bit, and one bit more if the result
  // would be odd, then the lower half is cut off.
  static __m256i to_bf16(Register value, int nan) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(nan)));
  }
};

}  // namespace

namespace smart_autocast {

ConvertFunction find_convert_avx512(torch::headeronly::ScalarType to,
                                    torch::headeronly::ScalarType from) {
  return find<Lanes>(to, from);
}

}  // namespace smart_autocast

#endif
