// multi_cast on CUDA: one launch for all tensors of a dtype, up to the capacity of a table. What is
// not dense, or of a dtype without kernels, is ATen's copy.

#include "../beyond_float8.h"
#include "../multi_cast.h"
#include "launch.cuh"
#include "multi_cast_device.cuh"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace smart_autocast {
namespace {

template <typename To, typename From>
void cast_all(const Launch& launch, const std::vector<Entry>& entries, int32_t beyond) {
  constexpr auto kSmall = multi_cast_kernel<To, From, kSmallTable>;
  constexpr auto kLarge = multi_cast_kernel<To, From, kLargeTable>;
  start_tables<kSmall, kLarge>(launch, entries, chunk_of<To>(2),
                               [&]<int kCapacity>(const Table<kCapacity>& table, unsigned blocks) {
                                 start_early<multi_cast_kernel<To, From, kCapacity>>(launch, blocks,
                                                                                     table, beyond);
                               });
}

using CastAll = void (*)(const Launch&, const std::vector<Entry>&, int32_t);

constexpr std::array kDtypes = {ScalarType::Double,        ScalarType::Float,
                                ScalarType::Half,          ScalarType::BFloat16,
                                ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};
constexpr size_t kCount = kDtypes.size();

// Row: to; column: from; in the order of kDtypes.
template <typename To>
constexpr std::array<CastAll, kCount> kRow = {
    cast_all<To, double>,   cast_all<To, float>,         cast_all<To, Half>,
    cast_all<To, BFloat16>, cast_all<To, Float8_e4m3fn>, cast_all<To, Float8_e5m2>};
constexpr std::array<std::array<CastAll, kCount>, kCount> kKernels = {
    kRow<double>, kRow<float>, kRow<Half>, kRow<BFloat16>, kRow<Float8_e4m3fn>, kRow<Float8_e5m2>};

// Where a dtype stands in kDtypes; -1: nowhere.
int find_dtype(int32_t code) {
  static const auto codes = [] {
    std::array<int32_t, kCount> found{};
    std::transform(kDtypes.begin(), kDtypes.end(), found.begin(), dtype_code);
    return found;
  }();
  const auto found = std::find(codes.begin(), codes.end(), code);
  return found == codes.end() ? -1 : static_cast<int>(found - codes.begin());
}

// The tensors of each source dtype, to be cast together.
class Work {
 public:
  explicit Work(ScalarType to) : to_(find_dtype(dtype_code(to))) {
    if (to == ScalarType::Float8_e4m3fn) {
      beyond_ = ask_beyond_float8_e4m3fn();
    }
  }

  // Whether there is a kernel for a tensor's dtype and layout.
  bool takes(const OwnedTensor& tensor, const Geometry& geometry) const {
    return to_ >= 0 && find_dtype(dtype_of(tensor)) >= 0 && is_dense(tensor, geometry);
  }

  void add(const OwnedTensor& result, const OwnedTensor& tensor, int64_t numel) {
    if (numel > 0) {
      entries_[find_dtype(dtype_of(tensor))].push_back({data_of(tensor), data_of(result), numel});
    }
  }

  void run(int32_t device) const {
    const Launch launch(device);
    for (size_t from = 0; from < kCount; ++from) {
      if (!entries_[from].empty()) {
        kKernels[to_][from](launch, entries_[from], beyond_);
      }
    }
  }

 private:
  int to_;
  int32_t beyond_ = 0;
  std::array<std::vector<Entry>, kCount> entries_;
};

void multi_cast_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  check_multi_cast(tensors, dtype);
  const int32_t code = dtype_code(dtype);
  const int32_t device = tensors.empty() ? 0 : DeviceOf(tensors[0]).index;
  const torch::stable::accelerator::DeviceGuard guard(device);
  TensorList results(tensors.size());
  Work work(dtype);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Geometry geometry(tensors[i]);
    if (!work.takes(tensors[i], geometry)) {
      results[i] = cast_memory_by_aten(tensors[i], dtype);
      continue;
    }
    results[i] = empty_strided(geometry, code, device);
    work.add(results[i], tensors[i], geometry.numel);
  }
  work.run(device);
  stack[0] = give_list(std::move(results));
}

void multi_cast_out_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  const TensorList out = take_list(stack[2]);
  check_multi_cast_out(tensors, dtype, out);
  const int32_t device = tensors.empty() ? 0 : DeviceOf(tensors[0]).index;
  const torch::stable::accelerator::DeviceGuard guard(device);
  Work work(dtype);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Geometry geometry(tensors[i]);
    if (!work.takes(tensors[i], geometry) || !same_strides(geometry, Geometry(out[i]))) {
      copy_by_aten(out[i], tensors[i]);
    } else {
      work.add(out[i], tensors[i], geometry.numel);
    }
  }
  work.run(device);
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CUDA, m) {
  m.impl("multi_cast", &smart_autocast::multi_cast_cuda);
  m.impl("multi_cast.out", &smart_autocast::multi_cast_out_cuda);
}
