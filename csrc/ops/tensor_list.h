// Lists of tensors as the dispatcher hands them over. A torch::stable::Tensor for each would be a
// shared pointer to a handle that is on the heap already; for many small tensors, making and
// copying them is a third of a call.

#pragma once

#include "smart_cast.h"
#include "torch_errors.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace smart_autocast {

struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;
using TensorList = std::vector<OwnedTensor>;

// The tensors of an argument `Tensor[]`; the list itself is deleted.
inline TensorList take_list(StableIValue argument) {
  const auto list = torch::stable::detail::to<StableListHandle>(argument);
  size_t size = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
  TensorList tensors(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue element = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &element));
    tensors[i].reset(torch::stable::detail::to<AtenTensorHandle>(element));
  }
  TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  return tensors;
}

// A result `Tensor[]`.
inline StableIValue give_list(TensorList tensors) {
  StableListHandle list = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(tensors.size(), &list));
  for (OwnedTensor& tensor : tensors) {
    TORCH_ERROR_CODE_CHECK(
        torch_list_push_back(list, torch::stable::detail::from(tensor.release())));
  }
  return torch::stable::detail::from(list);
}

// The same tensor for the functions of torch::stable.
inline torch::stable::Tensor stable_tensor(const OwnedTensor& tensor) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return torch::stable::Tensor(handle);
}

inline OwnedTensor owned_tensor(const torch::stable::Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return OwnedTensor(handle);
}

// aten::to, always into a new tensor.
inline OwnedTensor cast_by_aten(const OwnedTensor& tensor, torch::headeronly::ScalarType dtype) {
  return owned_tensor(copy_to(stable_tensor(tensor), dtype));
}

// Where the elements are; the sizes and strides are the tensor's own.
struct Geometry {
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  int64_t numel = 0;

  // No dimensions: one element.
  Geometry() : numel(1) {}
  // One dimension.
  Geometry(const int64_t* size, const int64_t* stride)
      : dim(1), sizes(size), strides(stride), numel(*size) {}

  explicit Geometry(const OwnedTensor& tensor) {
    int64_t *own_sizes = nullptr, *own_strides = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &own_sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &own_strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(tensor.get(), &numel));
    sizes = own_sizes;
    strides = own_strides;
  }
};

// A new tensor of `dtype`, a number as dtype_code gives it, with the shape and strides of another.
inline OwnedTensor empty_strided(const Geometry& geometry, int32_t dtype, int32_t device_type,
                                 int32_t device_index) {
  AtenTensorHandle result = nullptr;
  if (aoti_torch_empty_strided(geometry.dim, geometry.sizes, geometry.strides, dtype, device_type,
                               device_index, &result) != TORCH_SUCCESS) {
    fail_as_torch("smart_autocast: torch has no memory for a new tensor");
  }
  return OwnedTensor(result);
}

// Stride and size of each dimension that has more than one place, or none, the innermost first.
inline std::vector<std::array<int64_t, 2>> by_stride(const Geometry& geometry) {
  std::vector<std::array<int64_t, 2>> dimensions;
  for (int64_t i = 0; i < geometry.dim; ++i) {
    if (geometry.sizes[i] != 1) {
      dimensions.push_back({geometry.strides[i], geometry.sizes[i]});
    }
  }
  std::sort(dimensions.begin(), dimensions.end());
  return dimensions;
}

// Whether the elements fill a stretch of memory, each in its own place.
inline bool is_dense(const OwnedTensor& tensor, const Geometry& geometry) {
  bool contiguous = false;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(tensor.get(), &contiguous));
  if (contiguous) {
    return true;
  }
  int64_t expected = 1;
  for (const auto& [stride, size] : by_stride(geometry)) {
    if (stride != expected) {
      return false;
    }
    expected *= size;
  }
  return true;
}

// Whether an index finds its element at the same place in both, which have the same sizes.
inline bool same_strides(const Geometry& a, const Geometry& b) {
  for (int64_t i = 0; i < a.dim; ++i) {
    if (a.sizes[i] != 1 && a.strides[i] != b.strides[i]) {
      return false;
    }
  }
  return true;
}

inline int32_t dtype_of(const OwnedTensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

inline int32_t layout_of(const OwnedTensor& tensor) {
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return layout;
}

struct DeviceOf {
  int32_t type = 0;
  int32_t index = 0;

  explicit DeviceOf(const OwnedTensor& tensor) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
  }
  bool operator==(const DeviceOf&) const = default;
};

// As Python writes a device; the stable ABI has no names.
inline std::string text_of(const DeviceOf& device) {
  std::string text = "another";
  for (const char* name : {"cpu", "cuda", "xpu", "mps", "meta", "hpu", "mtia", "maia", "xla"}) {
    uint32_t type = 0;
    int32_t index = -1;
    if (torch_parse_device_string(name, &type, &index) == TORCH_SUCCESS &&
        static_cast<int32_t>(type) == device.type) {
      text = name;
    }
  }
  return device.index < 0 ? text : text + ":" + std::to_string(device.index);
}

// Of an op whose `tensors` are on one device.
inline void check_same_device(const char* op, const TensorList& tensors, size_t i,
                              const DeviceOf& first) {
  if (const DeviceOf device(tensors[i]); !(device == first)) {
    fail(op, "argument 'tensors' must hold tensors on one device, got tensors[0] on " +
                 text_of(first) + " and " + item("tensors", i) + " on " + text_of(device) +
                 "; call it once for each device");
  }
}

// Whether memory was freed. ATen adds the offset of a tensor's first element to the null pointer
// then; no tensor begins a tebibyte into its storage, and few at an address below.
inline bool is_freed(const OwnedTensor& tensor, const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address >> 40 != 0) {
    return false;
  }
  int64_t offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
  const size_t bytes = aoti_torch_dtype_element_size(dtype_of(tensor));
  return address == static_cast<uintptr_t>(offset) * bytes && Geometry(tensor).numel > 0;
}

inline char* data_of(const OwnedTensor& tensor) {
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
  if (is_freed(tensor, data)) {
    throw std::runtime_error(
        "smart_autocast: a tensor has " + std::to_string(Geometry(tensor).numel) +
        " elements and no memory: it was freed, as FSDP frees the weights that it has gathered; "
        "call this while the tensor has its memory");
  }
  return static_cast<char*>(data);
}

// aten::to in a kernel, for a tensor with memory: on the CPU, ATen reads what is not there.
inline OwnedTensor cast_memory_by_aten(const OwnedTensor& tensor,
                                       torch::headeronly::ScalarType dtype) {
  data_of(tensor);
  return cast_by_aten(tensor, dtype);
}

// The stable ABI's number of a dtype (the one that dtype_of gives), and back.
inline int32_t dtype_code(torch::headeronly::ScalarType dtype) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

inline torch::headeronly::ScalarType scalar_type(int32_t code) {
  return torch::stable::detail::to<torch::headeronly::ScalarType>(
      torch::stable::detail::from(code));
}

}  // namespace smart_autocast
