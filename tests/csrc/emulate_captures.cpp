// What launch.cuh asks of CUDA while a graph is captured: loading code is refused there, unless the
// thread's capture mode is relaxed. And which kernels start early. A program on a CPU, with a CUDA
// runtime that knows no more than this.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

using std::min;
using std::size_t;

struct Index {
  unsigned x, y;
};
static Index blockIdx, threadIdx;
#define __host__
#define __device__
#define __forceinline__ inline

enum cudaError_t { cudaSuccess, cudaErrorStreamCaptureUnsupported, cudaErrorLaunchFailure };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaFuncAttributes {
  int ptxVersion;
};
using cudaStream_t = void*;
struct dim3 {
  unsigned x;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

static cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
static cudaError_t fails_next = cudaSuccess, last = cudaSuccess;
static std::set<const void*> loaded;
static bool attached = false;
static int loads = 0;
static int gpu = 0;                    // the current one
static int ptx_versions[] = {90, 80};  // of the code that each GPU runs
static cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;

static cudaError_t give(cudaError_t error) {
  if (error == cudaSuccess) {
    std::swap(error, fails_next);
  }
  return last = error;
}
static cudaError_t attach_to_gpu() {
  if (!attached && mode != cudaStreamCaptureModeRelaxed) {
    return cudaErrorStreamCaptureUnsupported;
  }
  attached = true;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t load_kernel(Kernel kernel) {
  const auto address = reinterpret_cast<const void*>(kernel);
  if (loaded.contains(address)) {
    return cudaSuccess;
  }
  ++loads;
  if (mode != cudaStreamCaptureModeRelaxed) {
    return cudaErrorStreamCaptureUnsupported;
  }
  loaded.insert(address);
  return attach_to_gpu();
}

static cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(mode, *other);
  return cudaSuccess;
}
static cudaError_t cudaGetLastError() {
  const cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
static cudaError_t cudaFree(void*) { return give(attach_to_gpu()); }
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel kernel) {
  attributes->ptxVersion = ptx_versions[gpu];
  return give(load_kernel(kernel));
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* found, Kernel kernel, int, size_t) {
  *found = 6;
  return give(load_kernel(kernel));
}
static cudaError_t cudaDeviceGetAttribute(int* found, cudaDeviceAttr, int) {
  *found = 132;
  return give(attach_to_gpu());
}
static cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
static cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) {
  return give(attach_to_gpu());
}

static cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* found) {
  *found = status;
  return give(cudaSuccess);
}
static int launched = 0, early = 0;
static cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  ++launched;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& one = config->attrs[i];
    early += one.id == cudaLaunchAttributeProgrammaticStreamSerialization &&
             one.val.programmaticStreamSerializationAllowed != 0;
  }
  return give(*arguments == nullptr ? cudaErrorLaunchFailure : load_kernel(kernel));
}

#include "../../csrc/ops/cuda/launch.cuh"

using namespace smart_autocast;

#define CHECK(condition)                                        \
  if (!(condition)) {                                           \
    std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    return 1;                                                   \
  }

template <int kCapacity>
void kernel(const Table<kCapacity>&) {}

static void run(const Launch& launch, size_t tensors) {
  const std::vector<Entry> entries(tensors, Entry{nullptr, nullptr, 5});
  start_tables<kernel<kSmallTable>, kernel<kLargeTable>>(
      launch, entries, kSmallChunk,
      [&]<int kCapacity>(const Table<kCapacity>& table, unsigned blocks) {
        start_early<kernel<kCapacity>>(launch, blocks, table);
      });
}

int main() {
  // An error in the first call is told, forgotten, and leaves the mode as it was.
  fails_next = cudaErrorLaunchFailure;
  bool threw = false;
  try {
    const Launch launch(0);
  } catch (const std::runtime_error&) {
    threw = true;
  }
  CHECK(threw && last == cudaSuccess && mode == cudaStreamCaptureModeGlobal);

  // The first call of all, in a capture; a later one with a longer list.
  status = cudaStreamCaptureStatusActive;
  const Launch launch(0);
  CHECK(mode == cudaStreamCaptureModeGlobal);
  CHECK(cudaMemsetAsync(nullptr, 0, 4, launch.stream) == cudaSuccess);  // zeros()
  run(launch, 3);
  CHECK(launched == 1 && loads == 2 && mode == cudaStreamCaptureModeGlobal);
  run(launch, 400);
  CHECK(launched == 2 && loads == 2 && mode == cudaStreamCaptureModeGlobal);
  CHECK(early == 0);
  status = cudaStreamCaptureStatusNone;
  run(launch, 3);
  CHECK(launched == 3 && early == 1);

  // Another GPU's context, and code there in which nothing waits.
  gpu = 1;
  run(Launch(1), 3);
  CHECK(launched == 4 && early == 1 && mode == cudaStreamCaptureModeGlobal);
  gpu = 0;
  run(launch, 3);
  CHECK(launched == 5 && early == 2);
  std::puts("ok");
  return 0;
}

// What of PyTorch is called here.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
AOTITorchError torch_c10_cuda_check_msg(int32_t error, const char*, const char*, uint32_t, bool,
                                        char** message) {
  *message = error == 0 ? nullptr : new char[6]{"error"};
  return 0;
}
void torch_c10_cuda_free_error_msg(char* message) { delete[] message; }
}
