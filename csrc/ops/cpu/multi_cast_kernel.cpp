// multi_cast on the CPU: all elements of all tensors as one range, shared out among the threads.
//
// A tensor whose elements fill its memory without holes, in whatever order of dimensions, is one
// run of elements, and its result another with the same strides. What is not (slices, expanded
// tensors, dtypes that are not floating) is ATen's copy, before the threads begin.

#include "../multi_cast.h"
#include "convert.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace smart_autocast {
namespace {

// Threads share tensors at multiples of this many elements, whole lines of the cache.
constexpr int64_t kBlock = 64;
// Elements below which a second thread costs more than it takes over.
constexpr int64_t kGrain = 32768;

struct Run {
  ConvertFunction convert;
  void* to;
  const void* from;
  int64_t count;
  int64_t to_size, from_size;  // of an element
  int64_t first_block = 0;     // in the range of all runs
};

// Whether the elements fill a stretch of memory, each in its own place.
bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return true;
  }
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::vector<std::array<int64_t, 2>> dimensions;  // stride, size
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) {
      dimensions.push_back({strides[i], sizes[i]});
    }
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride != expected) {
      return false;
    }
    expected *= size;
  }
  return true;
}

// Whether an index finds its element at the same place in both.
bool same_strides(const Tensor& a, const Tensor& b) {
  const auto sizes = a.sizes(), strides = a.strides(), others = b.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && strides[i] != others[i]) {
      return false;
    }
  }
  return true;
}

// As Linux has it for one core. sysconf would not do: on AMD's processors glibc gives the sum over
// all of the chip's caches.
int64_t last_level_cache_bytes() {
  static const int64_t bytes = [] {
    int64_t kilobytes = 0;
    if (FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (std::fscanf(file, "%" SCNd64 "K", &kilobytes) != 1) {
        kilobytes = 0;
      }
      std::fclose(file);
    }
    return (kilobytes > 0 ? kilobytes : int64_t{32} << 10) << 10;
  }();
  return bytes;
}

void run_all(std::vector<Run>& runs) {
  int64_t blocks = 0, bytes = 0;
  for (Run& run : runs) {
    run.first_block = blocks;
    blocks += (run.count + kBlock - 1) / kBlock;
    bytes += run.count * (run.to_size + run.from_size);
  }
  // What does not fit in the caches need not push out what is in them. Below, a plain store is up
  // to twice as fast.
  const bool stream = bytes > last_level_cache_bytes();
  torch::stable::parallel_for(0, blocks, kGrain / kBlock, [&](int64_t begin, int64_t end) {
    auto run = std::upper_bound(runs.begin(), runs.end(), begin,
                                [](int64_t block, const Run& r) { return block < r.first_block; });
    for (--run; run != runs.end() && run->first_block < end; ++run) {
      const int64_t from = std::max<int64_t>(begin - run->first_block, 0) * kBlock;
      const int64_t to = std::min((end - run->first_block) * kBlock, run->count);
      run->convert(static_cast<char*>(run->to) + from * run->to_size,
                   static_cast<const char*>(run->from) + from * run->from_size, to - from, stream);
    }
  });
}

void add_run(std::vector<Run>& runs, ConvertFunction convert, const Tensor& to,
             const Tensor& from) {
  if (from.numel() > 0) {
    runs.push_back({convert, to.mutable_data_ptr(), from.const_data_ptr(), from.numel(),
                    static_cast<int64_t>(to.element_size()),
                    static_cast<int64_t>(from.element_size())});
  }
}

std::vector<Tensor> multi_cast_cpu(const std::vector<Tensor>& tensors, ScalarType dtype) {
  check_multi_cast(tensors, dtype);
  std::vector<Tensor> results;
  results.reserve(tensors.size());
  std::vector<Run> runs;
  runs.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    const ConvertFunction convert = find_convert(dtype, tensor.scalar_type());
    if (convert == nullptr || !is_dense(tensor)) {
      results.push_back(torch::stable::to(tensor, dtype, /*layout=*/std::nullopt,
                                          /*device=*/std::nullopt, /*pin_memory=*/std::nullopt,
                                          /*non_blocking=*/false, /*copy=*/true));
      continue;
    }
    AtenTensorHandle result = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        tensor.dim(), tensor.sizes().data(), tensor.strides().data(),
        torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
        aoti_torch_device_type_cpu(), 0, &result));
    results.emplace_back(result);
    add_run(runs, convert, results.back(), tensor);
  }
  run_all(runs);
  return results;
}

void multi_cast_out_cpu(const std::vector<Tensor>& tensors, ScalarType dtype,
                        std::vector<Tensor> out) {
  check_multi_cast_out(tensors, dtype, out);
  std::vector<Run> runs;
  runs.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ConvertFunction convert = find_convert(dtype, tensors[i].scalar_type());
    if (convert != nullptr && is_dense(tensors[i]) && same_strides(tensors[i], out[i])) {
      add_run(runs, convert, out[i], tensors[i]);
    } else {
      torch::stable::copy_(out[i], tensors[i]);
    }
  }
  run_all(runs);
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CPU, m) {
  m.impl("multi_cast", TORCH_BOX(&smart_autocast::multi_cast_cpu));
  m.impl("multi_cast.out", TORCH_BOX(&smart_autocast::multi_cast_out_cpu));
}
