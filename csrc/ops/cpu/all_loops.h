// All loops of loops.h, as the file which includes this is compiled. They stay in unnamed
// namespaces, for the reason given in convert_loop.h.

#pragma once

#include "count_loop.h"
#include "loops.h"
#include "round_loop.h"
#include "scale_loop.h"

namespace {

constexpr smart_autocast::Loops kLoops = {
    .count = count_loop,
    .scale = scale_loop<float, uint32_t>,
    .scale_double = scale_loop<double, uint64_t>,
    .round = round_loop,
};

}  // namespace
