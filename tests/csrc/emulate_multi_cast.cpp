// multi_cast's CUDA kernel, thread by thread on a CPU, on random lists of tensors: each thread's
// work is independent of the others', so their order does not matter. Built and run by
// test_cuda_code.py, with AddressSanitizer and UBSan, which see every access outside of a tensor
// and every vector that is not aligned.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

struct Index {
  unsigned x;
};
static Index blockIdx, threadIdx, gridDim;
using std::min;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

#include "../../csrc/ops/cuda/multi_cast_device.cuh"

using namespace smart_autocast;

// One random list; true if every element is right and every one beside the tensors untouched.
template <typename To, typename From>
bool test(unsigned seed) {
  std::mt19937 random(seed);
  const int size = 1 + random() % kSmallTable;
  std::vector<std::vector<From>> from(size);
  std::vector<std::vector<To>> to(size);
  std::vector<int> from_offset(size), to_offset(size), count(size);
  To untouched;
  std::memset(static_cast<void*>(&untouched), 0x5a, sizeof(To));
  static Table<kSmallTable> table;
  table.size = size;
  table.total = 0;
  for (int i = 0; i < size; ++i) {
    count[i] = 1 + (random() % 10 == 0 ? random() % 30000 : random() % 70);
    from_offset[i] = random() % 9;
    to_offset[i] = random() % 9;
    from[i].resize(from_offset[i] + count[i]);
    to[i].assign(to_offset[i] + count[i] + 9, untouched);
    for (From& value : from[i]) {
      value = static_cast<From>(static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 8);
    }
    table.total += count[i];
    table.entries[i] = {from[i].data() + from_offset[i], to[i].data() + to_offset[i], table.total};
  }
  table.chunk = random() % 2 == 0 ? 2048 : 8192;
  const int64_t chunks = (table.total + table.chunk - 1) / table.chunk;
  gridDim.x = static_cast<unsigned>(min<int64_t>(chunks, 1 + random() % 40));
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x) {
      multi_cast_kernel<To, From, kSmallTable>(table);
    }
  }
  for (int i = 0; i < size; ++i) {
    for (int k = 0; k < static_cast<int>(to[i].size()); ++k) {
      const int place = k - to_offset[i];
      const bool inside = place >= 0 && place < count[i];
      const To wanted =
          inside ? static_cast<To>(static_cast<float>(from[i][from_offset[i] + place])) : untouched;
      if (std::memcmp(&wanted, &to[i][k], sizeof(To)) != 0) {
        std::printf("seed %u: tensor %d of %d, element %d of %d\n", seed, i, size, place, count[i]);
        return false;
      }
    }
  }
  return true;
}

int main() {
  bool right = true;
  for (unsigned seed = 0; seed < 40; ++seed) {
    right &= test<BFloat16, float>(seed) && test<float, BFloat16>(seed) &&
             test<Half, BFloat16>(seed) && test<double, Half>(seed) && test<Half, double>(seed) &&
             test<float, float>(seed);
  }
  return right ? 0 : 1;
}
