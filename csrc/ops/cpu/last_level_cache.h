// How much a core's last cache holds: larger results are stored around it.

#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstdio>

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

}  // namespace smart_autocast
