// Kernels that take tables of tensors, launched for a list of any length: one launch for as many as
// a table holds.
//
// The table is the kernel's parameter. It is copied when the kernel is launched, or captured: a
// CUDA graph that is replayed later reads no memory of the host, and none is allocated on the
// device.

#pragma once

#include "../tensor_list.h"
#include "table.cuh"

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace smart_autocast {
namespace {

constexpr int kBlocksPerProcessor = 8;

struct Launch {
  int processors = 0;
  bool large_tables = false;
  cudaStream_t stream = nullptr;

  explicit Launch(int32_t device) {
    int driver = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    STD_CUDA_CHECK(cudaDriverGetVersion(&driver));
    large_tables = driver >= 12010;
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
    stream = static_cast<cudaStream_t>(current);
  }
};

template <int kCapacity, typename Start>
void start_table(const Launch& launch, const Entry* entries, int size, const Start& start) {
  Table<kCapacity> table;
  table.size = size;
  table.total = 0;
  for (int i = 0; i < size; ++i) {
    // `end` is its own number of elements so far.
    table.total = next_begin(table.total) + entries[i].end;
    table.entries[i] = {entries[i].from, entries[i].to, table.total};
  }
  // Large chunks amortise the search for their tensors, small ones occupy all of the GPU.
  const int64_t blocks_at_once = static_cast<int64_t>(launch.processors) * kBlocksPerProcessor;
  table.chunk = table.total / 8192 >= 2 * blocks_at_once ? 8192 : 2048;
  const int64_t chunks = (table.total + table.chunk - 1) / table.chunk;
  start(table, static_cast<unsigned>(std::min(chunks, blocks_at_once)));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// start(table, blocks) launches a kernel. Entries have their own numbers of elements, none 0, as
// their `end`.
template <typename Start>
void start_tables(const Launch& launch, const std::vector<Entry>& entries, const Start& start) {
  const int size = static_cast<int>(entries.size());
  const int capacity = launch.large_tables && size > kSmallTable ? kLargeTable : kSmallTable;
  for (int done = 0; done < size; done += capacity) {
    const int now = std::min(capacity, size - done);
    if (capacity == kLargeTable) {
      start_table<kLargeTable>(launch, entries.data() + done, now, start);
    } else {
      start_table<kSmallTable>(launch, entries.data() + done, now, start);
    }
  }
}

// A new tensor of `dtype`, a number as dtype_code gives it, with the shape and strides of another.
inline OwnedTensor empty_strided(const Geometry& geometry, int32_t dtype, int32_t device) {
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(geometry.dim, geometry.sizes, geometry.strides,
                                                  dtype, aoti_torch_device_type_cuda(), device,
                                                  &result));
  return OwnedTensor(result);
}

// `size` numbers that are 0, on the current stream.
inline OwnedTensor zeros(int64_t size, torch::headeronly::ScalarType dtype, const Launch& launch,
                         int32_t device) {
  const int64_t stride = 1;
  const int32_t code = dtype_code(dtype);
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, code,
                                                  aoti_torch_device_type_cuda(), device, &result));
  OwnedTensor tensor(result);
  STD_CUDA_CHECK(cudaMemsetAsync(data_of(tensor), 0, size * aoti_torch_dtype_element_size(code),
                                 launch.stream));
  return tensor;
}

}  // namespace
}  // namespace smart_autocast
