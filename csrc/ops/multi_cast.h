// What every kernel of multi_cast checks before it begins.

#pragma once

#include "smart_cast.h"

#include <algorithm>
#include <string>
#include <vector>

namespace smart_autocast {

struct MultiCastDevice {
  int32_t type = 0;
  int32_t index = 0;

  explicit MultiCastDevice(const Tensor& tensor) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
  }
  bool operator==(const MultiCastDevice&) const = default;
};

// The dtype that is asked for, and tensors of real numbers on one device.
inline void check_multi_cast(const std::vector<Tensor>& tensors, ScalarType dtype) {
  if (dtype != ScalarType::Double && !is_autocast_dtype(dtype)) {
    fail("multi_cast", std::string("argument 'dtype' must be a floating dtype, such as "
                                   "torch.bfloat16, got ") +
                           torch::headeronly::toString(dtype));
  }
  for (const Tensor& tensor : tensors) {
    check_supported("multi_cast", "tensors", tensor);
    if (!(MultiCastDevice(tensor) == MultiCastDevice(tensors[0]))) {
      fail("multi_cast",
           "argument 'tensors' must hold tensors on one device, got tensors on two; call it once "
           "for each device");
    }
  }
}

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto sizes = a.sizes(), others = b.sizes();
  return sizes.size() == others.size() && std::equal(sizes.begin(), sizes.end(), others.begin());
}

// The first byte of a tensor that holds elements, and the one after its last.
struct ByteRange {
  const char* begin;
  const char* end;
  bool written;
};

inline ByteRange byte_range(const Tensor& tensor, bool written) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    last += (sizes[i] - 1) * strides[i];
  }
  const auto* begin = static_cast<const char*>(tensor.data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()), written};
}

// `out` fits `tensors` one by one, and no memory that is written is anything else's too: the order
// in which elements are written is nobody's to know.
inline void check_multi_cast_out(const std::vector<Tensor>& tensors, ScalarType dtype,
                                 const std::vector<Tensor>& out) {
  check_multi_cast(tensors, dtype);
  if (out.size() != tensors.size()) {
    fail("multi_cast", "argument 'out' must hold as many tensors as 'tensors', " +
                           std::to_string(tensors.size()) + ", got " + std::to_string(out.size()));
  }
  std::vector<ByteRange> ranges;
  ranges.reserve(2 * tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string name = "argument 'out[" + std::to_string(i) + "]' must ";
    if (out[i].scalar_type() != dtype) {
      fail("multi_cast", name + "have the dtype asked for, " + torch::headeronly::toString(dtype) +
                             ", got " + torch::headeronly::toString(out[i].scalar_type()));
    }
    if (!same_sizes(out[i], tensors[i])) {
      fail("multi_cast", name + "have the shape of 'tensors[" + std::to_string(i) +
                             "]'; make it with torch.empty_like(tensor, dtype=dtype)");
    }
    if (!(MultiCastDevice(out[i]) == MultiCastDevice(tensors[i]))) {
      fail("multi_cast", name + "be on the device of 'tensors'");
    }
    if (tensors[i].numel() == 0) {
      continue;
    }
    const auto sizes = out[i].sizes(), strides = out[i].strides();
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] > 1 && strides[d] == 0) {
        fail("multi_cast", name + "have memory of its own for every element, got an expanded one");
      }
    }
    ranges.push_back(byte_range(tensors[i], false));
    ranges.push_back(byte_range(out[i], true));
  }

  std::sort(ranges.begin(), ranges.end(),
            [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  const char* read_until = nullptr;
  const char* written_until = nullptr;
  for (const ByteRange& range : ranges) {
    if (range.begin < written_until || (range.written && range.begin < read_until)) {
      fail("multi_cast",
           "argument 'out' must not overlap with 'tensors' or in itself, first byte to last; pass "
           "tensors made with torch.empty_like(tensor, dtype=dtype)");
    }
    const char*& until = range.written ? written_until : read_until;
    until = std::max(until, range.end);
  }
}

}  // namespace smart_autocast
