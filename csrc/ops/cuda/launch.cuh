// Kernels that take tables of tensors, launched for a list of any length: one launch for as many as
// a table holds.
//
// The table is the kernel's parameter. It is copied when the kernel is launched, or captured: a
// CUDA graph that is replayed later reads no memory of the host, and none is allocated on the
// device.

#pragma once

#include "../tensor_list.h"
#include "split.cuh"

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace smart_autocast {
namespace {

// As STD_CUDA_CHECK, but forgets the error: the next launch would be blamed for it. PyTorch forgets
// it in its own CUDA runtime alone, and this library has another one.
inline void check(cudaError_t error) {
  if (error != cudaSuccess) {
    cudaGetLastError();
  }
  STD_CUDA_CHECK(error);
}

// While it lives, this thread may do what PyTorch forbids while a CUDA graph is captured, because
// the graph has no place for it; such as loading code.
class RelaxedCapture {
 public:
  RelaxedCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  // What worked before fails only for an error of earlier work, which is not this one's to report.
  ~RelaxedCapture() {
    if (cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) {
      cudaGetLastError();
    }
  }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the one to go back to
};

// Calls work() once for each GPU, again if it threw, and perhaps twice if two threads begin at
// once. `done` has a bit for each GPU; those beyond 64 share them.
template <typename Work>
void once_for(int32_t device, std::atomic<uint64_t>& done, const Work& work) {
  const uint64_t bit = uint64_t{1} << (device & 63);
  if ((done.load(std::memory_order_acquire) & bit) == 0) {
    const RelaxedCapture relaxed;
    work();
    done.fetch_or(bit, std::memory_order_release);
  }
}

// The first use of this library's CUDA runtime on a GPU joins its context, and may load all code
// that there is for it: here, for that call may be one that a graph captures.
inline void attach(int32_t device) {
  static std::atomic<uint64_t> done{0};
  once_for(device, done, [] { check(cudaFree(nullptr)); });
}

// Kernels are loaded when something is first asked of them: of the large tables', too, which a
// later call in a capture may be the first to launch.
template <auto... kKernels>
void load(int32_t device) {
  static std::atomic<uint64_t> done{0};
  once_for(device, done, [] {
    cudaFuncAttributes attributes;
    (check(cudaFuncGetAttributes(&attributes, kKernels)), ...);
  });
}

// How many blocks of a kernel one processor of the GPU has room for, by the registers it needs.
// Asked once: where GPUs of two kinds are in a process, it is what the first of them has.
template <auto kKernel>
int blocks_per_processor() {
  static const int blocks = [] {
    const RelaxedCapture relaxed;
    int found = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kKernel, kThreads, 0));
    return found;
  }();
  return blocks;
}

// Whether what runs on a GPU is code in which wait_for_work_before waits: where a GPU compiles that
// of an older one anew, it is not.
template <auto kKernel>
bool waits_for_work_before(int32_t device) {
  static std::atomic<uint64_t> done{0}, waits{0};
  if (device >= 64) {
    return false;  // no bit of its own
  }
  const uint64_t bit = uint64_t{1} << device;
  once_for(device, done, [&] {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kKernel));
    if (attributes.ptxVersion >= 90) {
      waits.fetch_or(bit, std::memory_order_relaxed);
    }
  });
  return (waits.load(std::memory_order_relaxed) & bit) != 0;
}

struct Launch {
  int32_t device;
  int processors = 0;
  bool large_tables = false;
  cudaStream_t stream = nullptr;

  // `device` is the current one.
  explicit Launch(int32_t device) : device(device) {
    attach(device);
    int driver = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    check(cudaDriverGetVersion(&driver));
    large_tables = driver >= 12010;
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
    stream = static_cast<cudaStream_t>(current);
  }

  bool captured() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
  }

  template <auto kKernel>
  int64_t blocks_at_once() const {
    load<kKernel>(device);
    return int64_t{processors} * blocks_per_processor<kKernel>();
  }
};

// Starts a kernel that calls wait_for_work_before, of whose launch that wait is then the only part
// which the work before it in the stream delays ("programmatic dependent launch"); but in a graph
// that is captured, whose users may not know of such dependencies (cudaErrorLossyQuery).
template <auto kKernel, typename... Arguments>
void start_early(const Launch& launch, unsigned blocks, const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = launch.stream;
  config.attrs = &early;
  config.numAttrs = waits_for_work_before<kKernel>(launch.device) && !launch.captured() ? 1 : 0;
  const void* pointers[] = {&arguments...};
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kKernel),
                            const_cast<void**>(pointers)));
}

// start(table, blocks) launches a kernel: kSmall or kLarge, by the table's capacity. `chunk`: see
// make_table.
template <auto kSmall, auto kLarge, typename Start>
void start_tables(const Launch& launch, const std::vector<Entry>& entries, int64_t chunk,
                  const Start& start) {
  if (launch.large_tables) {
    load<kLarge>(launch.device);
  }
  for_each_table(entries, launch.large_tables, chunk, launch.blocks_at_once<kSmall>(),
                 [&](const auto& table, unsigned blocks) {
                   start(table, blocks);
                   check(cudaGetLastError());
                 });
}

// A new tensor of `dtype`, a number as dtype_code gives it, with the shape and strides of another.
inline OwnedTensor empty_strided(const Geometry& geometry, int32_t dtype, int32_t device) {
  return empty_strided(geometry, dtype, aoti_torch_device_type_cuda(), device);
}

// Numbers that are 0, on the current stream.
inline OwnedTensor zeros(const Geometry& geometry, torch::headeronly::ScalarType dtype,
                         const Launch& launch, int32_t device) {
  const int32_t code = dtype_code(dtype);
  OwnedTensor tensor = empty_strided(geometry, code, device);
  check(cudaMemsetAsync(data_of(tensor), 0, geometry.numel * aoti_torch_dtype_element_size(code),
                        launch.stream));
  return tensor;
}

}  // namespace
}  // namespace smart_autocast
