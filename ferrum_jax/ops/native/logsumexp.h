// The logarithm of the sum of exponentials of a row, in parts of a fixed size, so that the result depends neither on the
// rows beside it nor on the number of threads. A part is read twice, the second time from a cache.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

// The largest number of a part, and the sum of the exponentials of all of them less that.
void sum_exponentials(const float* x, int64_t count, float* part) {
  constexpr int kSums = 4;  // beside each other: they are shorter, so more precise, and none waits for the one before
  const Vector least = splat(-__builtin_huge_valf());
  Vector top[kSums] = {least, least, least, least}, sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= count; i += kSums * kLanes)
    for (int j = 0; j < kSums; j++) top[j] = larger(top[j], load(x + i + j * kLanes));
  float best = largest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
  for (int64_t k = i; k < count; k++) best = larger(best, x[k]);
  const Vector from = splat(best == -__builtin_huge_valf() ? 0.0f : best);
  for (int64_t k = 0; k < i; k += kSums * kLanes)
    for (int j = 0; j < kSums; j++) sums[j] += exponential(load(x + k + j * kLanes) - from);
  float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; i++) sum += exponential(splat(x[i]) - from)[0];
  part[0] = best;
  part[1] = sum;
}

}  // namespace
