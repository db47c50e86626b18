// unscale_cast on CUDA: one launch for all gradients of a dtype. What is not dense, has a dtype
// without a kernel, or is to have another than float32 and has not, is cast by ATen before it.

#include "../unscale_cast.h"
#include "launch.cuh"
#include "unscale_cast_device.cuh"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace smart_autocast {
namespace {

template <typename To, typename From>
void unscale_all(const Launch& launch, const std::vector<Entry>& entries, const float* scale,
                 float* found_inf) {
  constexpr auto kSmall = unscale_cast_kernel<To, From, kSmallTable>;
  constexpr auto kLarge = unscale_cast_kernel<To, From, kLargeTable>;
  start_tables<kSmall, kLarge>(launch, entries, chunk_of<To>(2),
                               [&]<int kCapacity>(const Table<kCapacity>& table, unsigned blocks) {
                                 unscale_cast_kernel<To, From, kCapacity>
                                     <<<blocks, kThreads, 0, launch.stream>>>(table, scale,
                                                                              found_inf);
                               });
}

struct Kernel {
  ScalarType to, from;
  void (*unscale_all)(const Launch&, const std::vector<Entry>&, const float*, float*);
};

constexpr std::array kKernels = {
    Kernel{ScalarType::Float, ScalarType::Float, unscale_all<float, float>},
    Kernel{ScalarType::Float, ScalarType::Half, unscale_all<float, Half>},
    Kernel{ScalarType::Float, ScalarType::BFloat16, unscale_all<float, BFloat16>},
    Kernel{ScalarType::Float, ScalarType::Double, unscale_all<float, double>},
    Kernel{ScalarType::Double, ScalarType::Double, unscale_all<double, double>},
    Kernel{ScalarType::Half, ScalarType::Half, unscale_all<Half, Half>},
    Kernel{ScalarType::BFloat16, ScalarType::BFloat16, unscale_all<BFloat16, BFloat16>},
};

// Where in kKernels; -1: nowhere.
int find_kernel(ScalarType to, ScalarType from) {
  const auto found = std::find_if(kKernels.begin(), kKernels.end(), [&](const Kernel& kernel) {
    return kernel.to == to && kernel.from == from;
  });
  return found == kKernels.end() ? -1 : static_cast<int>(found - kKernels.begin());
}

// The new results, none with `out`, and found_inf.
std::pair<TensorList, OwnedTensor> run_all(const TensorList& grads, const OwnedTensor& scale,
                                           ScalarType dtype, const TensorList* out) {
  const int32_t device = DeviceOf(scale).index;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Launch launch(device);
  OwnedTensor found_inf = zeros(Geometry(), ScalarType::Float, launch, device);

  std::array<std::vector<Entry>, kKernels.size()> entries;
  TensorList made(grads.size()), cast;  // cast: by ATen, which makes them dense
  for (size_t i = 0; i < grads.size(); ++i) {
    const OwnedTensor* source = &grads[i];
    int kernel = find_kernel(dtype, scalar_type(dtype_of(*source)));
    if (kernel < 0 || !is_dense(*source, Geometry(*source))) {
      source = &cast.emplace_back(cast_memory_by_aten(*source, dtype));
      kernel = find_kernel(dtype, dtype);
    }
    const Geometry geometry(*source);
    const OwnedTensor* result = out == nullptr ? &made[i] : &(*out)[i];
    if (out == nullptr || !same_strides(geometry, Geometry(*result))) {
      made[i] = empty_strided(geometry, dtype_code(dtype), device);
      result = &made[i];
    }
    if (geometry.numel > 0) {
      entries[kernel].push_back({data_of(*source), data_of(*result), geometry.numel});
    }
  }
  for (size_t i = 0; i < kKernels.size(); ++i) {
    if (!entries[i].empty()) {
      kKernels[i].unscale_all(launch, entries[i], reinterpret_cast<const float*>(data_of(scale)),
                              reinterpret_cast<float*>(data_of(found_inf)));
    }
  }
  if (out != nullptr) {
    for (size_t i = 0; i < made.size(); ++i) {
      if (made[i] != nullptr) {
        copy_by_aten((*out)[i], made[i]);
      }
    }
    made.clear();
  }
  return {std::move(made), std::move(found_inf)};
}

void unscale_cast_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads = take_list(stack[0]);
  const OwnedTensor scale(torch::stable::detail::to<AtenTensorHandle>(stack[1]));
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[2]);
  check_unscale_cast(grads, scale, dtype);
  auto [results, found_inf] = run_all(grads, scale, dtype, /*out=*/nullptr);
  stack[0] = give_list(std::move(results));
  stack[1] = torch::stable::detail::from(found_inf.release());
}

void unscale_cast_out_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads = take_list(stack[0]);
  const OwnedTensor scale(torch::stable::detail::to<AtenTensorHandle>(stack[1]));
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[2]);
  const TensorList out = take_list(stack[3]);
  check_unscale_cast_out(grads, scale, dtype, out);
  stack[0] = torch::stable::detail::from(run_all(grads, scale, dtype, &out).second.release());
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CUDA, m) {
  m.impl("unscale_cast", &smart_autocast::unscale_cast_cuda);
  m.impl("unscale_cast.out", &smart_autocast::unscale_cast_out_cuda);
}
