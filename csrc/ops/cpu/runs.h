// All elements of many tensors as one range, shared out among the threads.

#pragma once

#include "last_level_cache.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace smart_autocast {

// Tensors are cut at multiples of this many elements, whole lines of the cache.
constexpr int64_t kBlock = 64;
// Blocks that a thread takes at a time, 65536 elements; with fewer than two such pieces to do, it
// is not worth waking.
constexpr int64_t kPiece = 1024;

// The elements of a tensor, side by side in memory, and where their results go.
struct Run {
  void* to;
  const void* from;
  int64_t count;
  int64_t to_size, from_size;  // of an element
  int64_t first_block = 0;     // in the range of all runs
  bool stream = false;         // with stores that go around the caches
};

// A stretch of one, which begins with the element `first`.
struct Stretch {
  char* to;
  const char* from;
  int64_t first, count;
  bool stream;
};

// Calls work(run, stretch) until all of `runs` are done; each of them is, or begins with, a Run.
template <typename AnyRun, typename Work>
void share_out(std::vector<AnyRun>& runs, const Work& work) {
  int64_t blocks = 0, bytes = 0;
  for (AnyRun& run : runs) {
    run.first_block = blocks;
    blocks += (run.count + kBlock - 1) / kBlock;
    bytes += run.count * (run.to_size + run.from_size);
  }
  // What does not fit in the caches need not push out what is in them. Far below, a plain store is
  // up to twice as fast.
  if (bytes > last_level_cache_bytes() / 2) {
    for (AnyRun& run : runs) {
      run.stream = is_written(static_cast<const char*>(run.to) + run.count / 2 * run.to_size);
    }
  }
  const int64_t pieces = (blocks + kPiece - 1) / kPiece;
  const int64_t workers = std::min<int64_t>(pieces / 2, torch::stable::get_num_threads());
  // A thread that touches new memory for the first time is many times slower there, and others may
  // be using its core: each takes the next piece when it is done with one.
  std::atomic<int64_t> next_piece = 0;
  const auto take_pieces = [&](int64_t, int64_t) {
    auto run = runs.cbegin();
    for (int64_t piece; (piece = next_piece.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      const int64_t begin = piece * kPiece, end = std::min(begin + kPiece, blocks);
      run = std::upper_bound(run, runs.cend(), begin,
                             [](int64_t block, const Run& r) { return block < r.first_block; }) -
            1;
      for (auto part = run; part != runs.cend() && part->first_block < end; ++part) {
        const int64_t from = std::max<int64_t>(begin - part->first_block, 0) * kBlock;
        const int64_t to = std::min((end - part->first_block) * kBlock, part->count);
        work(*part, Stretch{static_cast<char*>(part->to) + from * part->to_size,
                            static_cast<const char*>(part->from) + from * part->from_size, from,
                            to - from, part->stream});
      }
    }
  };
  if (workers > 1) {
    torch::stable::parallel_for(0, workers, 1, take_pieces);
  } else {
    take_pieces(0, 1);
  }
}

}  // namespace smart_autocast
