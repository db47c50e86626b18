// unscale_cast on CUDA: what runs on the GPU, to float32 from any dtype, to others from
// themselves.

#pragma once

#include "convert.cuh"
#include "table.cuh"

namespace smart_autocast {
namespace {

// `found_inf` is 0 before. Threads that find something all write the same, but for those that see
// it written: where all gradients are infinite, most of the time would go into it.
template <typename To, typename From, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    unscale_cast_kernel(const __grid_constant__ Table<kCapacity> table,
                        const float* __restrict__ scale, float* __restrict__ found_inf) {
  using Wide = std::conditional_t<std::is_same_v<To, double>, double, float>;  // computed in
  const auto inverse = static_cast<float>(1.0 / static_cast<double>(*scale));
  bool found = false;
  for_each_stretch(table, [&](const Entry& entry, int64_t first, int64_t place, int count) {
    map_stretch(static_cast<To*>(entry.to) + (place - first),
                static_cast<const From*>(entry.from) + (place - first), count, [&](From value) {
                  const auto narrow = static_cast<Wide>(convert<To>(value));
                  found |= narrow - narrow != 0;  // NaN, if it is infinite or NaN
                  return convert<To>(narrow * inverse);
                });
  });
  if (found && *found_inf == 0) {
    *found_inf = 1.0F;
  }
}

}  // namespace
}  // namespace smart_autocast
