// Results that a core's last cache does not hold: how large that is, and what to do about memory
// that nobody has written to. The system zeroes each of its pages at the first store, which takes
// many times longer than the cast.

#pragma once

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

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

inline uintptr_t page_bytes() {
#ifdef __linux__
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
#else
  return 4096;
#endif
}

// Whether something has been written to the page of an address before. A new one is zeroed by the
// system at the first store, and then in cache: stores around the caches would be slower there.
inline bool is_written(const char* address) {
#ifdef __linux__
  unsigned char resident = 1;
  auto* begin = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) & -page_bytes());
  return mincore(begin, 1, &resident) != 0 || (resident & 1) != 0;
#else
  (void)address;
  return true;
#endif
}

// Stretches of memory that nobody has written to.
class NewMemory {
 public:
  void add(const char* begin, const char* end) {
    stretches_.emplace_back(reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(end));
  }

  // Lets the system give it in pages of 2 MiB, as NumPy does for large arrays: one fault in place
  // of 512. Whole ones within the stretches alone, so that no more memory is taken than otherwise;
  // results that a heap lays out one after the other, but for its own few bytes, are one stretch.
  // Advice: where the system has no such pages to give, nothing changes.
  void ask_for_huge_pages() {
#ifdef __linux__
    std::sort(stretches_.begin(), stretches_.end());
    for (auto next = stretches_.cbegin(); next != stretches_.cend();) {
      auto [begin, end] = *next++;
      for (; next != stretches_.cend() && next->first - end < page_bytes(); ++next) {
        end = next->second;
      }
      begin = (begin + kHuge - 1) & -kHuge;
      end &= -kHuge;
      if (begin < end) {
        madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
      }
    }
#endif
  }

 private:
  static constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  std::vector<std::pair<uintptr_t, uintptr_t>> stretches_;
};

}  // namespace smart_autocast
