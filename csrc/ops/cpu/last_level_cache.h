// When stores go around the caches: for results that a core's last cache does not hold, in memory
// that was written to before.

#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstdio>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace smart_autocast {

// As Linux has it for one core. sysconf would not do: on AMD's processors glibc gives the sum over
// all of the chip's caches.
inline int64_t last_level_cache_bytes() {
  static const int64_t bytes = [] {
    int64_t kilobytes = 0;
    if (FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (std::fscanf(file, "%" SCNd64 "K", &kilobytes) != 1) {
        kilobytes = 0;
      }
      std::fclose(file);
    }
    return (kilobytes > 0 ? kilobytes : int64_t{32} << 10) << 10;
  }();
  return bytes;
}

// Whether something has been written to the page of an address before. A new one is zeroed by the
// system at the first store, and then in cache: stores around the caches would be slower there.
inline bool is_written(const char* address) {
#ifdef __linux__
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident = 1;
  auto* begin = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) / page * page);
  return mincore(begin, 1, &resident) != 0 || (resident & 1) != 0;
#else
  (void)address;
  return true;
#endif
}

}  // namespace smart_autocast
