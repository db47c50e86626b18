// multi_cast on CUDA: what runs on the GPU.

#pragma once

#include "convert.cuh"
#include "table.cuh"

namespace smart_autocast {
namespace {

// `beyond`: see convert.cuh.
template <typename To, typename From, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    multi_cast_kernel(const __grid_constant__ Table<kCapacity> table, int32_t beyond) {
  wait_for_work_before();
  for_each_stretch(table, [&](const Entry& entry, int64_t first, int64_t place, int count) {
    To* __restrict__ to = static_cast<To*>(entry.to) + (place - first);
    const From* __restrict__ from = static_cast<const From*>(entry.from) + (place - first);
    map_stretch(to, from, count, [&](From value) { return convert<To>(value, beyond); });
  });
}

}  // namespace
}  // namespace smart_autocast
