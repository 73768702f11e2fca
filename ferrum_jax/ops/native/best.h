// The largest numbers of a row, in one pass: most vectors hold none that is above the least of those found so far.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

// Whether a comes before b: what is not a number is above all numbers.
inline bool is_above(float a, float b) { return a > b || (a != a && b == b); }

// Finds the `count` largest of `size` numbers, descending, and where they are. Of equals the first come first.
void find_largest(const float* x, int64_t size, int64_t count, float* values, int32_t* ids) {
  int64_t found = 0;
  const auto insert = [&](int64_t i) {
    if (found == count && !is_above(x[i], values[count - 1])) return;
    int64_t to = found < count ? found++ : count - 1;
    for (; to > 0 && is_above(x[i], values[to - 1]); to--) {
      values[to] = values[to - 1];
      ids[to] = ids[to - 1];
    }
    values[to] = x[i];
    ids[to] = int32_t(i);
  };
  int64_t i = 0;
  for (; i < count; i++) insert(i);
  for (; i + kLanes <= size; i += kLanes)
    if (any(~(load(x + i) <= values[count - 1])))
      for (int lane = 0; lane < kLanes; lane++) insert(i + lane);
  for (; i < size; i++) insert(i);
}

}  // namespace
