// How a token is chosen from a row of scores, by the definitions of ops/sampling.py: the filters leave what scores at
// least a threshold, and the draw takes the largest sum of a score and its noise. Scores here are relative to the best and
// over the temperature, so at most 0; their bits without the sign, the keys, grow from the best to the worst.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

constexpr int32_t kWorst = 0x7f800000;  // key of what may not be chosen
constexpr int kStretch = 64 * kLanes;   // numbers that are summed in float32: few, so precise
constexpr float kMostNoise = 22.88f;    // -log(-log1p(-2^-33)), rounded up

// A row with what is found out about it.
struct Row {
  const ferrum::Choice& c;
  float best;       // the largest score
  int64_t best_id;  // the first token that has it
  float factor;     // one over the temperature

  Vector scores(int64_t i) const {  // of the tokens from i on; past the last one there is nothing to choose
    const int64_t left = c.size - i;
    if (left >= kLanes) return (load(c.scores + i) - best) * factor;
    Vector found = splat(-__builtin_huge_valf());
    if (left > 0) std::memcpy(&found, c.scores + i, size_t(left) * sizeof(float));
    return (found - best) * factor;
  }
};

// Finds the first of the largest scores; the first that is not a number, if there is one.
inline Row find_best(const ferrum::Choice& c) {
  const float* x = c.scores;
  Vector top[2] = {splat(x[0]), splat(x[0])};
  int64_t i = 0;
  for (; i + 2 * kLanes <= c.size; i += 2 * kLanes)
    for (int j = 0; j < 2; j++) top[j] = larger(top[j], load(x + i + j * kLanes));
  float best = largest(larger(top[0], top[1]));
  for (; i < c.size; i++) best = larger(best, x[i]);
  const auto is_it = [best](auto value) { return best == best ? value == best : value != value; };
  for (i = 0; i + kLanes <= c.size && !any(is_it(load(x + i))); i += kLanes) {
  }
  while (!is_it(x[i])) i++;
  constexpr float least = 0x1p-126f, most = 1e37f;  // so that one over it is neither infinite nor taken for zero
  const float temperature = c.temperature < least ? least : c.temperature > most ? most : c.temperature;
  return {c, best, i, c.temperature > 0.0f ? 1.0f / temperature : 1.0f};
}

// Adds to sums[j] the total weight of the tokens whose key is at most keys[j]. A token weighs its exponential (kMass) or 1;
// lanes past the last token then count as such of the worst key, which no sum that decides has.
template <bool kMass, int kCount> void weigh(const Row& row, const int32_t (&keys)[kCount], double (&sums)[kCount]) {
  float least[kCount];
  for (int j = 0; j < kCount; j++) least[j] = -cast<float>(keys[j]);
  for (int64_t from = 0; from < row.c.size; from += kStretch) {
    Vector found[kCount] = {};
    for (int64_t i = from; i < row.c.size && i < from + kStretch; i += kLanes) {
      const Vector score = row.scores(i), weight = kMass ? exponential(score) : splat(1.0f);
      for (int j = 0; j < kCount; j++) found[j] += score >= least[j] ? weight : Vector{};
    }
    for (int j = 0; j < kCount; j++) sums[j] += total(found[j]);
  }
}

// The tokens whose keys are above one and at most another, if they are few.
struct Between {
  static constexpr int kMost = 8192;
  int count = 0;
  int32_t keys[kMost + kLanes];
  float weights[kMost + kLanes];

  template <bool kMass> bool collect(const Row& row, int32_t above, int32_t last) {
    count = 0;
    for (int64_t i = 0; i < row.c.size; i += kLanes) {
      const Vector score = row.scores(i);
      const Integers key = cast<Integers>(score) & 0x7fffffff, is_here = (key > above) & (key <= last);
      if (!any(is_here)) continue;
      const Vector weight = kMass ? exponential(score) : splat(1.0f);
      for (int lane = 0; lane < kLanes && i + lane < row.c.size; lane++) {
        keys[count] = key[lane];
        weights[count] = weight[lane];
        count += is_here[lane] & 1;
      }
      if (count > kMost) return false;
    }
    for (int lane = 0; lane < kLanes; lane++) keys[count + lane] = last, weights[count + lane] = 0.0f;
    return true;
  }

  double weigh(int32_t key) const {
    double sum = 0.0;
    for (int from = 0; from < count; from += kStretch) {
      Vector found = {};
      for (int i = from; i < count && i < from + kStretch; i += kLanes) {
        Integers here;
        std::memcpy(&here, keys + i, sizeof here);
        found += here <= key ? load(weights + i) : Vector{};
      }
      sum += total(found);
    }
    return sum;
  }
};

// Returns the smallest key such that all tokens with keys up to it weigh at least `goal`, which with kMass is a share of the
// total weight. Only keys up to `last` count.
template <bool kMass> int32_t select(const Row& row, double goal, int32_t last) {
  constexpr int kCount = 8;
  int32_t keys[kCount], low = -1, high = last;
  double before = 0.0;  // what keys of at most `low` weigh
  for (int j = 0; j < kCount; j++) keys[j] = cast<int32_t>(float(1 << j) / 2);
  keys[kCount - 1] = last;
  for (int round = 0; high - low > 1; round++) {
    for (int32_t& key : keys) key = key < high ? key : high;
    double sums[kCount] = {};
    weigh<kMass>(row, keys, sums);
    if (kMass && round == 0) goal *= sums[kCount - 1];
    if (!(goal > 0.0)) return 0;  // the best alone
    for (int j = 0; j < kCount; j++) {
      if (sums[j] >= goal) {
        high = keys[j];
        break;
      }
      low = keys[j];
      before = sums[j];
    }
    if (low >= high) return high;  // nothing reaches the goal
    Between some;
    if (some.collect<kMass>(row, low, high)) {
      while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        (before + some.weigh(middle) >= goal ? high : low) = middle;
      }
      return high;
    }
    for (int j = 0; j < kCount; j++) keys[j] = low + int32_t(int64_t(high - low) * (j + 1) / kCount);
  }
  return high;
}

// The score from which on top-k, then top-p, then min-p leave a token; minus infinity where all are off.
inline float find_threshold(const Row& row) {
  const ferrum::Choice& c = row.c;
  int32_t key = kWorst;
  if (c.top_k > 0 && c.top_k < c.size) key = select<false>(row, c.top_k, key);
  if (c.top_p < 1.0f) key = select<true>(row, c.top_p, key);
  float found = -cast<float>(key);
  if (c.min_p > 0.0f) found = larger(found, __builtin_logf(c.min_p));
  return found > 0.0f ? 0.0f : found;
}

// The first words of Threefry-2x32-20 (Salmon et al. 2011) of the key (seed, position) and counters (token id, 0), for the
// tokens from i on: several vectors beside each other, as each step of one waits for the last.
template <int kCount> inline void threefry(const ferrum::Choice& c, int64_t i, Words (&x)[kCount]) {
  constexpr int kShifts[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {c.seed, c.position, c.seed ^ c.position ^ 0x1BD11BDAu};
  Words y[kCount];
  for (int j = 0; j < kCount; j++) {
    x[j] = cast<Words>(lanes_from(i + j * kLanes)) + keys[0];
    y[j] = Words{} + keys[1];
  }
#pragma GCC unroll 5
  for (int group = 0; group < 5; group++) {
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
      const int shift = kShifts[group % 2][step];
#pragma GCC unroll 4
      for (int j = 0; j < kCount; j++) {
        x[j] += y[j];
        y[j] = ((y[j] << shift) | (y[j] >> (32 - shift))) ^ x[j];
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kCount; j++) {
      x[j] += keys[(group + 1) % 3];
      y[j] += keys[(group + 2) % 3] + uint32_t(group + 1);
    }
  }
}

inline float noise_of(uint32_t word) {
  float share = (float(word) + 0.5f) * 0x1p-32f;
  share = share < 1.0f - 0x1p-24f ? share : 1.0f - 0x1p-24f;
  return -__builtin_logf(-__builtin_log1pf(-share));
}

// Draws from the tokens that score at least the threshold: the largest sum of score and noise, the first of equals. A token
// is skipped where even its largest possible noise cannot beat the best sum so far: the noise of a share s is at most
// -log(s), so it takes a share of at most exp(score - best sum). Few logarithms are computed.
inline int64_t draw(const Row& row, float threshold) {
  constexpr int kCount = 3;
  int64_t id = row.best_id;
  Words first[1], words[kCount];
  threefry(row.c, id, first);
  float top = noise_of(first[0][0]);  // its score is 0
  for (int64_t from = 0; from < row.c.size; from += kCount * kLanes) {
    Vector scores[kCount];
    Integers could = {};
    for (int j = 0; j < kCount; j++) {
      scores[j] = row.scores(from + j * kLanes);
      could |= (scores[j] >= threshold) & (scores[j] - top >= -kMostNoise);
    }
    if (!any(could)) continue;
    threefry(row.c, from, words);
    for (int j = 0; j < kCount; j++) {
      const int64_t i = from + j * kLanes;
      // exp(lacks) * 2^32 from above: between two powers of two a straight line, a little too high.
      const Vector lacks = scores[j] - top, bounded = lacks > Vector{} ? Vector{} : lacks < -32.0f ? splat(-32.0f) : lacks;
      const Vector most = bounded * (0x1p23f * 1.44269504f) + 0x1p23f * (127.0f + 32.0f + 0.002f);
      const Vector share = __builtin_convertvector(words[j], Vector);
      const Integers is_close = (share <= cast<Vector>(__builtin_convertvector(most, Integers))) & (scores[j] >= threshold);
      if (!any(is_close)) continue;
      for (int lane = 0; lane < kLanes && i + lane < row.c.size; lane++) {
        if (!is_close[lane]) continue;
        const float sum = scores[j][lane] + noise_of(words[j][lane]);
        if (sum > top || (sum == top && i + lane < id)) top = sum, id = i + lane;
      }
    }
  }
  return id;
}

void choose(const ferrum::Choice& c, ferrum::Chosen* found) {
  const Row row = find_best(c);
  *found = {int32_t(row.best_id), -__builtin_huge_valf()};
  const bool is_finite = row.best - row.best == 0.0f;
  if (!(c.temperature > 0.0f) || !is_finite) return;
  if (c.top_k > 0 || c.top_p < 1.0f || c.min_p > 0.0f) found->threshold = find_threshold(row);
  found->id = int32_t(draw(row, found->threshold));
}

}  // namespace
