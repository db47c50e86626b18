// cast on CUDA: contiguous tensors among float32, float16 and bfloat16, by vectors of 16 bytes of
// the wider dtype. Everything else is ATen's copy.

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <cstdint>

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;

template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vector {
  T values[kSize];
};

// One thread converts one vector; the last thread also takes a shorter rest. static_cast through
// torch's own Half and BFloat16 gives the bits that aten::to gives, NaNs included.
template <typename To, typename From, int kSize>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(To* __restrict__ to, const From* __restrict__ from, int64_t numel) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kSize;
  if (begin + kSize <= numel) {
    const auto in = *reinterpret_cast<const Vector<From, kSize>*>(from + begin);
    Vector<To, kSize> out;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      out.values[i] = static_cast<To>(static_cast<float>(in.values[i]));
    }
    *reinterpret_cast<Vector<To, kSize>*>(to + begin) = out;
  } else {
#pragma unroll 1
    for (int64_t i = begin; i < numel; ++i) {
      to[i] = static_cast<To>(static_cast<float>(from[i]));
    }
  }
}

template <int kSize, typename To, typename From>
void launch(To* to, const From* from, int64_t numel, cudaStream_t stream) {
  // Blocks fit in the grid's 2^31 - 1 for every tensor that fits in memory.
  const int64_t per_block = static_cast<int64_t>(kThreads) * kSize;
  const auto blocks = static_cast<unsigned>((numel + per_block - 1) / per_block);
  cast_kernel<To, From, kSize><<<blocks, kThreads, 0, stream>>>(to, from, numel);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename To, typename From>
void cast_contiguous(const Tensor& out, const Tensor& self, cudaStream_t stream) {
  constexpr int kSize = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  auto* to = static_cast<To*>(out.mutable_data_ptr());
  const auto* from = static_cast<const From*>(self.const_data_ptr());
  // A view may begin in the middle of a vector; `to` is fresh from the allocator, hence aligned.
  const bool aligned = reinterpret_cast<uintptr_t>(from) % alignof(Vector<From, kSize>) == 0;
  if (aligned) {
    launch<kSize>(to, from, self.numel(), stream);
  } else {
    launch<1>(to, from, self.numel(), stream);
  }
}

using CastFunction = void (*)(const Tensor&, const Tensor&, cudaStream_t);

// The kernel for a pair of dtypes, or null where ATen has to do it.
CastFunction find_kernel(ScalarType from, ScalarType to) {
  struct Entry {
    ScalarType from, to;
    CastFunction function;
  };
  static constexpr Entry kTable[] = {
      {ScalarType::Float, ScalarType::Half, cast_contiguous<Half, float>},
      {ScalarType::Float, ScalarType::BFloat16, cast_contiguous<BFloat16, float>},
      {ScalarType::Half, ScalarType::Float, cast_contiguous<float, Half>},
      {ScalarType::Half, ScalarType::BFloat16, cast_contiguous<BFloat16, Half>},
      {ScalarType::BFloat16, ScalarType::Float, cast_contiguous<float, BFloat16>},
      {ScalarType::BFloat16, ScalarType::Half, cast_contiguous<Half, BFloat16>},
  };
  for (const Entry& entry : kTable) {
    if (entry.from == from && entry.to == to) {
      return entry.function;
    }
  }
  return nullptr;
}

// torch::stable::empty_like takes no dtype yet.
Tensor empty_like(const Tensor& self, ScalarType dtype) {
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(self),         from(std::optional(dtype)),
                                    from(std::nullopt), from(std::nullopt),
                                    from(std::nullopt), from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor cast(const Tensor& self, ScalarType dtype) {
  const CastFunction kernel = find_kernel(self.scalar_type(), dtype);
  if (kernel == nullptr || !self.is_contiguous()) {
    return torch::stable::to(self, dtype, /*layout=*/std::nullopt, /*device=*/std::nullopt,
                             /*pin_memory=*/std::nullopt, /*non_blocking=*/false, /*copy=*/true);
  }
  const torch::stable::accelerator::DeviceGuard guard(self.get_device_index());
  Tensor out = empty_like(self, dtype);
  if (self.numel() > 0) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(self.get_device_index(), &stream));
    kernel(out, self, static_cast<cudaStream_t>(stream));
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CUDA, m) { m.impl("cast", TORCH_BOX(&cast)); }
