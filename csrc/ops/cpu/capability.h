// The instruction set that the CPU kernels use, chosen when they are first called. Nothing but the
// files named for an instruction set is compiled for more than the baseline.

#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace smart_autocast {

enum class Capability { kDefault, kAvx2, kAvx512, kAvx512Bf16 };

inline Capability detect_capability() {
#if defined(__x86_64__)
  // ATen's own switch: results that depend on the instruction set (NaNs cast to bfloat16) stay
  // equal to ATen's.
  const char* wanted = std::getenv("ATEN_CPU_CAPABILITY");
  if (wanted != nullptr && std::strcmp(wanted, "default") == 0) {
    return Capability::kDefault;
  }
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  __builtin_cpu_init();
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    return Capability::kDefault;
  }
  if ((wanted != nullptr && std::strcmp(wanted, "avx2") == 0) ||
      !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return Capability::kAvx2;
  }
  // ATen's name AVX512 does not tell the two apart, nor do results.
  const bool bf16 = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 1 << 5) != 0;
  return bf16 ? Capability::kAvx512Bf16 : Capability::kAvx512;
#else
  return Capability::kDefault;
#endif
}

inline Capability cpu_capability() {
  static const Capability capability = detect_capability();
  return capability;
}

}  // namespace smart_autocast
