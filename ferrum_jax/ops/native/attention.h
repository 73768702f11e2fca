// Attention over a paged KV with an online softmax (Milakov and Gimelshein 2018), a block of positions at a time, all
// query heads of a KV head together. A row of one token is computed in parts of a fixed number of positions, so that its
// result depends neither on the rows beside it nor on the number of threads.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

using ferrum::Attention;
using ferrum::Kind;
using ferrum::kMostWidth;
using ferrum::kTileRows;
using ferrum::Write;

constexpr int64_t kChunk = 128;  // positions at a time, at most
constexpr int kWide = kManyRegisters ? 4 : 2;  // vectors that six rows meet at once
constexpr float kInfinity = __builtin_huge_valf();

// What is read next, to be fetched meanwhile in the order in which it lies in memory: as much at a time as is read.
struct Ahead {
  const char *at = nullptr, *end = nullptr;
  template <int kBytes> void fetch() {
    if (at >= end) return;
#pragma GCC unroll 4
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(at + i, 0, 3);
    at += kBytes;
  }
};
template <class T> inline Ahead ahead_of(const T* from, int64_t count) {
  const char* at = reinterpret_cast<const char*>(from);
  return Ahead{at, at + count * int64_t(sizeof(T))};
}

// Scores of R rows against V vectors of positions, or against the first `some` of one vector: keys [H, C]. Numbers `first`
// to `last` of H only, added to what those before them came to.
template <int R, int V, class T>
inline void score(const float* q, int64_t width, int64_t first, int64_t last, const T* keys, int64_t block, float* scores,
                  Ahead* ahead, int64_t some = kLanes) {
  Vector sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) sums[r][j] = first ? load(scores + r * kChunk + j * kLanes) : Vector{};
  Ahead next = *ahead;
  for (int64_t h = first; h < last; h++) {
    next.fetch<V * kLanes * int(sizeof(T))>();
    Vector key[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) {
      const T* at = keys + h * block + j * kLanes;
      key[j] = V > 1 || some == kLanes ? load(at) : load_first(at, some);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vector own = splat(q[r * width + h]);
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) sums[r][j] += key[j] * own;
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) store(scores + r * kChunk + j * kLanes, sums[r][j]);
  *ahead = next;
}

// Adds R rows of weights times values [C, H] to outputs that are multiplied by `keep` first; V vectors of the outputs, or
// the first `some` numbers of one.
template <int R, int V, class T>
inline void mix(const float* weights, const float* keep, const T* values, int64_t width, int64_t count, float* out,
                Ahead* ahead, int64_t some = kLanes) {
  const bool whole = V > 1 || some == kLanes;
  Vector sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) {
      const float* at = out + r * width + j * kLanes;
      sums[r][j] = (whole ? load(at) : load_first(at, some)) * keep[r];
    }
  Ahead next = *ahead;
  for (int64_t c = 0; c < count; c++) {
    next.fetch<V * kLanes * int(sizeof(T))>();
    Vector value[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) {
      const T* at = values + c * width + j * kLanes;
      value[j] = whole ? load(at) : load_first(at, some);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vector own = splat(weights[r * kChunk + c]);
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) sums[r][j] += value[j] * own;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) {
      float* at = out + r * width + j * kLanes;
      whole ? store(at, sums[r][j]) : store_first(at, sums[r][j], some);
    }
  *ahead = next;
}

// The same where the values are the keys, [H, C]: sums over positions, for W numbers of the outputs.
template <int R, int W, class T>
inline void mix_keys(const float* weights, const float* keep, const T* keys, int64_t width, int64_t block, int64_t count,
                     float* out) {
  Vector sums[R][W];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < W; j++) sums[r][j] = Vector{};
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    Vector key[W];
#pragma GCC unroll 8
    for (int j = 0; j < W; j++) key[j] = load(keys + j * block + c);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vector own = load(weights + r * kChunk + c);
#pragma GCC unroll 8
      for (int j = 0; j < W; j++) sums[r][j] += key[j] * own;
    }
  }
  if (c < count)
    for (int j = 0; j < W; j++) {
      const Vector key = load_first(keys + j * block + c, count - c);
      for (int r = 0; r < R; r++) sums[r][j] += key * load(weights + r * kChunk + c);
    }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < W; j++) out[r * width + j] = out[r * width + j] * keep[r] + total(sums[r][j]);
}

// A block of keys [H, C] or values [C, H] is read in pieces, some lines of it each, in the order in which it lies in memory:
// all rows meet a piece while the next one is fetched. With many rows the block is one piece, of which all rows meet a few
// vectors, and then the next ones, so that these stay in the nearest cache.
constexpr int64_t kPieceRows = 16, kPieceBytes = 1 << 13;
inline int64_t lines_of_piece(int64_t rows, int64_t line_bytes, int64_t lines) {
  return rows > kPieceRows ? lines : least(lines, most(1, kPieceBytes / line_bytes));
}

// Scores of at least `count` positions, where `room` are left in the block; `after` is what is read after these keys.
template <int V, class T>
inline void score_all(int64_t rows, const float* q, int64_t width, const T* keys, int64_t block, int64_t count, int64_t room,
                      float* scores, const Ahead& after) {
  const int64_t piece = lines_of_piece(rows, block * int64_t(sizeof(T)), width);
  Ahead nothing;
  for (int64_t first = 0; first < width; first += piece) {
    const int64_t last = least(width, first + piece);
    Ahead ahead = last < width ? ahead_of(keys + last * block, least(piece, width - last) * block) : after;
    int64_t c = 0;
    for (; c < count && c + V * kLanes <= least(room, kChunk); c += V * kLanes)
      by_rows(rows, [&](auto size, int64_t r) {
        score<size.value, V>(q + r * width, width, first, last, keys + c, block, scores + r * kChunk + c,
                             r ? &nothing : &ahead);
      });
    for (; c < count; c += kLanes)
      by_rows(rows, [&](auto size, int64_t r) {
        score<size.value, 1>(q + r * width, width, first, last, keys + c, block, scores + r * kChunk + c, &nothing,
                             least(room - c, kLanes));
      });
  }
}
template <int V, class T>
inline void mix_all(int64_t rows, const float* weights, const float* keep, const T* values, int64_t width, int64_t positions,
                    float* out, const Ahead& after) {
  const int64_t piece = lines_of_piece(rows, width * int64_t(sizeof(T)), positions);
  float ones[kTileRows];
  for (int64_t r = 0; r < rows; r++) ones[r] = 1.0f;
  Ahead nothing;
  for (int64_t first = 0; first < positions; first += piece) {
    const int64_t last = least(positions, first + piece), count = last - first;
    Ahead ahead = last < positions ? ahead_of(values + last * width, least(piece, positions - last) * width) : after;
    const T* from = values + first * width;
    const float *own = weights + first, *factor = first ? ones : keep;
    int64_t h = 0;
    for (; h + V * kLanes <= width; h += V * kLanes)
      by_rows(rows, [&](auto size, int64_t r) {
        mix<size.value, V>(own + r * kChunk, factor + r, from + h, width, count, out + r * width + h,
                           r ? &nothing : &ahead);
      });
    for (; h < width; h += kLanes)
      by_rows(rows, [&](auto size, int64_t r) {
        const int64_t some = least(width - h, kLanes);
        mix<size.value, 1>(own + r * kChunk, factor + r, from + h, width, count, out + r * width + h, &nothing, some);
      });
  }
}

template <class T>
inline void mix_all_keys(int64_t rows, const float* weights, const float* keep, const T* keys, int64_t width, int64_t block,
                         int64_t count, float* out) {
  int64_t h = 0;
  const auto some = [&](auto W) {
    for (; h + W.value <= width; h += W.value)
      by_rows(rows, [&](auto size, int64_t r) {
        mix_keys<size.value, W.value>(weights + r * kChunk, keep + r, keys + h * block, width, block, count,
                                      out + r * width + h);
      });
  };
  some(Size<kWide>());
  some(Size<1>());
}

// The softmax of what rows have seen so far: outputs are not yet divided by `sum`, and relative to the largest score.
struct RunningSoftmax {
  float* out;   // [rows, H]
  float* best;  // [rows]
  float* sum;   // [rows]
};

// Some query heads of one KV head, at some tokens of one row of the batch.
struct Queries {
  int64_t b, head, t0, t1, g0, g1;
  int64_t heads() const { return g1 - g0; }
  int64_t rows() const { return (t1 - t0) * heads(); }
};

int64_t group_of(const Attention& a) { return a.heads / a.kv_heads; }
int64_t first_seen(const Attention& a, int64_t position) { return a.window ? most(position - a.window + 1, 0) : 0; }

// What rows have seen before they see anything: their sink, or nothing.
void begin(const Attention& a, const Queries& of, const RunningSoftmax& seen, bool with_sinks) {
  for (int64_t r = 0; r < of.rows(); r++) {
    seen.best[r] = with_sinks ? a.sinks[of.head * group_of(a) + of.g0 + r % of.heads()] : -kInfinity;
    seen.sum[r] = with_sinks ? 1.0f : 0.0f;
  }
  for (int64_t i = 0; i < of.rows() * a.width; i++) seen.out[i] = 0.0f;
}

// The largest of scores that are all seen; NaN if one of them is not finite.
inline float largest_finite(const float* scores, int64_t count) {
  Vector top = splat(-kInfinity), odd = {};
  for (int64_t c = 0; c < count; c += kLanes) {
    const Vector s = load(scores + c);
    top = s > top ? s : top;
    odd += s * 0.0f;
  }
  return largest(top + odd);
}
// Caps the scores, hides those that are not from `start` to `end`, and returns the largest.
inline float largest_seen(float* scores, int64_t count, int64_t start, int64_t end, float softcap) {
  Vector top = splat(-kInfinity);
  for (int64_t c = 0; c < count; c += kLanes) {
    Vector s = load(scores + c);
    if (softcap != 0.0f) s = softcap * hyperbolic_tangent(s / softcap);
    const Integers lane = lanes_from(c);
    s = ((lane >= int32_t(start)) & (lane < int32_t(end))) ? s : splat(-kInfinity);
    store(scores + c, s);
    top = larger(top, s);
  }
  return largest(top);
}

// Caps a row's scores of `count` positions, hides what its token does not see, all but `start` to `end`, and returns the
// largest.
inline float hide(float* scores, int64_t count, int64_t start, int64_t end, float softcap) {
  const bool all = start <= 0 && end >= count && softcap == 0.0f;
  const float found = all ? largest_finite(scores, count) : __builtin_nanf("");
  return found == found ? found : largest_seen(scores, count, start, end, softcap);
}

// Turns rows' scores of `count` positions into weights. Of each row `keep` is its largest score, and then by what to multiply
// what it has seen before; these factors are computed first, a vector of rows at a time.
void weigh(float* scores, int64_t rows, int64_t count, float* keep, float* best, float* sum) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int64_t some = least(rows - r, kLanes);
    const Vector before = load_first(best + r, some), now = larger(before, load_first(keep + r, some));
    store_first(best + r, now, some);
    store_first(keep + r, before == now ? splat(1.0f) : exponential(before - now), some);
  }
  for (int64_t r = 0; r < rows; r++) {
    float* own = scores + r * kChunk;
    const float from = best[r] == -kInfinity ? 0.0f : best[r];
    Vector weights = {};
    for (int64_t c = 0; c < count; c += kLanes) {
      const Vector weight = exponential(load(own + c) - from);
      store(own + c, weight);
      weights += weight;
    }
    sum[r] = sum[r] * keep[r] + total(weights);
  }
}

// Adds positions first to last to what the queries have seen.
template <class T> void visit(const Attention& a, const Queries& of, int64_t first, int64_t last, const RunningSoftmax& seen) {
  const int64_t rows = of.rows(), width = a.width, heads = of.heads();
  alignas(64) float q[kTileRows * kMostWidth], scores[kTileRows * kChunk], keep[kTileRows];
  for (int64_t t = of.t0; t < of.t1; t++) {
    const float* from = a.q + ((of.b * a.tokens + t) * a.heads + of.head * group_of(a) + of.g0) * width;
    float* to = q + (t - of.t0) * heads * width;
    for (int64_t i = 0; i < heads * width; i++) to[i] = from[i] * a.scale;
  }
  const T *keys = static_cast<const T*>(a.keys), *values = static_cast<const T*>(a.values);
  const auto place_of = [&](int64_t b, int64_t head, int64_t position) {
    const int64_t id = a.tables[b * a.columns + position / a.block];
    return ((a.layer * a.blocks + id) * a.kv_heads + head) * width * a.block;
  };
  const int64_t piece = lines_of_piece(rows, a.block * int64_t(sizeof(T)), width) * a.block;  // numbers
  const auto next_item = [&]() -> Ahead {  // of rows of one token: their next part, head or row
    if (a.tokens > 1) return {};
    if (last <= a.lengths[of.b]) return ahead_of(keys + place_of(of.b, of.head, last), piece);
    const bool is_row = of.head + 1 == a.kv_heads;
    const int64_t b = of.b + is_row, head = is_row ? 0 : of.head + 1;
    if (b == a.batch || !a.counts[b]) return {};
    return ahead_of(keys + place_of(b, head, first_seen(a, a.lengths[b])), piece);
  };
  int64_t count;
  for (int64_t at = first / kLanes * kLanes; at < last; at += count) {
    const int64_t offset = at % a.block, place = place_of(of.b, of.head, at);
    count = least(least(kChunk, a.block - offset), last - at);
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    const T *k = keys + place + offset, *v = values ? values + place + offset * width : nullptr;
    const Ahead more_keys = at + count < last ? ahead_of(keys + place_of(of.b, of.head, at + count), piece) : next_item();
    const int64_t lines = lines_of_piece(rows, width * int64_t(sizeof(T)), count);
    const Ahead after_keys = values ? ahead_of(v, lines * width) : more_keys;
    rows > 3 ? score_all<kWide>(rows, q, width, k, a.block, count, a.block - offset, scores, after_keys)
             : score_all<4>(rows, q, width, k, a.block, count, a.block - offset, scores, after_keys);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t position = a.lengths[of.b] + of.t0 + r / heads;
      const int64_t start = most(most(first_seen(a, position), first) - at, 0), end = least(position + 1 - at, count);
      keep[r] = hide(scores + r * kChunk, padded, start, end, a.softcap);
    }
    weigh(scores, rows, padded, keep, seen.best, seen.sum);
    if (values) {
      rows > 3 ? mix_all<kWide>(rows, scores, keep, v, width, count, seen.out, more_keys)
               : mix_all<4>(rows, scores, keep, v, width, count, seen.out, more_keys);
    } else {
      mix_all_keys(rows, scores, keep, k, width, a.block, count, seen.out);
    }
  }
}

// One part of a row of one token.
template <class T> void attend_part(const Attention& a, int64_t item) {
  const int64_t group = group_of(a), width = a.width;
  const int64_t part = item % a.splits, head = item / a.splits % a.kv_heads, b = item / a.splits / a.kv_heads;
  if (!a.counts[b]) return;
  const int64_t end = a.lengths[b] + 1, first = most(first_seen(a, end - 1), part * a.span);
  const int64_t last = least(end, (part + 1) * a.span);
  if (part * a.span >= end) return;  // nor does `join` read it
  float* to = a.parts + item * group * (width + 2);
  for (int64_t g0 = 0; g0 < group; g0 += kTileRows) {
    const Queries of{b, head, 0, 1, g0, least(g0 + kTileRows, group)};
    const RunningSoftmax seen{to + g0 * width, to + group * width + g0, to + group * (width + 1) + g0};
    begin(a, of, seen, a.sinks && part == 0);
    if (first < last) visit<T>(a, of, first, last, seen);
  }
}

// One tile of tokens of a longer row.
template <class T> void attend_tile(const Attention& a, int64_t item) {
  const int64_t group = group_of(a), width = a.width, tiles = (a.tokens + a.tile - 1) / a.tile;
  const int64_t head = item % a.kv_heads, b = item / a.kv_heads / tiles;
  const int64_t t0 = (tiles - 1 - item / a.kv_heads % tiles) * a.tile;  // those that see most come first
  const int64_t t1 = least(t0 + a.tile, a.tokens), real = least(t1, a.counts[b]);
  alignas(64) float out[kTileRows * kMostWidth], best[kTileRows], sum[kTileRows];
  for (int64_t g0 = 0; g0 < group; g0 += kTileRows) {
    const Queries of{b, head, t0, most(real, t0), g0, least(g0 + kTileRows, group)};
    const RunningSoftmax seen{out, best, sum};
    begin(a, of, seen, a.sinks);
    if (real > t0) visit<T>(a, of, first_seen(a, a.lengths[b] + t0), a.lengths[b] + real, seen);
    for (int64_t t = t0; t < t1; t++)
      for (int64_t g = g0; g < of.g1; g++) {
        const int64_t r = (t - t0) * of.heads() + g - g0;
        float* to = a.out + ((b * a.tokens + t) * a.heads + head * group + g) * width;
        const float factor = t < real ? 1.0f / sum[r] : 0.0f;
        for (int64_t h = 0; h < width; h++) to[h] = t < real ? out[r * width + h] * factor : 0.0f;
      }
  }
}

template <class T> void attend_as(const Attention& a, int64_t item) {
  a.tokens == 1 ? attend_part<T>(a, item) : attend_tile<T>(a, item);
}

void attend(const Attention& a, int64_t item) {
  if (a.kind == Kind::kFloat32) return attend_as<float>(a, item);
  if (a.kind == Kind::kBFloat16) return attend_as<BFloat16>(a, item);
  if (a.kind == Kind::kFloat8) return attend_as<Float8>(a, item);
  attend_as<Float16>(a, item);
}

void join(const Attention& a, int64_t item) {
  const int64_t group = group_of(a), width = a.width, size = group * (width + 2);
  const int64_t head = item % a.kv_heads, b = item / a.kv_heads;
  const float* parts = a.parts + item * a.splits * size;
  const int64_t used = a.counts[b] ? a.lengths[b] / a.span + 1 : 0;
  for (int64_t g = 0; g < group; g++) {
    float* to = a.out + (b * a.heads + head * group + g) * width;
    for (int64_t h = 0; h < width; h++) to[h] = 0.0f;
    float best = -kInfinity, sum = 0.0f;
    for (int64_t s = 0; s < used; s++) {
      const float own = parts[s * size + group * width + g];
      best = larger(own, best);
    }
    if (best == -kInfinity) continue;
    for (int64_t s = 0; s < used; s++) {
      const float* part = parts + s * size;
      const float own = part[group * width + g];
      if (own == -kInfinity) continue;
      const float factor = exponential(splat(own - best))[0];
      sum += factor * part[group * (width + 1) + g];
      for (int64_t h = 0; h < width; h++) to[h] += factor * part[g * width + h];
    }
    const float factor = 1.0f / sum;
    for (int64_t h = 0; h < width; h++) to[h] *= factor;
  }
}

template <class T> void write_as(const Write& a, int64_t first, int64_t last) {
  const int64_t width = a.width, block = a.block;
  T *keys = static_cast<T*>(a.keys), *values = static_cast<T*>(a.values);
  for (int64_t x = first; x < last; x++) {
    const int64_t id = a.block_ids[x], offset = a.offsets[x];
    if (id < 0 || id >= a.blocks || offset < 0 || offset >= block) continue;
    const auto begin_of = [&](int64_t head) { return ((a.layer * a.blocks + id) * a.kv_heads + head) * width * block; };
    for (int64_t head = 0; head < a.kv_heads; head++)  // each number of a key lies in a line of its own
      for (int64_t h = 0; h < width; h++) __builtin_prefetch(keys + begin_of(head) + h * block + offset, 1);
    for (int64_t head = 0; head < a.kv_heads; head++) {
      const int64_t begin = begin_of(head);
      const float* k = a.k + (x * a.kv_heads + head) * width;
      for (int64_t h = 0; h < width; h++) narrow(k[h], keys + begin + h * block + offset);
      if (!values) continue;
      const float* v = a.v + (x * a.kv_heads + head) * width;
      for (int64_t h = 0; h < width; h++) narrow(v[h], values + begin + offset * width + h);
    }
  }
}

void write(const Write& a, int64_t first, int64_t last) {
  if (a.kind == Kind::kFloat32) return write_as<float>(a, first, last);
  if (a.kind == Kind::kBFloat16) return write_as<BFloat16>(a, first, last);
  if (a.kind == Kind::kFloat8) return write_as<Float8>(a, first, last);
  write_as<Float16>(a, first, last);
}

}  // namespace
