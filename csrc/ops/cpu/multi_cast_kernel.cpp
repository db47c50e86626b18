// multi_cast on the CPU: all elements of all tensors as one range, shared out among the threads.
//
// A tensor whose elements fill its memory without holes, in whatever order of dimensions, is one
// run of elements, and its result another with the same strides. What is not (slices, expanded
// tensors, dtypes that are not floating) is ATen's copy, before the threads begin.

#include "../multi_cast.h"
#include "convert.h"
#include "last_level_cache.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace smart_autocast {
namespace {

// Tensors are cut at multiples of this many elements, whole lines of the cache.
constexpr int64_t kBlock = 64;
// Blocks that a thread takes at a time, 65536 elements; with fewer than two such pieces to do, it
// is not worth waking.
constexpr int64_t kPiece = 1024;

struct Run {
  ConvertFunction convert;
  void* to;
  const void* from;
  int64_t count;
  int64_t to_size, from_size;  // of an element
  int64_t first_block = 0;     // in the range of all runs
};

void run_all(std::vector<Run>& runs) {
  int64_t blocks = 0, bytes = 0;
  for (Run& run : runs) {
    run.first_block = blocks;
    blocks += (run.count + kBlock - 1) / kBlock;
    bytes += run.count * (run.to_size + run.from_size);
  }
  // What does not fit in the caches need not push out what is in them. Far below, a plain store is
  // up to twice as fast.
  const bool stream = bytes > last_level_cache_bytes() / 2;
  const int64_t pieces = (blocks + kPiece - 1) / kPiece;
  const int64_t workers = std::min<int64_t>(pieces / 2, torch::stable::get_num_threads());
  // A thread that touches new memory for the first time is many times slower there, and others may
  // be using its core: each takes the next piece when it is done with one.
  std::atomic<int64_t> next_piece = 0;
  const auto work = [&](int64_t, int64_t) {
    auto run = runs.cbegin();
    for (int64_t piece; (piece = next_piece.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      const int64_t begin = piece * kPiece, end = std::min(begin + kPiece, blocks);
      run = std::upper_bound(run, runs.cend(), begin,
                             [](int64_t block, const Run& r) { return block < r.first_block; }) -
            1;
      for (auto part = run; part != runs.cend() && part->first_block < end; ++part) {
        const int64_t from = std::max<int64_t>(begin - part->first_block, 0) * kBlock;
        const int64_t to = std::min((end - part->first_block) * kBlock, part->count);
        part->convert(static_cast<char*>(part->to) + from * part->to_size,
                      static_cast<const char*>(part->from) + from * part->from_size, to - from,
                      stream);
      }
    }
  };
  if (workers > 1) {
    torch::stable::parallel_for(0, workers, 1, work);
  } else {
    work(0, 1);
  }
}

// The conversion for each tensor in turn; many have the dtype of the one before.
class FindConvert {
 public:
  explicit FindConvert(ScalarType to) : to_(to) {}

  ConvertFunction operator()(int32_t from) {
    if (from != last_) {
      last_ = from;
      found_ = find_convert(to_, scalar_type(from));
    }
    return found_;
  }

 private:
  ScalarType to_;
  int32_t last_ = -1;
  ConvertFunction found_ = nullptr;
};

void multi_cast_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  check_multi_cast(tensors, dtype);
  const int32_t code = dtype_code(dtype), cpu = aoti_torch_device_type_cpu();
  const auto to_size = static_cast<int64_t>(aoti_torch_dtype_element_size(code));
  FindConvert find(dtype);
  TensorList results(tensors.size());
  std::vector<Run> runs;
  runs.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int32_t from = dtype_of(tensors[i]);
    const ConvertFunction convert = find(from);
    const Geometry geometry(tensors[i]);
    if (convert == nullptr || !is_dense(tensors[i], geometry)) {
      results[i] = cast_by_aten(tensors[i], dtype);
      continue;
    }
    AtenTensorHandle result = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(geometry.dim, geometry.sizes, geometry.strides,
                                                    code, cpu, /*device_index=*/0, &result));
    results[i].reset(result);
    if (geometry.numel > 0) {
      runs.push_back({convert, data_of(results[i]), data_of(tensors[i]), geometry.numel, to_size,
                      static_cast<int64_t>(aoti_torch_dtype_element_size(from))});
    }
  }
  run_all(runs);
  stack[0] = give_list(std::move(results));
}

void multi_cast_out_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors = take_list(stack[0]);
  const auto dtype = torch::stable::detail::to<ScalarType>(stack[1]);
  const TensorList out = take_list(stack[2]);
  check_multi_cast_out(tensors, dtype, out);
  const auto to_size = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_code(dtype)));
  FindConvert find(dtype);
  std::vector<Run> runs;
  runs.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int32_t from = dtype_of(tensors[i]);
    const ConvertFunction convert = find(from);
    const Geometry geometry(tensors[i]);
    if (convert == nullptr || !is_dense(tensors[i], geometry) ||
        !same_strides(geometry, Geometry(out[i]))) {
      copy_by_aten(out[i], tensors[i]);
    } else if (geometry.numel > 0) {
      runs.push_back({convert, data_of(out[i]), data_of(tensors[i]), geometry.numel, to_size,
                      static_cast<int64_t>(aoti_torch_dtype_element_size(from))});
    }
  }
  run_all(runs);
}

}  // namespace
}  // namespace smart_autocast

STABLE_TORCH_LIBRARY_IMPL(smart_autocast, CPU, m) {
  m.impl("multi_cast", &smart_autocast::multi_cast_cpu);
  m.impl("multi_cast.out", &smart_autocast::multi_cast_out_cpu);
}
