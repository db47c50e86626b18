// stochastic_cast on CUDA: one launch for all tensors, up to the capacity of a table. What is not
// float32 becomes it by ATen's copy.

#include "../beyond_float8.h"
#include "../stochastic_cast.h"
#include "launch.cuh"
#include "stochastic_cast_device.cuh"

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace smart_autocast {
namespace {

template <typename To>
void round_all(const Launch& launch, const std::vector<Entry>& entries, Grid grid, int32_t beyond,
               uint64_t seed, uint64_t counter) {
  constexpr auto kSmall = stochastic_cast_kernel<To, kSmallTable>;
  constexpr auto kLarge = stochastic_cast_kernel<To, kLargeTable>;
  start_tables<kSmall, kLarge>(launch, entries, chunk_of<float>(16),
                               [&]<int kCapacity>(const Table<kCapacity>& table, unsigned blocks) {
                                 stochastic_cast_kernel<To, kCapacity>
                                     <<<blocks, kThreads, 0, launch.stream>>>(table, grid, beyond,
                                                                              seed, counter);
                                 counter += count_counters(table);
                               });
}

void stochastic_cast_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  const auto seed = static_cast<uint64_t>(torch::stable::detail::to<int64_t>(stack[2]));
  const auto offset = torch::stable::detail::to<int64_t>(stack[3]);
  check_stochastic_cast(tensors, dtype, offset);
  const int32_t code = dtype_code(dtype);
  const int32_t float_code = dtype_code(ScalarType::Float);
  const int32_t device = tensors.empty() ? 0 : DeviceOf(tensors[0]).index;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Launch launch(device);

  std::vector<Entry> entries;
  TensorList results, cast;  // cast: by ATen, which makes them dense
  for (const OwnedTensor& tensor : tensors) {
    const OwnedTensor* source = &tensor;
    if (dtype_of(tensor) != float_code || !is_dense(tensor, Geometry(tensor))) {
      cast.push_back(cast_memory_by_aten(tensor, ScalarType::Float));
      source = &cast.back();
    }
    const Geometry geometry(*source);
    results.push_back(empty_strided(geometry, code, device));
    if (geometry.numel > 0) {
      entries.push_back({data_of(*source), data_of(results.back()), geometry.numel});
    }
  }
  const Grid grid = find_grid(dtype);
  const int32_t beyond = dtype == ScalarType::Float8_e4m3fn ? ask_beyond_float8_e4m3fn() : 0;
  const auto counter = static_cast<uint64_t>(offset);
  if (dtype == ScalarType::BFloat16) {
    round_all<BFloat16>(launch, entries, grid, beyond, seed, counter);
  } else if (dtype == ScalarType::Half) {
    round_all<Half>(launch, entries, grid, beyond, seed, counter);
  } else if (dtype == ScalarType::Float8_e4m3fn) {
    round_all<Float8_e4m3fn>(launch, entries, grid, beyond, seed, counter);
  } else {
    round_all<Float8_e5m2>(launch, entries, grid, beyond, seed, counter);
  }
  stack[0] = give_list(std::move(results));
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CUDA, m) {
  m.impl("stochastic_cast", &smart_autocast::stochastic_cast_cuda);
}
