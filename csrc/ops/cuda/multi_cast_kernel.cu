// multi_cast on CUDA: one launch for all tensors of a dtype, up to the capacity of a table. What is
// not dense, or of another dtype than these four, is ATen's copy.

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
void cast_all(const Launch& launch, const std::vector<Entry>& entries) {
  start_tables(launch, entries,
               [&]<int kCapacity>(const Table<kCapacity>& table, unsigned blocks) {
                 multi_cast_kernel<To, From, kCapacity>
                     <<<blocks, kThreads, 0, launch.stream>>>(table);
               });
}

using CastAll = void (*)(const Launch&, const std::vector<Entry>&);

constexpr std::array kDtypes = {ScalarType::Double, ScalarType::Float, ScalarType::Half,
                                ScalarType::BFloat16};

// Row: to; column: from; in the order of kDtypes.
template <typename To>
constexpr std::array<CastAll, 4> kRow = {cast_all<To, double>, cast_all<To, float>,
                                         cast_all<To, Half>, cast_all<To, BFloat16>};
constexpr std::array<std::array<CastAll, 4>, 4> kKernels = {kRow<double>, kRow<float>, kRow<Half>,
                                                            kRow<BFloat16>};

// Where a dtype stands in kDtypes; -1: nowhere.
int find_dtype(int32_t code) {
  static const std::array<int32_t, 4> codes = {dtype_code(kDtypes[0]), dtype_code(kDtypes[1]),
                                               dtype_code(kDtypes[2]), dtype_code(kDtypes[3])};
  const auto found = std::find(codes.begin(), codes.end(), code);
  return found == codes.end() ? -1 : static_cast<int>(found - codes.begin());
}

// The tensors of each source dtype, to be cast together.
class Work {
 public:
  explicit Work(int to) : to_(to) {}

  void add(int from, const OwnedTensor& result, const OwnedTensor& tensor, int64_t numel) {
    if (numel > 0) {
      entries_[from].push_back({data_of(tensor), data_of(result), numel});
    }
  }

  void run(int32_t device) const {
    const Launch launch(device);
    for (size_t from = 0; from < entries_.size(); ++from) {
      kKernels[to_][from](launch, entries_[from]);
    }
  }

 private:
  int to_;
  std::array<std::vector<Entry>, 4> entries_;
};

void multi_cast_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  check_multi_cast(tensors, dtype);
  const int32_t code = dtype_code(dtype);
  const int to = find_dtype(code);
  const int32_t device = tensors.empty() ? 0 : DeviceOf(tensors[0]).index;
  const torch::stable::accelerator::DeviceGuard guard(device);
  TensorList results(tensors.size());
  Work work(to);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int from = find_dtype(dtype_of(tensors[i]));
    const Geometry geometry(tensors[i]);
    if (to < 0 || from < 0 || !is_dense(tensors[i], geometry)) {
      results[i] = cast_by_aten(tensors[i], dtype);
      continue;
    }
    results[i] = empty_strided(geometry, code, device);
    work.add(from, results[i], tensors[i], geometry.numel);
  }
  if (to >= 0) {
    work.run(device);
  }
  stack[0] = give_list(std::move(results));
}

void multi_cast_out_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  const TensorList out = take_list(stack[2]);
  check_multi_cast_out(tensors, dtype, out);
  const int to = find_dtype(dtype_code(dtype));
  const int32_t device = tensors.empty() ? 0 : DeviceOf(tensors[0]).index;
  const torch::stable::accelerator::DeviceGuard guard(device);
  Work work(to);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int from = find_dtype(dtype_of(tensors[i]));
    const Geometry geometry(tensors[i]);
    if (to < 0 || from < 0 || !is_dense(tensors[i], geometry) ||
        !same_strides(geometry, Geometry(out[i]))) {
      copy_by_aten(out[i], tensors[i]);
    } else {
      work.add(from, out[i], tensors[i], geometry.numel);
    }
  }
  if (to >= 0) {
    work.run(device);
  }
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CUDA, m) {
  m.impl("multi_cast", &smart_autocast::multi_cast_cuda);
  m.impl("multi_cast.out", &smart_autocast::multi_cast_out_cuda);
}
