// The loop over a run of elements, for the instruction set of the file that includes this. Such a
// file gives `Lanes`:
//
//   kSize                              elements at a time, and the register that holds them as
//   Register                           float32
//   load(const From*) -> Register      unaligned
//   store<From>(To*, Register)         unaligned; From only says what becomes of a NaN
//   stream<From>(To*, Register)        the same around the caches; `To*` aligned to the whole store
//   fence()                            makes what was streamed visible to other threads
//   prefetch(const void*)              a line of the cache that will be loaded; any address. Empty
//                                      where that does not pay
//
// Everything stays in an unnamed namespace: a function shared with another file could be the copy
// that was compiled for an instruction set which the CPU lacks.

#pragma once

#include "../float8.h"
#include "convert.h"

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int kCacheLine = 64;
// How far ahead of a load its line is asked for. Without it, 4 MiB took 16 % longer (Zen 5).
constexpr int kPrefetchBytes = 2048;

// ATen's vectorized casts to bfloat16 make 0xffff of every NaN, its scalar ones 0x7fc0. Which of
// them a pair of dtypes gets was read off torch 2.13; the tests compare the bits.
template <typename From>
constexpr uint16_t kBf16Nan =
    std::is_same_v<From, float> || std::is_same_v<From, double> ? 0xffff : 0x7fc0;

// What is beyond the largest number of a float8 becomes, without its sign.
template <typename To>
int32_t beyond_float8() {
  if constexpr (std::is_same_v<To, Float8_e4m3fn>) {
    return smart_autocast::beyond_float8_e4m3fn;
  } else {
    return Float8<To>::kInfinity;
  }
}

template <typename Lanes, typename To, typename From>
void convert_run(void* to_bytes, const void* from_bytes, int64_t count, bool stream) {
  constexpr int kSize = Lanes::kSize;
  To* to = static_cast<To*>(to_bytes);
  const From* from = static_cast<const From*>(from_bytes);

  // Fewer elements than a register holds, through buffers: no element is read or written that does
  // not belong to the run, and its bits do not depend on where in the run it stands.
  const auto convert_few = [&](int64_t few) {
    alignas(kCacheLine) From in[kSize];
    alignas(kCacheLine) To out[kSize];
    std::memset(static_cast<void*>(in), 0, sizeof(in));
    std::memcpy(static_cast<void*>(in), static_cast<const void*>(from), few * sizeof(From));
    Lanes::template store<From>(out, Lanes::load(in));
    std::memcpy(static_cast<void*>(to), static_cast<const void*>(out), few * sizeof(To));
    to += few;
    from += few;
    count -= few;
  };

  const auto misaligned = reinterpret_cast<uintptr_t>(to) % kCacheLine;
  if (stream && misaligned % sizeof(To) == 0) {
    int64_t head = misaligned == 0 ? 0 : (kCacheLine - misaligned) / sizeof(To);
    for (head = head < count ? head : count; head > 0;) {
      const int64_t few = head < kSize ? head : kSize;
      convert_few(few);
      head -= few;
    }
    for (; count >= kSize; count -= kSize, to += kSize, from += kSize) {
      Lanes::template stream<From>(to, Lanes::load(from));
    }
    Lanes::fence();
  }
  for (; count >= kSize; count -= kSize, to += kSize, from += kSize) {
    for (int line = 0; line < static_cast<int>(kSize * sizeof(From)); line += kCacheLine) {
      Lanes::prefetch(reinterpret_cast<const char*>(from) + line + kPrefetchBytes);
    }
    Lanes::template store<From>(to, Lanes::load(from));
  }
  if (count > 0) {
    convert_few(count);
  }
}

template <typename Lanes, typename To>
smart_autocast::ConvertFunction find_from(torch::headeronly::ScalarType from) {
  switch (from) {
    case torch::headeronly::ScalarType::Double:
      return convert_run<Lanes, To, double>;
    case torch::headeronly::ScalarType::Float:
      return convert_run<Lanes, To, float>;
    case torch::headeronly::ScalarType::Half:
      return convert_run<Lanes, To, Half>;
    case torch::headeronly::ScalarType::BFloat16:
      return convert_run<Lanes, To, BFloat16>;
    case torch::headeronly::ScalarType::Float8_e4m3fn:
      return convert_run<Lanes, To, Float8_e4m3fn>;
    case torch::headeronly::ScalarType::Float8_e5m2:
      return convert_run<Lanes, To, Float8_e5m2>;
    default:
      return nullptr;
  }
}

// Every pair of float64, float32, float16, bfloat16 and the two float8 but equal ones (float64 to
// itself is no conversion through float32).
template <typename Lanes>
smart_autocast::ConvertFunction find(torch::headeronly::ScalarType to,
                                     torch::headeronly::ScalarType from) {
  if (to == from) {
    return nullptr;
  }
  switch (to) {
    case torch::headeronly::ScalarType::Double:
      return find_from<Lanes, double>(from);
    case torch::headeronly::ScalarType::Float:
      return find_from<Lanes, float>(from);
    case torch::headeronly::ScalarType::Half:
      return find_from<Lanes, Half>(from);
    case torch::headeronly::ScalarType::BFloat16:
      return find_from<Lanes, BFloat16>(from);
    case torch::headeronly::ScalarType::Float8_e4m3fn:
      return find_from<Lanes, Float8_e4m3fn>(from);
    case torch::headeronly::ScalarType::Float8_e5m2:
      return find_from<Lanes, Float8_e5m2>(from);
    default:
      return nullptr;
  }
}

}  // namespace
