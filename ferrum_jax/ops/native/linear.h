// Products of few tokens. Every sum runs over the inputs in one order, whatever the tile, so that a row's result does not
// depend on the rows beside it.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace {

using ferrum::Kind;
using ferrum::Linear;

constexpr int64_t kAhead = 8;       // rows of the weight that are fetched ahead, at least
constexpr int64_t kStrip = 1 << 12;  // numbers of the weight that stay in the nearest cache while all rows of x meet them

template <class W> inline void fetch(const W* p) { __builtin_prefetch(p, 0, 2); }

// What a pass over the weight fetches for later: each of `passes` over the same rows fetches its share of them.
struct Fetch {
  int64_t ahead;  // rows
  int first, step;
};

// R rows of the weight times B rows of x.
template <int R, int B, class W>
inline void multiply(const float* const* x, const W* weight, int64_t inputs, int64_t n, float* const* y,
                     const Fetch& later) {
  const W* w[R];
  const float* u[B];
  Vector sums[R][B];
  for (int r = 0; r < R; r++) w[r] = weight + r * inputs;
  for (int b = 0; b < B; b++) u[b] = x[b];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int b = 0; b < B; b++) sums[r][b] = Vector{};
  int64_t k = 0;
  for (; k + kLanes <= inputs; k += kLanes) {
    Vector row[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) row[r] = load(w[r] + k);
    if (k % int64_t(64 / sizeof(W)) == 0)
      for (int r = later.first; r < R; r += later.step) fetch(weight + (r + later.ahead) * inputs + k);
#pragma GCC unroll 16
    for (int b = 0; b < B; b++) {
      const Vector v = load(u[b] + k);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r][b] += row[r] * v;
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) {
      float sum = total(sums[r][b]);
      for (int64_t i = k; i < inputs; i++) sum += widen(w[r][i]) * u[b][i];
      y[b][n + r] = sum;
    }
}

// Outputs first to last of B rows of x.
template <int R, int B, class W>
inline void multiply_rows(const Linear& a, const W* weight, int64_t row, int64_t first, int64_t last, const Fetch& later) {
  const int64_t k = a.inputs;
  int64_t n = first;
  for (; n + R <= last; n += R) multiply<R, B>(a.x + row, weight + n * k, k, n, a.y + row, later);
  for (; n < last; n++) multiply<1, B>(a.x + row, weight + n * k, k, n, a.y + row, later);
}

template <class W> void dense(const Linear& a, const W* weight, int64_t first, int64_t last) {
  constexpr int R = kManyRegisters ? 6 : 3;
  const int64_t fit = kStrip / a.inputs / R * R, strip = a.rows > 4 ? most(fit, R) : last - first;
  const int passes = int((a.rows + 3) / 4);
  for (int64_t n = first; n < last; n += strip) {
    const int64_t end = least(n + strip, last);
    Fetch later{passes > 1 ? most(strip, kAhead) : kAhead, 0, passes};
    int64_t row = 0;
    for (; row + 4 <= a.rows; row += 4, later.first++) multiply_rows<R, 4>(a, weight, row, n, end, later);
    switch (a.rows - row) {
      case 3: multiply_rows<3, 3>(a, weight, row, n, end, later); break;
      case 2: multiply_rows<4, 2>(a, weight, row, n, end, later); break;
      case 1: multiply_rows<4, 1>(a, weight, row, n, end, later); break;
    }
  }
}

// A quantised weight, by the types of its values, scales and offsets, and by the size of its groups where the compiler
// is to know it (0: it does not). Four bits without offsets have one of -8 scales.
template <class V, class S, class O, int kSize> struct Quantised {
  static constexpr bool kIsPacked = sizeof(V) == sizeof(Nibbles) && !__is_same(V, int8_t);
  const V* values;
  const S* scales;
  const O* offsets;
  int64_t inputs, groups, any_size;

  explicit Quantised(const Linear& a)
      : values(static_cast<const V*>(a.weight)), scales(static_cast<const S*>(a.scales)),
        offsets(static_cast<const O*>(a.offsets)), inputs(a.inputs), groups(a.groups), any_size(a.inputs / a.groups) {}
  int64_t size() const { return kSize ? kSize : any_size; }
  const V* at(int64_t n, int64_t g) const { return values + (n * inputs + g * size()) / (kIsPacked ? 2 : 1); }
  float scale(int64_t n, int64_t g) const { return widen(scales[n * groups + g]); }
  float offset(int64_t n, int64_t g, float scale) const {
    return offsets ? widen(offsets[n * groups + g]) : kIsPacked ? -8.0f * scale : 0.0f;
  }
};

// Widens one row: value * scale + offset.
template <class S, class O, int kSize> void widen_row(const Quantised<int8_t, S, O, kSize>& w, int64_t n, float* to) {
  for (int64_t g = 0; g < w.groups; g++, to += w.size()) {
    const float scale = w.scale(n, g), offset = w.offset(n, g, scale);
    const int8_t* p = w.at(n, g);
    int64_t k = 0;
    for (; k + kLanes <= w.size(); k += kLanes) store(to + k, load(p + k) * scale + offset);
    for (; k < w.size(); k++) to[k] = float(p[k]) * scale + offset;
  }
}
template <class S, class O, int kSize> void widen_row(const Quantised<Nibbles, S, O, kSize>& w, int64_t n, float* to) {
  const int64_t half = w.size() / 2;
  for (int64_t g = 0; g < w.groups; g++, to += w.size()) {
    const float scale = w.scale(n, g), offset = w.offset(n, g, scale);
    const Nibbles* p = w.at(n, g);
    int64_t k = 0;
    for (; k + kLanes <= half; k += kLanes) {
      Vector low, high;
      load(p + k, &low, &high);
      store(to + k, low * scale + offset);
      store(to + half + k, high * scale + offset);
    }
    for (; k < half; k++) {
      to[k] = float(p[k].bits & 15) * scale + offset;
      to[half + k] = float(p[k].bits >> 4) * scale + offset;
    }
  }
}

// Adds the products of one group's values, R rows of the weight, with B rows of x.
template <int R, int B, class S, class O, int kSize>
inline void multiply_group(const Quantised<int8_t, S, O, kSize>& w, const int8_t* p, const float* const* x, Vector (*parts)[B]) {
  for (int64_t k = 0; k < w.size(); k += kLanes) {
    Vector row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) row[r] = load(p + r * w.inputs + k);
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      const Vector v = load(x[b] + k);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) parts[r][b] += row[r] * v;
    }
  }
}
template <int R, int B, class S, class O, int kSize>
inline void multiply_group(const Quantised<Nibbles, S, O, kSize>& w, const Nibbles* p, const float* const* x,
                           Vector (*parts)[B]) {
  const int64_t half = w.size() / 2;
  for (int64_t k = 0; k < half; k += kLanes) {
    Vector low[R], high[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) load(p + r * (w.inputs / 2) + k, low + r, high + r);
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      const Vector front = load(x[b] + k), back = load(x[b] + half + k);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) parts[r][b] += low[r] * front;
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) parts[r][b] += high[r] * back;
    }
  }
}

// Few rows of x: values meet them before their group's scale does, and its offset meets the sum of x, [B, groups].
template <int R, int B, class V, class S, class O, int kSize>
inline void multiply_quantised(const Quantised<V, S, O, kSize>& w, const float* const* x, const float* sums_of_x, int64_t n,
                               float* const* y) {
  const bool has_offsets = w.offsets || w.kIsPacked;
  Vector sums[R][B];
  float rest[R][B];
  const float* own[B];
  for (int b = 0; b < B; b++) own[b] = x[b];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) sums[r][b] = Vector{}, rest[r][b] = 0.0f;
  for (int64_t g = 0; g < w.groups; g++) {
    const V* p = w.at(n, g);
    for (int r = 0; r < R; r++) fetch(p + (w.at(n + r + kAhead, 0) - w.at(n, 0)));
    Vector parts[R][B];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) parts[r][b] = Vector{};
    multiply_group<R, B>(w, p, own, parts);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const float scale = w.scale(n + r, g), offset = has_offsets ? w.offset(n + r, g, scale) : 0.0f;
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) {
        sums[r][b] += parts[r][b] * scale;
        rest[r][b] += offset * sums_of_x[b * w.groups + g];
      }
    }
    for (int b = 0; b < B; b++) own[b] += w.size();
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) y[b][n + r] = total(sums[r][b]) + rest[r][b];
}

template <int R, int B, class V, class S, class O, int kSize>
void quantised_rows(const Quantised<V, S, O, kSize>& w, const Linear& a, const float* sums_of_x, int64_t row, int64_t first,
                    int64_t last) {
  const float *const *x = a.x + row, *sums = sums_of_x + row * w.groups;
  int64_t n = first;
  for (; n + R <= last; n += R) multiply_quantised<R, B>(w, x, sums, n, a.y + row);
  for (; n < last; n++) multiply_quantised<1, B>(w, x, sums, n, a.y + row);
}

template <class V, class S, class O, int kSize> void quantised(const Linear& a, int64_t first, int64_t last) {
  const Quantised<V, S, O, kSize> w(a);
  alignas(64) float wide[3 * ferrum::kMostInputs];  // rows of the weight, or sums of x
  if (a.is_few && a.rows * w.groups <= 3 * ferrum::kMostInputs && w.size() % (w.kIsPacked ? 2 * kLanes : kLanes) == 0) {
    for (int64_t row = 0; row < a.rows; row++)
      for (int64_t g = 0; g < w.groups; g++) {
        Vector sum = {};
        for (int64_t k = g * w.size(); k < (g + 1) * w.size(); k += kLanes) sum += load(a.x[row] + k);
        wide[row * w.groups + g] = total(sum);
      }
    for (int64_t n = first; n < last; n += 12) {
      const int64_t end = least(n + 12, last);
      int64_t row = 0;
      for (; row + 4 <= a.rows; row += 4) quantised_rows<2, 4>(w, a, wide, row, n, end);
      switch (a.rows - row) {
        case 3: quantised_rows<2, 3>(w, a, wide, row, n, end); break;
        case 2: quantised_rows<4, 2>(w, a, wide, row, n, end); break;
        case 1: quantised_rows<4, 1>(w, a, wide, row, n, end); break;
      }
    }
    return;
  }
  for (int64_t n = first; n < last; n += 3) {
    const int64_t rows = least(3, last - n);
    for (int64_t r = 0; r < rows; r++) widen_row(w, n + r, wide + r * a.inputs);
    const float* from = wide - n * a.inputs;  // where row 0 would be
    const Fetch nothing{0, 3, 1};
    int64_t row = 0;
    for (; row + 4 <= a.rows; row += 4) multiply_rows<3, 4>(a, from, row, n, n + rows, nothing);
    for (; row < a.rows; row++) multiply_rows<3, 1>(a, from, row, n, n + rows, nothing);
  }
}

// Calls f with the types of the weight's scales and offsets, as null pointers to them.
template <class F> void by_scales(const Linear& a, const F& f) {
  const bool same = !a.offsets || a.offset_kind == a.scale_kind;
  const BFloat16* brain = nullptr;
  const Float16* half = nullptr;
  const float* single = nullptr;
  switch (a.scale_kind) {
    case Kind::kBFloat16: return same ? f(brain, brain) : f(brain, single);
    case Kind::kFloat16: return same ? f(half, half) : f(half, single);
    default: return f(single, single);
  }
}
template <class V> void quantised_by_scales(const Linear& a, int64_t first, int64_t last) {
  by_scales(a, [&](auto* s, auto* o) {
    using S = std::decay_t<decltype(*s)>;
    using O = std::decay_t<decltype(*o)>;
    a.inputs == 32 * a.groups ? quantised<V, S, O, 32>(a, first, last) : quantised<V, S, O, 0>(a, first, last);
  });
}

template <class W> void widen_dense(const Linear& a, float* to, int64_t first, int64_t last) {
  const W* from = static_cast<const W*>(a.weight);
  int64_t i = first * a.inputs;
  for (; i + kLanes <= last * a.inputs; i += kLanes) store(to + i, load(from + i));
  for (; i < last * a.inputs; i++) to[i] = widen(from[i]);
}
template <class V> void widen_quantised(const Linear& a, float* to, int64_t first, int64_t last) {
  by_scales(a, [&](auto* s, auto* o) {
    using S = std::decay_t<decltype(*s)>;
    using O = std::decay_t<decltype(*o)>;
    const Quantised<V, S, O, 0> any(a);
    const Quantised<V, S, O, 32> usual(a);
    for (int64_t n = first; n < last; n++)
      a.inputs == 32 * a.groups ? widen_row(usual, n, to + n * a.inputs) : widen_row(any, n, to + n * a.inputs);
  });
}

void widen(const Linear& a, float* to, int64_t first, int64_t last) {
  switch (a.kind) {
    case Kind::kFloat32: return widen_dense<float>(a, to, first, last);
    case Kind::kBFloat16: return widen_dense<BFloat16>(a, to, first, last);
    case Kind::kFloat16: return widen_dense<Float16>(a, to, first, last);
    case Kind::kInt8: return widen_quantised<int8_t>(a, to, first, last);
    case Kind::kUint4: return widen_quantised<Nibbles>(a, to, first, last);
  }
}

void linear(const Linear& a, int64_t first, int64_t last) {
  switch (a.kind) {
    case Kind::kFloat32: return dense(a, static_cast<const float*>(a.weight), first, last);
    case Kind::kBFloat16: return dense(a, static_cast<const BFloat16*>(a.weight), first, last);
    case Kind::kFloat16: return dense(a, static_cast<const Float16*>(a.weight), first, last);
    case Kind::kInt8: return quantised_by_scales<int8_t>(a, first, last);
    case Kind::kUint4: return quantised_by_scales<Nibbles>(a, first, last);
  }
}

}  // namespace
