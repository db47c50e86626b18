// cast_with_stats on CUDA: one pass, whose blocks add their numbers up at the end.

#include "../cast_with_stats.h"
#include "cast_with_stats_device.cuh"
#include "launch.cuh"

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <tuple>

namespace smart_autocast {
namespace {

template <typename To, typename From>
void cast_one(const Launch& launch, const Entry& entry, double* numbers) {
  const int64_t blocks_at_once = launch.blocks_at_once<cast_with_stats_kernel<To, From>>();
  const auto table = make_table<1>(&entry, 1, chunk_of<To>(2), blocks_at_once);
  cast_with_stats_kernel<To, From>
      <<<count_blocks(table), kThreads, 0, launch.stream>>>(table, numbers);
  check(cudaGetLastError());
}

using CastOne = void (*)(const Launch&, const Entry&, double*);

template <typename To>
CastOne find_kernel(ScalarType from) {
  switch (from) {
    case ScalarType::Double:
      return cast_one<To, double>;
    case ScalarType::Float:
      return cast_one<To, float>;
    case ScalarType::Half:
      return cast_one<To, Half>;
    case ScalarType::BFloat16:
      return cast_one<To, BFloat16>;
    default:
      return nullptr;
  }
}

std::tuple<Tensor, Tensor> cast_with_stats_cuda(const Tensor& self, ScalarType dtype) {
  check_cast_with_stats(self, dtype);
  const ScalarType from = scalar_type_of(self);
  OwnedTensor tensor = owned_tensor(self);
  if (!is_dense(tensor, Geometry(tensor))) {
    tensor = cast_memory_by_aten(tensor, from);
  }
  const Geometry geometry(tensor);
  const int32_t device = DeviceOf(tensor).index;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Launch launch(device);
  const OwnedTensor result = empty_strided(geometry, dtype_code(dtype), device);
  const int64_t four = 4, stride = 1;
  const OwnedTensor numbers = zeros(Geometry(&four, &stride), ScalarType::Double, launch, device);
  if (geometry.numel > 0) {
    const CastOne kernel =
        dtype == ScalarType::Half ? find_kernel<Half>(from) : find_kernel<BFloat16>(from);
    kernel(launch, {data_of(tensor), data_of(result), geometry.numel},
           reinterpret_cast<double*>(data_of(numbers)));
  }
  return {stable_tensor(result), stable_tensor(numbers)};
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CUDA, m) {
  m.impl("cast_with_stats", TORCH_BOX(&smart_autocast::cast_with_stats_cuda));
}
