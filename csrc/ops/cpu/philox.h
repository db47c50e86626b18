// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011),
// for the instruction set of the file that includes this.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// Counters at a time, with four words each.
constexpr int kCounters = 16;
constexpr int kWords = 4 * kCounters;

// It works on words of 32 bits, here each in the lower half of a lane of 64: what the upper half
// holds is lost where it is multiplied. Compilers make no vectors of it by themselves.
#if defined(__AVX512F__)

struct Lanes64 {
  static constexpr int kSize = 8;
  using Register = __m512i;

  static Register all(uint64_t value) { return _mm512_set1_epi64(static_cast<int64_t>(value)); }
  // `first` and the numbers after it, in the order in which store_words takes them.
  static Register counters(uint64_t first) {
    return _mm512_add_epi64(all(first), _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0));
  }
  static Register multiply(Register a, Register b) { return _mm512_mul_epu32(a, b); }
  static Register upper(Register a) { return _mm512_srli_epi64(a, 32); }
  static Register join(Register low, Register high) {
    return _mm512_mask_shuffle_epi32(low, 0xaaaa, high, _MM_PERM_CCAA);
  }
  static void store_words(uint32_t* to, Register first, Register second) {
    _mm512_storeu_si512(to, _mm512_unpacklo_epi64(first, second));
    _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi64(first, second));
  }
};

#elif defined(__AVX2__)

struct Lanes64 {
  static constexpr int kSize = 4;
  using Register = __m256i;

  static Register all(uint64_t value) { return _mm256_set1_epi64x(static_cast<int64_t>(value)); }
  static Register counters(uint64_t first) {
    return _mm256_add_epi64(all(first), _mm256_set_epi64x(3, 1, 2, 0));
  }
  static Register multiply(Register a, Register b) { return _mm256_mul_epu32(a, b); }
  static Register upper(Register a) { return _mm256_srli_epi64(a, 32); }
  static Register join(Register low, Register high) {
    return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xaa);
  }
  static void store_words(uint32_t* to, Register first, Register second) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi64(first, second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), _mm256_unpackhi_epi64(first, second));
  }
};

#else

struct Lanes64 {
  static constexpr int kSize = 1;
  using Register = uint64_t;

  static Register all(uint64_t value) { return value; }
  static Register counters(uint64_t first) { return first; }
  static Register multiply(Register a, Register b) { return (a & 0xffffffff) * (b & 0xffffffff); }
  static Register upper(Register a) { return a >> 32; }
  static Register join(Register low, Register high) { return (low & 0xffffffff) | high << 32; }
  static void store_words(uint32_t* to, Register first, Register second) {
    std::memcpy(to, &first, sizeof(first));
    std::memcpy(to + 2, &second, sizeof(second));
  }
};

#endif

// The words of the counters from `counter` on, which are numbers of 64 bits.
inline void make_words(uint32_t (&words)[kWords], uint64_t seed, uint64_t counter) {
  using Register = Lanes64::Register;
  const Register multiplier0 = Lanes64::all(0xd2511f53), multiplier1 = Lanes64::all(0xcd9e8d57);
  for (int done = 0; done < kCounters; done += Lanes64::kSize) {
    Register c0 = Lanes64::counters(counter + done), c1 = Lanes64::upper(c0);
    Register c2 = Lanes64::all(0), c3 = c2;
    auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const Register first = Lanes64::multiply(c0, multiplier0);
      const Register second = Lanes64::multiply(c2, multiplier1);
      c0 = Lanes64::upper(second) ^ c1 ^ Lanes64::all(key0);
      c2 = Lanes64::upper(first) ^ c3 ^ Lanes64::all(key1);
      c1 = second;
      c3 = first;
      key0 += 0x9e3779b9;
      key1 += 0xbb67ae85;
    }
    Lanes64::store_words(words + 4 * done, Lanes64::join(c0, c1), Lanes64::join(c2, c3));
  }
}

}  // namespace
