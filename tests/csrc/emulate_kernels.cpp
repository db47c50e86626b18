// The CUDA kernels, thread by thread on a CPU, on random lists of tensors, which the code of their
// launches divides into tables and blocks. Where each thread's work
// is independent of the others', so that their order does not matter, one thread runs them all;
// where a block's threads wait for each other, they are threads here, too. Built and run by
// test_cuda_code.py, with AddressSanitizer and UBSan, which see every access outside of a tensor
// and every vector that is not aligned.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/ops/cpu/round_loop.h"

struct Index {
  unsigned x, y;
};
static thread_local Index blockIdx, threadIdx;
using std::min;
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // one block at a time

// One block's threads, and what those of a warp exchange.
static std::barrier block_barrier(256);
static std::barrier<> warp_barriers[] = {std::barrier(32), std::barrier(32), std::barrier(32),
                                         std::barrier(32), std::barrier(32), std::barrier(32),
                                         std::barrier(32), std::barrier(32)};
static double exchanged[256];
static void __syncthreads() { block_barrier.arrive_and_wait(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  std::barrier<>& warp = warp_barriers[threadIdx.x / 32];
  exchanged[threadIdx.x] = static_cast<double>(value);
  warp.arrive_and_wait();
  const auto other = static_cast<T>(exchanged[threadIdx.x ^ distance]);
  warp.arrive_and_wait();
  return other;
}
// Only one thread of a block comes to these.
template <typename T>
void atomicMax(T* to, T value) {
  *to = std::max(*to, value);
}
static void atomicAdd(double* to, double value) { *to += value; }

#include "../../csrc/ops/cuda/cast_with_stats_device.cuh"
#include "../../csrc/ops/cuda/multi_cast_device.cuh"
#include "../../csrc/ops/cuda/split.cuh"
#include "../../csrc/ops/cuda/stochastic_cast_device.cuh"
#include "../../csrc/ops/cuda/unscale_cast_device.cuh"

using namespace smart_autocast;

constexpr float kSpecial[] = {NAN, 1e9F, -1e9F, 1e-9F, 3e38F, 1e-39F, INFINITY, -INFINITY};

// Tensors in a list, so that some need more than one small table.
constexpr int kMost = 2 * kSmallTable + 9;

// A random list of up to `most` tensors, at any place in memory or, for results alone, as an
// allocator has them; with the first `special` of these numbers here and there.
template <typename To, typename From>
struct List {
  std::vector<std::vector<From>> from;
  std::vector<std::vector<To>> to;
  std::vector<int> from_offset, to_offset, count;
  std::vector<Entry> entries;
  To untouched;
  // Of the GPU: one processor's, or so many that large tensors are in small chunks.
  int64_t blocks_at_once;
  bool large_tables;

  List(std::mt19937& random, int most, bool any_place, unsigned special) {
    const int size = 1 + random() % most;
    blocks_at_once = random() % 2 == 0 ? 1 + random() % 3 : 40;
    large_tables = random() % 2 == 0;
    std::memset(static_cast<void*>(&untouched), 0x5a, sizeof(To));
    from.resize(size);
    to.resize(size);
    for (int i = 0; i < size; ++i) {
      const bool large = most == 1 || random() % 20 == 0;
      count.push_back(1 + random() % (large ? 30000 : 70));
      from_offset.push_back(random() % 9);
      to_offset.push_back(any_place ? random() % 9 : 0);
      from[i].resize(from_offset[i] + count[i]);
      to[i].assign(to_offset[i] + count[i] + 9, untouched);
      for (From& value : from[i]) {
        const float number = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 8;
        const bool is_special = special > 0 && random() % 50 == 0;
        value = static_cast<From>(is_special ? kSpecial[random() % special] : number);
      }
      entries.push_back({from[i].data() + from_offset[i], to[i].data() + to_offset[i], count[i]});
    }
  }

  // Every tensor is written where it is.
  void make_in_place() {
    for (size_t i = 0; i < entries.size(); ++i) {
      To* place = to[i].data() + to_offset[i];
      std::copy_n(from[i].data() + from_offset[i], count[i], place);
      entries[i].from = place;
    }
  }

  // kernel(table), once for each thread of each launch; after(table) at the end of a launch.
  template <typename Kernel, typename After>
  void run(const Kernel& kernel, const After& after) const {
    const auto launch = [&](const auto& table, unsigned blocks) {
      for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x) {
          kernel(table);
        }
      }
      after(table);
    };
    for_each_table(entries, large_tables, chunk_of<To>(2), blocks_at_once, launch);
  }
  template <typename Kernel>
  void run(const Kernel& kernel) const {
    run(kernel, [](const auto&) {});
  }

  // A launch of one tensor.
  template <typename Kernel>
  void run_with_threads(const Kernel& kernel) const {
    const auto table = make_table<1>(entries.data(), 1, chunk_of<To>(2), blocks_at_once);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        threadIdx.x = i;
        for (blockIdx.x = 0; blockIdx.x < count_blocks(table); ++blockIdx.x) {
          kernel(table);
          __syncthreads();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  // Whether every element is wanted(tensor, place) and every one beside the tensors untouched.
  template <typename Wanted>
  bool check(const char* kernel, const Wanted& wanted) const {
    for (int i = 0; i < static_cast<int>(entries.size()); ++i) {
      for (int k = 0; k < static_cast<int>(to[i].size()); ++k) {
        const int place = k - to_offset[i];
        const bool inside = place >= 0 && place < count[i];
        const To right = inside ? wanted(i, place) : untouched;
        if (std::memcmp(&right, &to[i][k], sizeof(To)) != 0) {
          std::printf("%s: tensor %d of %zu, element %d of %d\n", kernel, i, entries.size(), place,
                      count[i]);
          return false;
        }
      }
    }
    return true;
  }

  From source(int i, int place) const { return from[i][from_offset[i] + place]; }
};

template <typename To, typename From>
bool multi_cast(std::mt19937& random) {
  const List<To, From> list(random, kMost, /*any_place=*/true, /*special=*/8);
  // Of the version of torch that this is compiled with, whose own casts are in the table.
  const int32_t beyond = static_cast<Float8_e4m3fn>(1e9F).x;
  list.run([&]<int kCapacity>(const Table<kCapacity>& table) {
    multi_cast_kernel<To, From, kCapacity>(table, beyond);
  });
  return list.check("multi_cast",
                    [&](int i, int place) { return convert<To>(list.source(i, place)); });
}

// Against torch's own type: all signs, exponents and upper bits of the fraction, each with lower
// bits around those that decide; and everything that float16 has.
template <typename To>
bool rounds_to_float8() {
  const int32_t beyond = static_cast<Float8_e4m3fn>(1e9F).x;
  const auto equal = [&](float value) {
    const uint8_t actual = convert<To>(value, beyond).x, wanted = static_cast<To>(value).x;
    if (actual != wanted) {
      std::printf("float8: %g becomes %02x, wanted %02x\n", value, actual, wanted);
    }
    return actual == wanted;
  };
  bool right = true;
  for (uint32_t high = 0; high < 1u << 16; ++high) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = high << 16 | low;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      right &= equal(value);
    }
    Half half;
    half.x = static_cast<unsigned short>(high);
    right &= equal(static_cast<float>(half));
  }
  // From itself, NaNs of any bits stay as they are.
  for (uint32_t bits = 0; bits < 1u << 8; ++bits) {
    To number;
    number.x = static_cast<uint8_t>(bits);
    right &= convert<To>(number, beyond).x == bits;
  }
  return right;
}

template <typename To, typename From>
bool unscale_cast(std::mt19937& random) {
  List<To, From> list(random, kMost, /*any_place=*/true, /*special=*/0);
  if (random() % 2 == 0) {
    const auto i = random() % list.count.size();
    list.from[i].back() = static_cast<From>(kSpecial[random() % 2 == 0 ? 0 : 7]);
  }
  if constexpr (std::is_same_v<To, From>) {
    if (random() % 2 == 0) {
      list.make_in_place();
    }
  }
  const float scale = 3, inverse = 1.0F / 3;
  float found = 0;
  list.run([&]<int kCapacity>(const Table<kCapacity>& table) {
    unscale_cast_kernel<To, From, kCapacity>(table, &scale, &found);
  });
  float wanted_found = 0;
  const bool right = list.check("unscale_cast", [&](int i, int place) {
    using Wide = std::conditional_t<std::is_same_v<To, double>, double, float>;
    const auto narrow = static_cast<Wide>(convert<To>(list.source(i, place)));
    wanted_found = std::isfinite(narrow) ? wanted_found : 1;
    return convert<To>(narrow * inverse);
  });
  if (found != wanted_found) {
    std::printf("unscale_cast: found_inf is %g, wanted %g\n", found, wanted_found);
  }
  return right && found == wanted_found;
}

// Against the kernel for CPUs, whose bits test_stochastic_cast.py compares with others.
template <typename To>
bool stochastic_cast(std::mt19937& random, Grid grid) {
  const List<To, float> list(random, kMost, /*any_place=*/false, /*special=*/8);
  const uint64_t seed = uint64_t{random()} << 32 | random(), counter = uint64_t{0xffffff00};
  // As in multi_cast, above.
  const int32_t beyond = static_cast<Float8_e4m3fn>(1e9F).x;
  uint64_t of_table = counter;
  list.run(
      [&]<int kCapacity>(const Table<kCapacity>& table) {
        stochastic_cast_kernel<To, kCapacity>(table, grid, beyond, seed, of_table);
      },
      [&](const auto& table) { of_table += count_counters(table); });
  std::vector<uint32_t> rounded;
  int of = -1;
  uint64_t first = counter;
  return list.check("stochastic_cast", [&](int i, int place) {
    if (i != of) {
      first += (rounded.size() + 3) / 4;
      rounded.resize(list.count[i]);
      std::memcpy(rounded.data(), list.from[i].data() + list.from_offset[i], 4 * rounded.size());
      round_loop(rounded.data(), list.count[i], grid, seed, first);
      of = i;
    }
    float value;
    std::memcpy(&value, &rounded[place], sizeof(value));
    return convert<To>(value);
  });
}

template <typename To, typename From>
bool cast_with_stats(std::mt19937& random) {
  const List<To, From> list(random, 1, /*any_place=*/true, random() % 2 == 0 ? 6 : 8);
  double numbers[4] = {};
  list.run_with_threads(
      [&](const Table<1>& table) { cast_with_stats_kernel<To, From>(table, numbers); });
  double wanted[4] = {};
  const bool right = list.check("cast_with_stats", [&](int i, int place) {
    const From value = list.source(i, place);
    const auto number = static_cast<double>(value);
    const To result = convert<To>(value);
    const auto after = static_cast<double>(static_cast<float>(result));
    wanted[0] = std::isnan(number) ? wanted[0] : std::max(wanted[0], std::fabs(number));
    wanted[1] += std::isfinite(number) && std::isinf(after);
    wanted[2] += number != 0 && after == 0;
    wanted[3] += std::isnan(number);
    return result;
  });
  if (std::memcmp(numbers, wanted, sizeof(wanted)) != 0) {
    std::printf("cast_with_stats: %g %g %g %g, wanted %g %g %g %g\n", numbers[0], numbers[1],
                numbers[2], numbers[3], wanted[0], wanted[1], wanted[2], wanted[3]);
    return false;
  }
  return right;
}

// Tensors as an allocator has them are read by vectors, wherever a block begins in one and whatever
// comes before it in the list. Nothing is read here.
template <typename To, typename From>
bool loads_vectors(std::mt19937& random) {
  auto* memory = reinterpret_cast<char*>(uintptr_t{1} << 32);
  std::vector<Entry> entries(1 + random() % kMost);
  for (Entry& entry : entries) {
    entry = {memory, memory, static_cast<int64_t>(1 + random() % 30000)};
  }
  bool right = true;
  const auto look = [&](const Entry& entry, int64_t first, int64_t place, int count) {
    const Split<To, From> split(static_cast<To*>(entry.to) + (place - first),
                                static_cast<const From*>(entry.from) + (place - first), count);
    right &= split.loads_vectors || split.vectors == 0;
  };
  const auto launch = [&](const auto& table, unsigned blocks) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      for_each_stretch(table, look);
    }
  };
  for_each_table(entries, random() % 2 == 0, chunk_of<To>(2), 1, launch);
  if (!right) {
    std::printf("elements of %zu bytes to %zu bytes are read one by one\n", sizeof(From),
                sizeof(To));
  }
  return right;
}

// As many small tensors, as many blocks; of a tensor that is not large, so many that all processors
// have some; of a large one, as many as it has chunks. Nothing is read here.
bool occupies_the_gpu() {
  constexpr int64_t kBlocks = 1000, kChunk = 4096;
  const auto blocks = [](int count, int64_t numel) {
    const std::vector<Entry> entries(count, Entry{nullptr, nullptr, numel});
    return count_blocks(make_table<kSmallTable>(entries.data(), count, kChunk, kBlocks));
  };
  const bool right = blocks(148, 256) == 148 && blocks(1, 256) == 1 && blocks(1, 257) == 2 &&
                     blocks(1, 300'000) == 586 && blocks(1, int64_t{1} << 40) == 1u << 28;
  if (!right) {
    std::printf("blocks: %u %u %u %u %u\n", blocks(148, 256), blocks(1, 256), blocks(1, 257),
                blocks(1, 300'000), blocks(1, int64_t{1} << 40));
  }
  return right;
}

// All that it has, NaNs included.
bool widens_float8() {
  for (int i = 0; i < 256; ++i) {
    Float8_e4m3fn number;
    number.x = static_cast<uint8_t>(i);
    const float actual = to_float(number), wanted = static_cast<float>(number);
    if (std::memcmp(&actual, &wanted, sizeof(actual)) != 0) {
      std::printf("float8_e4m3fn: %02x becomes %g, wanted %g\n", i, actual, wanted);
      return false;
    }
  }
  return true;
}

int main() {
  bool right = occupies_the_gpu() && widens_float8();
  right &= rounds_to_float8<Float8_e4m3fn>() && rounds_to_float8<Float8_e5m2>();
  for (unsigned seed = 0; seed < 3; ++seed) {
    std::mt19937 random(seed);
    right &= loads_vectors<BFloat16, float>(random) && loads_vectors<float, BFloat16>(random) &&
             loads_vectors<Float8_e5m2, float>(random) &&
             loads_vectors<float, Float8_e5m2>(random) &&
             loads_vectors<Half, Float8_e5m2>(random) && loads_vectors<double, Half>(random) &&
             loads_vectors<Half, double>(random) && loads_vectors<Half, Half>(random);
  }
  for (unsigned seed = 0; seed < 6; ++seed) {
    std::mt19937 random(seed);
    right &= multi_cast<BFloat16, float>(random) && multi_cast<float, BFloat16>(random) &&
             multi_cast<Half, BFloat16>(random) && multi_cast<double, Half>(random) &&
             multi_cast<Half, double>(random) && multi_cast<float, float>(random);
    right &= multi_cast<Float8_e4m3fn, float>(random) && multi_cast<Float8_e5m2, Half>(random) &&
             multi_cast<float, Float8_e4m3fn>(random) &&
             multi_cast<Float8_e5m2, Float8_e4m3fn>(random) &&
             multi_cast<Float8_e4m3fn, Float8_e5m2>(random) &&
             multi_cast<Float8_e4m3fn, double>(random) && multi_cast<double, Float8_e5m2>(random) &&
             multi_cast<Float8_e5m2, Float8_e5m2>(random);
    right &= unscale_cast<float, Half>(random) && unscale_cast<float, float>(random) &&
             unscale_cast<float, double>(random) && unscale_cast<double, double>(random) &&
             unscale_cast<BFloat16, BFloat16>(random);
    right &= stochastic_cast<BFloat16>(random, {.fraction = 7, .bottom = 0}) &&
             stochastic_cast<Half>(random, {.fraction = 10, .bottom = 113}) &&
             stochastic_cast<Float8_e4m3fn>(random, {.fraction = 3, .bottom = 121}) &&
             stochastic_cast<Float8_e5m2>(random, {.fraction = 2, .bottom = 113});
  }
  for (unsigned seed = 0; seed < 3; ++seed) {
    std::mt19937 random(seed);
    right &= cast_with_stats<Half, float>(random) && cast_with_stats<BFloat16, double>(random) &&
             cast_with_stats<BFloat16, Half>(random);
  }
  return right ? 0 : 1;
}
