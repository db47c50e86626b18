// Results that are written into tensors of the caller's: what is checked before that.

#pragma once

#include "smart_cast.h"
#include "tensor_list.h"

#include <algorithm>
#include <string>
#include <vector>

namespace smart_autocast {

inline void copy_by_aten(const OwnedTensor& to, const OwnedTensor& from) {
  Tensor out = stable_tensor(to);
  torch::stable::copy_(out, stable_tensor(from));
}

// As Python writes a tuple.
inline std::string text_of(const int64_t* numbers, int64_t count) {
  std::string text = "(";
  for (int64_t i = 0; i < count; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
  }
  return text + (count == 1 ? ",)" : ")");
}

// The first byte of a tensor that holds elements, and the one after its last.
struct ByteRange {
  const char* begin;
  const char* end;
  size_t index;  // in its list

  ByteRange(size_t i, const OwnedTensor& tensor, const Geometry& geometry, int64_t element_size)
      : index(i) {
    int64_t last = 0;
    for (int64_t i = 0; i < geometry.dim; ++i) {
      last += (geometry.sizes[i] - 1) * geometry.strides[i];
    }
    begin = data_of(tensor);
    end = begin + (last + 1) * element_size;
  }
  bool operator<(const ByteRange& other) const { return begin < other.begin; }
};

// Whether strides do not tell that each element has a place of its own.
inline bool may_overlap_itself(const OwnedTensor& tensor, const Geometry& geometry) {
  if (is_dense(tensor, geometry)) {
    return false;
  }
  int64_t reach = 0;  // of the dimensions so far
  for (const auto& [stride, size] : by_stride(geometry)) {
    if (stride <= reach) {
      return true;
    }
    reach += (size - 1) * stride;
  }
  return false;
}

// Whose `out` is checked, for what argument, and whether its tensors may be that argument's.
struct OutOf {
  const char* op;
  std::string argument;
  bool may_be_itself;
  bool is_list = true;
};

[[noreturn]] inline void fail_overlap(const OutOf& of, const ByteRange& range,
                                      const std::string& other) {
  fail(of.op, "argument 'out' must not overlap with '" + of.argument +
                  "' or in itself, first byte to last, got " + item("out", range.index) + " and " +
                  other +
                  " in the same memory; pass tensors made with "
                  "torch.empty_like(tensor, dtype=dtype)");
}

// No memory that is written is anything else's too: the order in which elements are written is
// nobody's to know.
inline void check_no_overlap(const OutOf& of, const std::vector<ByteRange>& read,
                             std::vector<ByteRange>& written) {
  if (!std::is_sorted(written.begin(), written.end())) {
    std::sort(written.begin(), written.end());
  }
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].begin < written[i - 1].end) {
      fail_overlap(of, written[i - 1], item("out", written[i].index));
    }
  }
  for (const ByteRange& range : read) {
    // The last one that begins before this ends, and so the only one that can reach into it.
    const auto after =
        std::partition_point(written.begin(), written.end(),
                             [&](const ByteRange& other) { return other.begin < range.end; });
    if (after != written.begin() && (after - 1)->end > range.begin) {
      fail_overlap(of, *(after - 1), of.is_list ? item(of.argument, range.index) : of.argument);
    }
  }
}

// `out` fits `tensors` one by one, and its memory is its own. What is written, by its place in
// memory.
inline std::vector<ByteRange> check_out(const OutOf& of, const TensorList& tensors,
                                        ScalarType dtype, const TensorList& out) {
  if (out.size() != tensors.size()) {
    fail(of.op, "argument 'out' must hold as many tensors as '" + of.argument + "', " +
                    std::to_string(tensors.size()) + ", got " + std::to_string(out.size()));
  }
  const auto fail_at = [&](size_t i, const std::string& expected) {
    fail(of.op, "argument '" + item("out", i) + "' must " + expected);
  };
  const int32_t code = dtype_code(dtype), strided = aoti_torch_layout_strided();
  std::vector<ByteRange> read, written;
  read.reserve(tensors.size());
  written.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (layout_of(out[i]) != strided) {
      check_castable(of.op, "out", stable_tensor(out[i]));
    }
    if (dtype_of(out[i]) != code) {
      fail_at(i, "have the dtype asked for, " + dtype_name(dtype) + ", got " +
                     dtype_name(static_cast<ScalarType>(dtype_of(out[i]))));
    }
    const Geometry from(tensors[i]), to(out[i]);
    if (from.dim != to.dim || !std::equal(from.sizes, from.sizes + from.dim, to.sizes)) {
      fail_at(i, "have the shape of '" + item(of.argument, i) + "', " +
                     text_of(from.sizes, from.dim) + ", got " + text_of(to.sizes, to.dim) +
                     "; make it with torch.empty_like(tensor, dtype=dtype)");
    }
    if (const DeviceOf device(tensors[i]); !(DeviceOf(out[i]) == device)) {
      fail_at(i, "be on the device of '" + of.argument + "', " + text_of(device) + ", got " +
                     text_of(DeviceOf(out[i])) +
                     "; make it with torch.empty_like(tensor, dtype=dtype)");
    }
    if (from.numel == 0) {
      continue;
    }
    if (may_overlap_itself(out[i], to)) {
      fail_at(i, "have memory of its own for every element, got the strides " +
                     text_of(to.strides, to.dim) + " for the shape " + text_of(to.sizes, to.dim) +
                     "; make it with torch.empty_like(tensor, dtype=dtype)");
    }
    const bool is_itself = data_of(out[i]) == data_of(tensors[i]) && dtype_of(tensors[i]) == code &&
                           same_strides(from, to);
    if (!of.may_be_itself || !is_itself) {
      read.emplace_back(i, tensors[i], from, aoti_torch_dtype_element_size(dtype_of(tensors[i])));
    }
    written.emplace_back(i, out[i], to, aoti_torch_dtype_element_size(code));
  }
  check_no_overlap(of, read, written);
  return written;
}

}  // namespace smart_autocast
