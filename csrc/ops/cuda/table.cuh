// Many tensors in one launch: the table of them, and how blocks walk through it. It needs no CUDA
// header beyond the language itself, so that tests/csrc/emulate_kernels.cpp can run what is built
// on it on a CPU; so do all *_device.cuh.

#pragma once

#include <cstdint>

namespace smart_autocast {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;

// Tensors are laid end to end: this one's elements begin at the first multiple of kTensorBegin
// after those of the one before.
struct Entry {
  const void* from;
  void* to;
  int64_t end;
};

// Stochastic rounding needs it: four elements share a random number's counter.
constexpr int kTensorBegin = 4;
__host__ __device__ __forceinline__ int64_t next_begin(int64_t end) {
  return (end + kTensorBegin - 1) & -int64_t{kTensorBegin};
}

// 4 KiB of parameters on every driver and architecture; 32,764 bytes since CUDA 12.1.
constexpr int kSmallTable = 168;
constexpr int kLargeTable = 1360;
// For what a kernel takes besides its table.
constexpr int kOtherParameters = 40;

template <int kCapacity>
struct Table {
  int64_t total;            // the end of the last
  int64_t chunk;            // elements for each block, a multiple of kTensorBegin
  int32_t size;             // entries
  float entries_per_block;  // on average
  Entry entries[kCapacity];
};
static_assert(sizeof(Table<kSmallTable>) + kOtherParameters <= 4096 &&
              sizeof(Table<kLargeTable>) + kOtherParameters <= 32764);

// For kernels that start_early (launch.cuh) starts, before they read or write memory: whatever was
// queued before them is done then, and its results are in memory.
__device__ __forceinline__ void wait_for_work_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Calls work(entry, first, place, count) for each stretch of one tensor in this block's chunk:
// `count` elements from `place` on, of a tensor that begins at `first`.
//
// kGuess: look first where it would be if all had one size; that needs some registers.
template <bool kGuess = true, int kCapacity, typename Work>
__device__ __forceinline__ void for_each_stretch(const Table<kCapacity>& table, const Work& work) {
  const int64_t begin = blockIdx.x * table.chunk;
  const int64_t end = min(begin + table.chunk, table.total);
  // The first tensor that ends after `begin` lies between. (A block has one dimension, so
  // threadIdx.y is 0, which the compiler does not know. Where it knows that all threads read the
  // same entry, they do it as instructions read constants, through a cache that each step of the
  // search misses: 15 us in place of 10 for 150 tensors of 64 KiB.)
  int low = kCapacity == 1 ? 0 : static_cast<int>(threadIdx.y);
  int high = kCapacity == 1 ? 0 : table.size;
  if constexpr (kGuess && kCapacity > 1) {
    // The two entries that tell whether it is this one are read at once.
    const auto place = static_cast<int>((blockIdx.x + 0.5F) * table.entries_per_block);
    const int guess = low + min(place, table.size - 1);
    const bool ends_after = table.entries[guess].end > begin;
    const bool is_first = guess == 0 || table.entries[guess - 1].end <= begin;
    low = ends_after ? (is_first ? guess : low) : guess + 1;
    high = ends_after ? guess : high;
  }
  while (low < high) {
    const int middle = (low + high) / 2;
    if (table.entries[middle].end <= begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  int64_t first = low == 0 ? 0 : next_begin(table.entries[low - 1].end);
  for (int64_t place = begin; place < end; ++low) {
    const Entry entry = table.entries[low];
    const int64_t stop = min(end, entry.end);
    work(entry, first, place, static_cast<int>(stop - place));
    first = place = next_begin(stop);
  }
}

// The elements of results that `vectors` stores of each thread of a block make.
template <typename To>
constexpr int64_t chunk_of(int vectors) {
  return int64_t{kThreads} * vectors * kVectorBytes / static_cast<int64_t>(sizeof(To));
}

template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < kVectorBytes ? sizeof(T) * kSize : kVectorBytes) Vector {
  T values[kSize];
};

// How a block goes through a stretch: a few elements, whole vectors of kSize, and what is left.
//
// A vector is what one store of 16 bytes takes, and neighbouring threads store neighbouring
// vectors. With two stores for each, as 16 bytes that are read and get wider would want, a warp's
// store would fill half of every sector it touches. For loads it does not matter, the other half is
// in the nearest cache.
template <typename To, typename From>
struct Split {
  static constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(To));
  // Vectors that a thread reads before it stores the first; one of many elements is as much.
  static constexpr int kSteps = kSize > 8 ? 1 : 2;

  int head, vectors, tail;  // elements before the vectors, vectors, where these end
  bool loads_vectors;       // of as many elements; not where `from` lies askew to `to`

  __host__ __device__ __forceinline__ Split(const To* to, const From* from, int count) {
    const auto beyond = static_cast<int>(reinterpret_cast<uintptr_t>(to) % kVectorBytes);
    head = min(count, beyond == 0 ? 0 : (kVectorBytes - beyond) / static_cast<int>(sizeof(To)));
    vectors = (count - head) / kSize;
    tail = head + vectors * kSize;
    loads_vectors = reinterpret_cast<uintptr_t>(from + head) % alignof(Vector<From, kSize>) == 0;
  }
};

// A stretch of one tensor, by a block: to[i] = map(from[i]). `to` may be `from` itself: then
// nothing here may promise the compiler that it is not, or that what is read never changes
// (__restrict__).
template <typename To, typename From, typename Map>
__device__ __forceinline__ void map_stretch(To* to, const From* from, int count, Map&& map) {
  using Parts = Split<To, From>;
  constexpr int kSize = Parts::kSize, kSteps = Parts::kSteps;
  const Parts parts(to, from, count);
  // Both ends are shorter than the block.
  if (static_cast<int>(threadIdx.x) < parts.head) {
    to[threadIdx.x] = map(from[threadIdx.x]);
  }
  if (static_cast<int>(threadIdx.x) < count - parts.tail) {
    to[parts.tail + threadIdx.x] = map(from[parts.tail + threadIdx.x]);
  }

  auto* to_vectors = reinterpret_cast<Vector<To, kSize>*>(to + parts.head);
  from += parts.head;
  if (parts.loads_vectors) {
    const auto* from_vectors = reinterpret_cast<const Vector<From, kSize>*>(from);
    // By value: nvcc reads the elements of a reference to memory one by one.
    const auto store = [&](int i, const Vector<From, kSize> in) {
      Vector<To, kSize> out;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        out.values[k] = map(in.values[k]);
      }
      to_vectors[i] = out;
    };
    int i = threadIdx.x;
#pragma unroll 1
    for (; i + (kSteps - 1) * kThreads < parts.vectors; i += kSteps * kThreads) {
      Vector<From, kSize> in[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        in[step] = from_vectors[i + step * kThreads];
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        store(i + step * kThreads, in[step]);
      }
    }
    if (kSteps > 1 && i < parts.vectors) {
      store(i, from_vectors[i]);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < parts.vectors; i += kThreads) {
      Vector<To, kSize> out;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        out.values[k] = map(from[i * kSize + k]);
      }
      to_vectors[i] = out;
    }
  }
}

}  // namespace
}  // namespace smart_autocast
