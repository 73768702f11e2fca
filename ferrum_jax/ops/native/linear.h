// Products. Every sum runs over the inputs in one order, whatever the tile and the rows, so that a row's result does not
// depend on the rows beside it; only a quantised weight has two orders, for calls of few rows and of more, and panels have
// one of their own.
#pragma once
#include <numeric>
#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace {

using ferrum::kBlock;
using ferrum::Kind;
using ferrum::Linear;

constexpr int64_t kAhead = 8;       // rows of the weight that passes fetch ahead together, at least
constexpr int64_t kMostPrepared = 64;  // rows of x that are prepared at a time
constexpr int64_t kNext = 1 << 13;  // bytes that are fetched ahead where the weight comes in the order of memory
constexpr int kStreamed = 8;        // rows of x that a row of the weight meets at once, at most
constexpr int64_t kNear = 5 << 10;  // numbers of x that the nearest cache holds beside what it fetches
constexpr int64_t kTogether = 12;   // rows of the weight that meet a part of x before the next part, if they are long
constexpr int64_t kFewRows = kManyRegisters ? 32 : ferrum::kMany;  // rows of x up to which `dense_few` reads the weight once
constexpr int64_t kSeveral = 16;  // rows of x up to which 32 registers gain by parts of a weight that are far apart
constexpr int64_t kPaired = 8;  // rows of x up to which two of them meet four rows of the weight, not four meet three
template <class W>
constexpr int64_t kUnaided = sizeof(W) == 4 || kManyRegisters ? 4 : 2;  // rows of x up to which nothing need be fetched
constexpr int64_t kMostPart = 1 << 10;  // inputs whose products are summed lane by lane
constexpr int64_t kChain = 128;  // inputs summed in a register before y, as the lanes of a panel are outputs
constexpr int64_t kStrip = 1 << 12;  // numbers of the weight that stay in the nearest cache while all rows of x meet them

template <class T> inline void widen_numbers(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = widen(from[i]);
}
template <class W> inline void fetch(const W* p) { __builtin_prefetch(p, 0, 3); }

template <class W> inline void fetch_all(const W* p, int64_t count) {
  for (int64_t i = 0; i < count; i += int64_t(64 / sizeof(W))) fetch(p + i);
}

constexpr auto kNothing = [](int64_t, auto) {};  // fetches nothing

// Some inputs of R rows of the weight, `stride` numbers apart.
template <class W> struct Strip {
  const W* numbers;
  int64_t stride, count;
  bool is_first;      // no inputs come before these
  int64_t apart = 1;  // outputs from one of the rows to the next
};

// Adds the products of R rows of the weight with B rows of x, from input `at` on. At each line of the rows, `later(k, R)`
// fetches something else of the weight.
template <int R, int B, class W, class Later>
inline void add_products(const float* const* x, int64_t at, const Strip<W>& strip, Vector (*sums)[B], const Later& later) {
  const W* w[R];
  const float* u[B];
  for (int r = 0; r < R; r++) w[r] = strip.numbers + r * strip.stride;
  for (int b = 0; b < B; b++) u[b] = x[b] + at;
  int64_t k = 0;
  for (; k + kLanes <= strip.count; k += kLanes) {
    Vector row[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) row[r] = load(w[r] + k);
    if (k % int64_t(64 / sizeof(W)) == 0) later(k, Size<R>());
#pragma GCC unroll 16
    for (int b = 0; b < B; b++) {
      const Vector v = load(u[b] + k);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r][b] += row[r] * v;
    }
  }
  if (const int64_t rest = strip.count - k)
    for (int r = 0; r < R; r++) {
      const Vector row = load_first(w[r] + k, rest);
      for (int b = 0; b < B; b++) sums[r][b] += row * load_first(u[b] + k, rest);
    }
}

// Writes the sums of R by B vectors' lanes, or adds them to what is there.
template <int R, int B> inline void put_totals(const Vector (*sums)[B], int64_t n, int64_t apart, float* const* y, bool adds) {
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) {
      float* to = y[b] + n + r * apart;
      *to = adds ? *to + total(sums[r][b]) : total(sums[r][b]);
    }
}
#if defined(__AVX512F__)
inline __m512 halves_added(Vector a, Vector b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44), _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xee));
}
inline __m512 quarters_added(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
inline __m512 eighths_added(__m512 a, __m512 b) {
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}
inline __m512 neighbours_added(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
// The same in the same order, many at a time.
template <> inline void put_totals<6, 4>(const Vector (*sums)[4], int64_t n, int64_t apart, float* const* y, bool adds) {
  __m512 rows[6];
#pragma GCC unroll 6
  for (int r = 0; r < 6; r++)
    rows[r] = quarters_added(halves_added(sums[r][0], sums[r][1]), halves_added(sums[r][2], sums[r][3]));
  const __m512 last = eighths_added(rows[4], rows[5]);
  const __m512 low = neighbours_added(eighths_added(rows[0], rows[1]), eighths_added(rows[2], rows[3]));
  const __m512 high = neighbours_added(last, last);
  alignas(64) float four[16], two[16];
  _mm512_store_ps(four, low);
  _mm512_store_ps(two, high);
  for (int b = 0; b < 4; b++) {
    float* to = y[b] + n;
    if (apart > 1) {
      for (int r = 0; r < 6; r++) {
        const float found = r < 4 ? four[4 * b + r] : two[4 * b + r - 4];
        to[r * apart] = adds ? to[r * apart] + found : found;
      }
      continue;
    }
    __m256 six = _mm256_set_m128(_mm_load_ps(two + 4 * b), _mm_load_ps(four + 4 * b));
    if (adds) six = _mm256_add_ps(six, _mm256_maskz_loadu_ps(63, to));
    _mm256_mask_storeu_ps(to, 63, six);
  }
}
#endif

template <int R, int B, class W, class Later>
inline void multiply(const float* const* x, int64_t at, const Strip<W>& strip, int64_t n, float* const* y, const Later& later) {
  Vector sums[R][B];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int b = 0; b < B; b++) sums[r][b] = Vector{};
  add_products<R, B>(x, at, strip, sums, later);
  put_totals<R, B>(sums, n, strip.apart, y, !strip.is_first);
}

// Inputs whose products are summed in one vector's lanes before the lanes are added up: about as many in each part, a
// multiple of `step`, which is at most kMostPart.
inline int64_t part_of(int64_t inputs, int64_t step) {
  const int64_t parts = (inputs + kMostPart - 1) / kMostPart;
  return least((inputs + parts * step - 1) / (parts * step) * step, kMostPart / step * step);
}

// Outputs first to last of a few rows of x. The range is cut into R equal parts, and one row of each part meets P rows of x
// at a time: the weight is read in R sequences, which the processor fetches ahead by itself, faster than one sequence and
// faster than with instructions that fetch. With more rows of x, computing takes longer than reading, and the passes over x
// share the fetching of the next rows: with 32 registers only if a row is one part, as they read longer ones well enough. If
// this is inlined, the compiler keeps the sums in memory.
template <int R, int P, class W>
[[gnu::noinline]] void stream_apart(const Linear& a, const W* weight, int64_t first, int64_t last) {
  const int64_t part = part_of(a.inputs, kLanes), apart = (last - first) / R;
  const bool reads_long_parts = kManyRegisters && part < a.inputs;
  const int fetched = a.rows > kUnaided<W> && !reads_long_parts ? R : 0, step = int((a.rows + P - 1) / P);
  for (int64_t n = first; n < first + apart; n++)
    for (int64_t at = 0; at < a.inputs; at += part) {
      const int64_t count = least(part, a.inputs - at);
      const Strip<W> strip{weight + n * a.inputs + at, apart * a.inputs, count, at == 0, apart};
      const auto meet = [&](auto some, int64_t row) {
        const auto later = [next = strip.numbers + count, stride = strip.stride, share = int(row / P), fetched, step](
                               int64_t k, auto) { for (int r = share; r < fetched; r += step) fetch(next + r * stride + k); };
        multiply<R, some.value>(a.x + row, at, strip, n, a.y + row, later);
      };
      int64_t row = 0;
      for (; row + P <= a.rows; row += P) meet(Size<P>(), row);
      if constexpr (P > 1)
        if (row < a.rows) by_size<P - 1>(a.rows - row, [&](auto rest) { meet(rest, row); });
    }
  if constexpr (R > 1)
    if (first + R * apart < last) stream_apart<1, P>(a, weight, first + R * apart, last);
}

// Outputs first to last of the first B rows of x, R at a time, of a weight that comes from memory: what lies `ahead` numbers
// further is fetched. `together` rows of the weight meet one part of x before the next part.
template <int R, int B, class W>
inline void stream(const Linear& a, const W* weight, int64_t first, int64_t last, int64_t together, int64_t ahead) {
  const int64_t part = part_of(a.inputs, kLanes);
  for (int64_t begin = first; begin < last; begin += together) {
    const int64_t end = least(begin + together, last);
    const W* next = weight + begin * a.inputs + ahead;
    for (int64_t at = 0; at < a.inputs; at += part)
      for (int64_t n = begin, made; n < end; n += made) {
        made = n + R <= end ? R : 1;
        const Strip<W> strip{weight + n * a.inputs + at, a.inputs, least(part, a.inputs - at), at == 0};
        const auto later = [next](int64_t k, auto rows) {
          constexpr int64_t line = 64 / sizeof(W);
          for (int r = 0; r < rows.value; r++) fetch(next + k * rows.value + r * line);
        };
        made == R ? multiply<R, B>(a.x, at, strip, n, a.y, later) : multiply<1, B>(a.x, at, strip, n, a.y, later);
        next += made * strip.count;
      }
  }
}

// Outputs first to last of B rows of x, R at a time. Of the rows `ahead` numbers later every step-th from `share` on is
// fetched, if anything is.
template <int R, int B, bool kFetches, class W>
inline void multiply_rows(const Linear& a, const W* weight, int64_t row, int64_t first, int64_t last, int64_t ahead = 0,
                          int share = 0, int step = 1) {
  const int64_t part = part_of(a.inputs, kLanes);
  for (int64_t n = first, made; n < last; n += made) {
    made = n + R <= last ? R : 1;
    for (int64_t at = 0; at < a.inputs; at += part) {
      const Strip<W> strip{weight + n * a.inputs + at, a.inputs, least(part, a.inputs - at), at == 0};
      const auto later = [=, &strip](int64_t k, auto rows) {
        for (int r = share; kFetches && r < rows.value; r += step) fetch(strip.numbers + r * strip.stride + ahead + k);
      };
      made == R ? multiply<R, B>(a.x + row, at, strip, n, a.y + row, later)
                : multiply<1, B>(a.x + row, at, strip, n, a.y + row, later);
    }
  }
}

// R rows of the weight in float32 with B rows of x. Within a larger function the compiler keeps sums and addresses in memory.
template <int R, int B>
[[gnu::noinline]] void meet_strip(const float* const* x, const Strip<float>& strip, int64_t n, float* const* y) {
  multiply<R, B>(x, 0, strip, n, y, kNothing);
}

// Many rows of x: a block of them stays in the second cache while strips of R rows of the weight pass, and a strip in the
// first while the block does (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"). Rows that
// are too long for that go in parts of `part` inputs. `near(n, rows, from, count)` is a part of a strip in float32, of
// numbers that have `bits` in the weight; what the next one is made of is fetched meanwhile.
template <int R, class Near>
void many_rows(const Linear& a, int64_t bits, int64_t part, const Near& near, int64_t first, int64_t last) {
  alignas(64) float packed[kBlock * kMostPart];  // a part of a block
  const bool packs = part < a.inputs;
  const int64_t stride = a.inputs * bits / 8;
  for (int64_t begin = 0; begin < a.rows; begin += kBlock)
    for (int64_t from = 0; from < a.inputs; from += part) {
      const int64_t rows = least(kBlock, a.rows - begin), count = least(part, a.inputs - from);
      const float* x[kBlock];
      for (int64_t row = 0; row < rows; row++) {
        x[row] = packs ? packed + row * part : a.x[begin + row];
        if (packs) std::memcpy(packed + row * part, a.x[begin + row] + from, size_t(count) * sizeof(float));
      }
      const int64_t lines = R * (count * bits / 512);
      for (int64_t n = first, made; n < last; n += made) {
        made = n + R <= last ? R : 1;
        const Strip<float> strip = near(n, made, from, count);
        const char* next = static_cast<const char*>(a.weight) + (n + R) * stride + from * bits / 8;
        float* const* y = a.y + begin;
        int64_t row = 0, line = 0;
        const auto fetch_to = [&](int64_t end) {
          for (; line < end; line++) fetch(next + line % R * stride + line / R * 64);
        };
        for (; made == R && row + 4 <= rows; row += 4) {
          fetch_to(lines * (row + 4) / rows);
          meet_strip<R, 4>(x + row, strip, n, y + row);
        }
        if (made == R) {
          fetch_to(lines);
          if (row < rows)
            by_size<3>(rows - row, [&](auto rest) { meet_strip<R, rest.value>(x + row, strip, n, y + row); });
          row = rows;
        }
        for (; row < rows; row++) meet_strip<1, 1>(x + row, strip, n, y + row);
      }
    }
}

// A panel is kPanel rows of the weight as columns, [K, kPanel], of which kTransposed are transposed at a time.
#if defined(__AVX512F__)
constexpr bool kHasPanels = true;
constexpr int64_t kPanel = 32, kTransposed = 16;
// Writes 16 rows of 16 numbers as columns.
inline void transpose(const float* from, int64_t stride, float* to) {
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  const auto low = [](__m512 c, __m512 d) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(c), _mm512_castps_pd(d)));
  };
  const auto high = [](__m512 c, __m512 d) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(c), _mm512_castps_pd(d)));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = low(b[i], b[i + 2]);
    a[i + 1] = high(b[i], b[i + 2]);
    a[i + 2] = low(b[i + 1], b[i + 3]);
    a[i + 3] = high(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512 c = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), d = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
    const __m512 e = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd), f = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    _mm512_store_ps(to + i * kPanel, _mm512_shuffle_f32x4(c, d, 0x88));
    _mm512_store_ps(to + (i + 4) * kPanel, _mm512_shuffle_f32x4(e, f, 0x88));
    _mm512_store_ps(to + (i + 8) * kPanel, _mm512_shuffle_f32x4(c, d, 0xdd));
    _mm512_store_ps(to + (i + 12) * kPanel, _mm512_shuffle_f32x4(e, f, 0xdd));
  }
}
#elif defined(__AVX2__)
constexpr bool kHasPanels = true;
constexpr int64_t kPanel = 16, kTransposed = 8;
// Writes 8 rows of 8 numbers as columns.
inline void transpose(const float* from, int64_t stride, float* to) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(from + i * stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * kPanel, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * kPanel, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
#else
constexpr bool kHasPanels = false;
constexpr int64_t kPanel = 16, kTransposed = 8;
inline void transpose(const float*, int64_t, float*) {}
#endif

// Brings up to kTransposed rows of a strip into columns of a panel; rows that are not there are zeros.
inline void pack(const Strip<float>& strip, int64_t rows, float* panel) {
  int64_t k = 0;
  if (rows == kTransposed)
    for (; k + kTransposed <= strip.count; k += kTransposed) transpose(strip.numbers + k, strip.stride, panel + k * kPanel);
  for (; k < strip.count; k++)
    for (int64_t r = 0; r < kTransposed; r++) panel[k * kPanel + r] = r < rows ? strip.numbers[r * strip.stride + k] : 0.0f;
}

// Writes the products of R rows of x with a panel, or adds them to those of the inputs before. Within a larger function
// the compiler keeps the sums in memory.
template <int R>
[[gnu::noinline]] void meet_panel(const float* const* x, int64_t from, const float* panel, int64_t count, float* const* y) {
  constexpr int V = int(kPanel) / kLanes;
  Vector sums[R][V];
  const float* own[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    own[r] = x[r] + from;
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) sums[r][j] = Vector{};
  }
  for (int64_t k = 0; k < count; k++) {
    Vector row[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) row[j] = load(panel + k * kPanel + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vector number = splat(own[r][k]);
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) sums[r][j] += row[j] * number;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) store(y[r] + j * kLanes, from ? load(y[r] + j * kLanes) + sums[r][j] : sums[r][j]);
}

// Many rows of x by panels: a panel of the weight, turned so that its outputs are lanes, stays in the nearest caches while
// all rows pass. No lanes are added up. `near` is as many_rows', for up to kTransposed rows.
template <class Near> void by_panels(const Linear& a, int64_t part, const Near& near, int64_t first, int64_t last) {
  alignas(64) float panel[kPanel * kMostPart];
  for (int64_t n = first; n < last; n += kPanel) {
    const int64_t some = least(kPanel, last - n);
    for (int64_t from = 0; from < a.inputs; from += part) {
      const int64_t count = least(part, a.inputs - from);
      for (int64_t at = 0; at < kPanel; at += kTransposed) {
        const int64_t rows = most(0, least(kTransposed, some - at));
        pack(rows ? near(n + at, rows, from, count) : Strip<float>{nullptr, 0, count, false}, rows, panel + at);
      }
      by_rows(a.rows, [&](auto size, int64_t row) {
        float ends[6][kPanel] = {}, *to[6];
        for (int r = 0; r < size.value; r++) {
          to[r] = some == kPanel ? a.y[row + r] + n : ends[r];
          if (some < kPanel && from) std::memcpy(to[r], a.y[row + r] + n, size_t(some) * sizeof(float));
        }
        for (int64_t k = 0; k < count; k += kChain)
          meet_panel<size.value>(a.x + row, from + k, panel + k * kPanel, least(kChain, count - k), to);
        for (int r = 0; some < kPanel && r < size.value; r++)
          std::memcpy(a.y[row + r] + n, to[r], size_t(some) * sizeof(float));
      });
    }
  }
}

// A few rows of x: by parts of the weight that are far apart, or in the order of memory on most processors with 32 registers.
template <class W> void dense_few(const Linear& a, const W* weight, int64_t first, int64_t last) {
  if constexpr (!kManyRegisters) {
    if constexpr (sizeof(W) == 4)
      if (a.rows <= kPaired) return stream_apart<4, 2>(a, weight, first, last);
    stream_apart<3, 4>(a, weight, first, last);  // needs fewer loads and conversions of the weight for each product
  } else {
    constexpr int R = 6;
    if (a.reads_apart && a.rows <= kSeveral) return stream_apart<R, 4>(a, weight, first, last);
    const int64_t next = kNext / int64_t(sizeof(W));
    if (a.rows == 1 || (a.rows <= kStreamed && a.rows * a.inputs <= kNear))
      return by_size<kStreamed>(a.rows, [&](auto size) { stream<1, size.value>(a, weight, first, last, 1, next); });
    if (a.rows <= 4)
      return by_size<4>(a.rows, [&](auto size) {
        stream<2, size.value>(a, weight, first, last, kTogether, kTogether * a.inputs);
      });
    // Strips of the weight meet one row of x as they come from memory, and then the others, four at a time. Passes of fours
    // alone fetch the next strip together, each a share of it.
    const int64_t strip = most(kStrip / a.inputs / R * R, R), ahead = most(strip, kAhead) * a.inputs;
    const int passes = a.rows % 4 || a.rows <= kStreamed ? 0 : int(a.rows / 4);
    for (int64_t n = first; n < last; n += strip) {
      const int64_t end = least(n + strip, last);
      for (int share = 0; share < passes; share++)
        multiply_rows<R, 4, true>(a, weight, 4 * share, n, end, ahead, share, passes);
      if (passes) continue;
      stream<1, 1>(a, weight, n, end, 1, next);
      int64_t row = 1;
      for (; row + 4 <= a.rows; row += 4) multiply_rows<R, 4, false>(a, weight, row, n, end);
      if (row < a.rows)
        by_size<3>(a.rows - row, [&](auto rest) { multiply_rows<R, rest.value, false>(a, weight, row, n, end); });
    }
  }
}

template <class W> void dense(const Linear& a, const W* weight, int64_t first, int64_t last) {
  constexpr int R = kManyRegisters ? 6 : 3;
  if (a.rows > kFewRows || a.by_panels) {
    alignas(64) float wide[kTransposed * kMostPart];
    const auto near = [&](int64_t n, int64_t rows, int64_t from, int64_t count) {
      const W* numbers = weight + n * a.inputs + from;
      if constexpr (sizeof(W) == 4) return Strip<float>{numbers, a.inputs, count, from == 0};
      for (int64_t r = 0; r < rows; r++) widen_numbers(numbers + r * a.inputs, count, wide + r * kMostPart);
      return Strip<float>{wide, kMostPart, count, from == 0};
    };
    const int64_t part = part_of(a.inputs, kLanes);
    if constexpr (kHasPanels)
      if (a.by_panels) return by_panels(a, part, near, first, last);
    return many_rows<R>(a, 8 * sizeof(W), part, near, first, last);
  }
  dense_few(a, weight, first, last);
}

// A quantised weight, by the types of its values, scales and offsets, and by the size of its groups where the compiler
// is to know it (0: it does not). Scales and offsets of int8 count the units of their runs. Unsigned values without offsets
// have the offset -scale * half their range (8, 16, 32).
template <class V, class S, class O, int kSize> struct Quantised {
  static constexpr int kUpper = Upper<V>::kBits;
  static constexpr bool kIsUnsigned = std::is_same_v<V, Nibbles> || kUpper > 0;
  static constexpr bool kIsPacked = kIsUnsigned || std::is_same_v<V, Float4>;
  using UpperWord = typename Upper<V>::Word;
  const V* values;
  const UpperWord* upper;
  const S* scales;
  const O* offsets;
  const Float16 *scale_units, *offset_units;
  int64_t inputs, groups, any_size, run;

  explicit Quantised(const Linear& a)
      : values(static_cast<const V*>(a.weight)), upper(static_cast<const UpperWord*>(a.high)),
        scales(static_cast<const S*>(a.scales)), offsets(static_cast<const O*>(a.offsets)),
        scale_units(static_cast<const Float16*>(a.scale_units)),
        offset_units(static_cast<const Float16*>(a.offset_units)), inputs(a.inputs), groups(a.groups),
        any_size(a.inputs / a.groups), run(a.run) {}
  int64_t size() const { return kSize ? kSize : any_size; }
  const V* at(int64_t n, int64_t g) const { return values + (n * inputs + g * size()) / (kIsPacked ? 2 : 1); }
  const UpperWord* upper_at(int64_t n, int64_t g) const { return kUpper ? upper + (n * inputs + g * size()) / 8 : nullptr; }
  bool has_offsets() const { return offsets || kIsUnsigned; }
  // The scales of `count` groups from group g of row n on, in float32, and their offsets if there are any.
  void widen_scales(int64_t n, int64_t g, int64_t count, float* to, float* its_offsets) const {
    widen_some(scales, scale_units, n * groups + g, count, to);
    if (offsets) widen_some(offsets, offset_units, n * groups + g, count, its_offsets);
    else if (kIsUnsigned) for (int64_t i = 0; i < count; i++) its_offsets[i] = -float(8 << kUpper) * to[i];
  }
  void fetch_scales(int64_t n, int64_t rows) const {
    fetch_all(scales + n * groups, rows * groups);
    if (offsets) fetch_all(offsets + n * groups, rows * groups);
    if (scale_units) fetch_all(scale_units + (n * groups >> run), rows * groups >> run);
    if (offset_units) fetch_all(offset_units + (n * groups >> run), rows * groups >> run);
  }

 private:
  template <class T> void widen_some(const T* from, const Float16* units, int64_t first, int64_t count, float* to) const {
    if constexpr (!std::is_same_v<T, int8_t>) return widen_numbers(from + first, count, to);
    for (int64_t at = 0, end; at < count;) {  // what a vector of units counts
      const int64_t skipped = (first + at) & ((1 << run) - 1), unit = (first + at) >> run;
      end = least(count, at + (kLanes << run) - skipped);
      const int64_t used = ((first + end - 1) >> run) - unit + 1;
      const Vector numbers = used < kLanes ? load_first(units + unit, used) : load(units + unit);
      Integers lanes = lanes_from(skipped);
      for (; at + kLanes <= end; at += kLanes, lanes += kLanes)
        store(to + at, load(from + first + at) * lanes_of(numbers, lanes >> int32_t(run)));
      for (; at < end; at++) to[at] = widen(from[first + at]) * widen(units[(first + at) >> run]);
    }
  }
};

inline float dot(const float* a, const float* b, int64_t count) {
  Vector sum = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum += load(a + i) * load(b + i);
  if (i < count) sum += load_first(a + i, count - i) * load_first(b + i, count - i);
  return total(sum);
}

// Widens a part of one row, of whole groups if it is packed: value * scale + offset, `scales` and `offsets` being those of
// its groups. Whole groups have a loop of their own, whose length the compiler knows.
template <class V, class S, class O, int kSize>
void widen_bytes(const Quantised<V, S, O, kSize>& w, int64_t n, int64_t from, int64_t count, const float* scales,
                 const float* offsets, float* to) {
  const int64_t begin = from / w.size();
  const auto widen_some = [&](int64_t g, int64_t inside, int64_t some) {
    const float scale = scales[g - begin], offset = w.has_offsets() ? offsets[g - begin] : 0.0f;
    const V* p = w.at(n, g) + inside;
    int64_t k = 0;
    for (; k + kLanes <= some; k += kLanes) store(to + k, load(p + k) * scale + offset);
    for (; k < some; k++) to[k] = widen(p[k]) * scale + offset;
    to += some;
  };
  const int64_t last = from + count;
  int64_t g = begin;
  if (const int64_t inside = from % w.size()) widen_some(g++, inside, least(w.size() - inside, count));
  for (; (g + 1) * w.size() <= last; g++) widen_some(g, 0, w.size());
  if (g * w.size() < last) widen_some(g, 0, last - g * w.size());
}
template <class V, class S, class O, int kSize>
void widen_packed(const Quantised<V, S, O, kSize>& w, int64_t n, int64_t from, int64_t count, const float* scales,
                  const float* offsets, float* to) {
  const int64_t half = w.size() / 2, begin = from / w.size();
  for (int64_t g = begin; g < (from + count) / w.size(); g++, to += w.size()) {
    const float scale = scales[g - begin], offset = w.has_offsets() ? offsets[g - begin] : 0.0f;
    const V* p = w.at(n, g);
    const auto* upper = w.upper_at(n, g);
    int64_t k = 0;
#if defined(__AVX512F__)
    if (w.size() == kLanes) {
      store(to, load_group16(p, upper) * scale + offset);
      continue;
    }
#endif
    for (; k + kLanes <= half; k += kLanes) {
      Vector low, high;
      load_numbers(p + k, w.kUpper ? upper + k / 4 : upper, &low, &high);
      store(to + k, low * scale + offset);
      store(to + half + k, high * scale + offset);
    }
    for (; k < half; k++) {
      float low, high;
      if constexpr (Upper<V>::kBits > 0) {
        const int own = upper[k / 4] >> 2 * w.kUpper * (k % 4), mask = (1 << w.kUpper) - 1;
        low = float((p[k].bits & 15) | (own & mask) << 4);
        high = float(p[k].bits >> 4 | ((own >> w.kUpper) & mask) << 4);
      } else {
        low = low_of(p[k]), high = high_of(p[k]);
      }
      to[k] = low * scale + offset;
      to[half + k] = high * scale + offset;
    }
  }
}

template <class V, class S, class O, int kSize>
void widen_row(const Quantised<V, S, O, kSize>& w, int64_t n, int64_t from, int64_t count, float* to) {
  alignas(64) float scales[kMostPart], offsets[kMostPart];
  for (int64_t end = from + count, some; from < end; from += some, to += some) {  // of some groups
    const int64_t begin = from / w.size();
    some = least(end, (begin + kMostPart) * w.size()) - from;
    w.widen_scales(n, begin, (from + some + w.size() - 1) / w.size() - begin, scales, offsets);
    if constexpr (Quantised<V, S, O, kSize>::kIsPacked) widen_packed(w, n, from, some, scales, offsets, to);
    else widen_bytes(w, n, from, some, scales, offsets, to);
  }
}

// Few rows of x with a quantised weight: values meet x before their group's scale does, and offsets its sums.
//
// Bytes meet x as it is. Nibbles are taken from 32-bit words, the j-th of a word with a mask instead of a shift, so that it
// counts 16^j fold but for the last, and the upper bits that it may have are put before it; x is in the order in which they
// then come, each number divided by as much. Floats of four bits are looked up, as they are. A step is a vector of words,
// which has some groups or a part of one.
constexpr int64_t kStepBytes = 4 * kLanes, kStepNumbers = 8 * kLanes;
constexpr int64_t kLeastGroup = 8;
constexpr int64_t kTile = 12;  // rows of the weight whose scales are widened together

struct Few {
  const float* const* x;  // of each row, prepared
  const float* sums;      // [rows, groups] of x as it was
  float* const* y;
  const float* scales;    // [kTile, groups]
  const float* offsets;   // the same
};

template <class V, class S, class O, int kSize> bool can_prepare(const Quantised<V, S, O, kSize>& w) {
  const int64_t bytes = w.size() / 2;
  if (!w.kIsPacked) return w.size() % kLanes == 0 && w.size() >= kLeastGroup;
  return bytes % kStepBytes == 0 || (kStepBytes % bytes == 0 && w.size() % 16 == 0);
}
// Numbers of a row of x in whole steps.
template <class V, class S, class O, int kSize> int64_t prepared_inputs(const Quantised<V, S, O, kSize>& w) {
  return w.kIsPacked ? (w.inputs + kStepNumbers - 1) / kStepNumbers * kStepNumbers : 0;
}
template <class V, class S, class O, int kSize>
void prepare(const Quantised<V, S, O, kSize>& w, const float* x, float* prepared, float* sums) {
  for (int64_t g = 0; w.has_offsets() && g < w.groups; g++) {
    Vector sum = {};
    for (int64_t k = g * w.size(); k < (g + 1) * w.size(); k += kLanes) sum += load(x + k);
    sums[g] = total(sum);
  }
  if (!w.kIsPacked) return;
  const int64_t half = w.size() / 2, words = w.inputs / 8;
  for (int64_t i = w.inputs / kStepNumbers * kStepNumbers; i < prepared_inputs(w); i++) prepared[i] = 0.0f;
  float factors[2][4];  // of the numbers in the low bits of a word's bytes, and in the high ones
  for (int j = 0; j < 8; j++) factors[j % 2][j / 2] = w.kIsUnsigned && j < 7 ? 1.0f / float(1 << 4 * j) : 1.0f;
  const float* own = x;  // the numbers of a word, and of those in the high bits half a group later
  for (int64_t word = 0, inside = 0; word < words; word += 4) {
    const float* low[4];
    const int64_t count = least(4, words - word);
    for (int i = 0; i < 4; i++) {
      low[i] = own;
      if (i >= count) continue;
      own += 4, inside += 4;
      if (inside == half) own += half, inside = 0;
    }
    float* to = prepared + word / kLanes * kStepNumbers + word % kLanes;
    for (int side = 0; side < 2; side++, to += kLanes) {
      if (count == 4) {
        turn_four(low, to, 2 * kLanes, factors[side]);
      } else {
        for (int i = 0; i < count; i++)
          for (int byte = 0; byte < 4; byte++) to[2 * byte * kLanes + i] = low[i][byte] * factors[side][byte];
      }
      for (const float*& one : low) one += half;
    }
  }
}

// Adds the products of R rows of the weight from `p` on with B rows of x, each group's times its scale.
template <int R, int B, class V, class S, class O, int kSize>
inline void multiply_bytes(const Quantised<V, S, O, kSize>& w, const V* p, const float* const* x, const float* scales,
                           Vector (*sums)[B]) {
  const float* own[B];
  for (int b = 0; b < B; b++) own[b] = x[b];
  for (int64_t g = 0; g < w.groups; g++, p += w.size()) {
    for (int r = 0; r < R; r++) fetch(p + r * w.inputs + kNext);
    Vector parts[R][B];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) parts[r][b] = Vector{};
    for (int64_t k = 0; k < w.size(); k += kLanes) {
      Vector values[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) values[r] = load(p + r * w.inputs + k);
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) {
        const Vector v = load(own[b] + k);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) parts[r][b] += values[r] * v;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) sums[r][b] += parts[r][b] * scales[r * w.groups + g];
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) own[b] += w.size();
  }
}
template <int R, int B, class V, class S, class O, int kSize>
inline void multiply_packed(const Quantised<V, S, O, kSize>& w, int64_t n, const float* const* x, const float* scales,
                            Vector (*sums)[B]) {
  const V* p = w.at(n, 0);
  const auto* upper = w.upper_at(n, 0);
  const int64_t stride = w.inputs / 2, bytes = w.size() / 2;
  const float* own[B];
  for (int b = 0; b < B; b++) own[b] = x[b];
  for (int64_t at = 0; at < stride; at += kStepBytes) {
    const int64_t here = least(stride - at, kStepBytes);
    Integers words[R], uppers[R];
    for (int r = 0; r < R; r++) fetch(p + at + r * stride + kNext);
    for (int r = 0; w.kUpper && r < R; r++) fetch(upper + (at + r * stride + kNext) / 4);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      words[r] = here < kStepBytes ? load_words(p + at + r * stride, here) : load_words(p + at + r * stride);
      if constexpr (Upper<V>::kBits > 0) {
        const auto* own = upper + (at + r * stride) / 4;
        uppers[r] = here < kStepBytes ? load_integers(own, here / 4) : load_integers(own);
      }
    }
    Vector parts[R][B];  // begins with zeros: of a sum of two products a compiler may round either first
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) parts[r][b] = Vector{};
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      Vector v[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) v[b] = load(own[b] + j * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const Vector values = number_of(words[r], uppers[r], j, V());
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) parts[r][b] += values * v[b];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const float* from = scales + r * w.groups + at / bytes;
      const Vector scale = bytes < kStepBytes ? spread(from, here / bytes, bytes / 4) : splat(*from);
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) sums[r][b] += parts[r][b] * scale;
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) own[b] += kStepNumbers;
  }
}

template <int R, int B, class V, class S, class O, int kSize>
inline void multiply_groups(const Quantised<V, S, O, kSize>& w, int64_t n, const float* const* x, const float* scales,
                            Vector (*sums)[B]) {
  if constexpr (Quantised<V, S, O, kSize>::kIsPacked) multiply_packed<R, B>(w, n, x, scales, sums);
  else multiply_bytes<R, B>(w, w.at(n, 0), x, scales, sums);
}

// Rows of a quantised weight that meet B rows of x together.
template <bool kIsPacked, int kUpper, int B> constexpr int rows_beside() {
  if (kUpper && B > 2) return 2;  // what takes apart the numbers of a word is done once for all rows of x
  if (kIsPacked && (B == 1 || kManyRegisters)) return 4;
  return B == 1 ? 1 : B == 2 ? 3 : kManyRegisters ? 2 : 1;
}

// Outputs n to n + count of B rows; at most a tile. Within the caller the compiler keeps sums in memory.
template <int B, class V, class S, class O, int kSize>
[[gnu::noinline]] void few_outputs(const Quantised<V, S, O, kSize>& w, const Few& a, int64_t row, int64_t n, int64_t count) {
  constexpr int R = rows_beside<Quantised<V, S, O, kSize>::kIsPacked, Upper<V>::kBits, B>();
  for (int64_t i = 0; i < count;) {
    Vector sums[R][B];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) sums[r][b] = Vector{};
    const float* scales = a.scales + i * w.groups;
    const int64_t made = count - i < R ? 1 : R;
    if (made == R) {
      multiply_groups<R, B>(w, n + i, a.x + row, scales, sums);
    } else {
      multiply_groups<1, B>(w, n + i, a.x + row, scales, sums);
    }
    for (int64_t r = 0; r < made; r++, i++)
      for (int b = 0; b < B; b++) {
        const float rest = w.has_offsets() ? dot(a.offsets + i * w.groups, a.sums + (row + b) * w.groups, w.groups) : 0.0f;
        a.y[row + b][n + i] = total(sums[r][b]) + rest;
      }
  }
}

// Rows of x for which there is room.
template <class V, class S, class O, int kSize> int64_t rows_of_room(const Quantised<V, S, O, kSize>& w) {
  return least(ferrum::kRoom / (prepared_inputs(w) + w.groups), kMostPrepared);
}
template <class V, class S, class O, int kSize>
void prepare_rows(const Quantised<V, S, O, kSize>& w, const float* const* x, int64_t rows, float* room) {
  const int64_t numbers = prepared_inputs(w);
  for (int64_t row = 0; row < rows; row++) prepare(w, x[row], room + row * numbers, room + rows * numbers + row * w.groups);
}

template <class V, class S, class O, int kSize>
void few_rows(const Quantised<V, S, O, kSize>& w, const Linear& a, int64_t first, int64_t last) {
  alignas(64) float room[ferrum::kRoom];  // for rows of x
  alignas(64) float scales[kTile * ferrum::kMostInputs / kLeastGroup], offsets[kTile * ferrum::kMostInputs / kLeastGroup];
  const int64_t numbers = prepared_inputs(w), most_rows = rows_of_room(w);
  constexpr bool kInPairs = Quantised<V, S, O, kSize>::kIsPacked && !Upper<V>::kBits && kManyRegisters;
  constexpr int kTogether = kInPairs ? 2 : 4;  // of four rows and more
  const float* x[kMostPrepared];
  for (int64_t begin = 0; begin < a.rows; begin += most_rows) {
    const int64_t rows = least(most_rows, a.rows - begin);
    if (!a.prepared) prepare_rows(w, a.x + begin, rows, room);
    const float* own = a.prepared ? a.prepared : room;
    for (int64_t row = 0; row < rows; row++) x[row] = w.kIsPacked ? own + row * numbers : a.x[begin + row];
    const Few few{x, own + rows * numbers, a.y + begin, scales, offsets};
    for (int64_t n = first; n < last; n += kTile) {
      const int64_t count = least(kTile, last - n);
      w.fetch_scales(n + kTile, kTile);
      w.widen_scales(n, 0, count * w.groups, scales, offsets);
      int64_t row = 0;
      for (; row + 4 <= rows; row += kTogether) few_outputs<kTogether>(w, few, row, n, count);
      if (row < rows) by_size<3>(rows - row, [&](auto rest) { few_outputs<rest.value>(w, few, row, n, count); });
    }
  }
}

template <class V, class S, class O, int kSize> void quantised(const Linear& a, int64_t first, int64_t last) {
  const Quantised<V, S, O, kSize> w(a);
  if (a.is_few && can_prepare(w)) return few_rows(w, a, first, last);
  constexpr int R = kManyRegisters ? 6 : 3;
  alignas(64) float wide[R * ferrum::kMostInputs];  // of R rows, or of a part of kTransposed
  const int64_t step = w.kIsPacked ? std::lcm(w.size(), int64_t(kLanes)) : kLanes;
  const int64_t part = step > kMostPart ? a.inputs : part_of(a.inputs, step);
  const auto near = [&](int64_t n, int64_t rows, int64_t from, int64_t count) {
    if (from == 0) w.fetch_scales(n + rows, rows);
    for (int64_t r = 0; r < rows; r++) widen_row(w, n + r, from, count, wide + r * part);
    return Strip<float>{wide, part, count, from == 0};
  };
  if constexpr (kHasPanels)
    if (a.by_panels && part <= kMostPart) return by_panels(a, part, near, first, last);
  many_rows<R>(a, w.kIsPacked ? 4 : 8, part, near, first, last);
}

// Calls f with the types of the scales and offsets of a weight of V, as null pointers to them.
template <class V, class F> void by_scales(const Linear& a, const F& f) {
  const bool same = !a.offsets || a.offset_kind == a.scale_kind;
  const BFloat16* brain = nullptr;
  const Float16* half = nullptr;
  const float* single = nullptr;
  const Power* power = nullptr;
  const int8_t* counted = nullptr;  // in units
  if constexpr (std::is_same_v<V, Float4>) return f(power, single);
  if constexpr (std::is_same_v<V, int8_t> || std::is_same_v<V, Nibbles> || Upper<V>::kBits)
    if (a.scale_kind == Kind::kInt8) return f(counted, counted);
  if constexpr (Upper<V>::kBits) return f(half, half);
  else if constexpr (!std::is_same_v<V, Float4>) switch (a.scale_kind) {
    case Kind::kBFloat16: return same ? f(brain, brain) : f(brain, single);
    case Kind::kFloat16: return same ? f(half, half) : f(half, single);
    default: return f(single, single);
  }
}
template <class V> void quantised_by_scales(const Linear& a, int64_t first, int64_t last) {
  by_scales<V>(a, [&](auto* s, auto* o) {
    using S = std::decay_t<decltype(*s)>;
    using O = std::decay_t<decltype(*o)>;
    a.inputs == 32 * a.groups ? quantised<V, S, O, 32>(a, first, last) : quantised<V, S, O, 0>(a, first, last);
  });
}
// The order of x depends on the values' type and the groups alone.
template <class V> bool prepare_for(const Linear& a, float* room) {
  const Quantised<V, float, float, 0> w(a);
  if (!can_prepare(w) || a.rows > rows_of_room(w) || (!w.kIsPacked && !w.has_offsets())) return false;
  prepare_rows(w, a.x, a.rows, room);
  return true;
}

template <class W> void widen_dense(const Linear& a, float* to, int64_t first, int64_t last) {
  widen_numbers(static_cast<const W*>(a.weight) + first * a.inputs, (last - first) * a.inputs, to + first * a.inputs);
}
template <class V> void widen_quantised(const Linear& a, float* to, int64_t first, int64_t last) {
  by_scales<V>(a, [&](auto* s, auto* o) {
    using S = std::decay_t<decltype(*s)>;
    using O = std::decay_t<decltype(*o)>;
    const Quantised<V, S, O, 0> any(a);
    const Quantised<V, S, O, 32> usual(a);
    for (int64_t n = first; n < last; n++)
      a.inputs == 32 * a.groups ? widen_row(usual, n, 0, a.inputs, to + n * a.inputs)
                                : widen_row(any, n, 0, a.inputs, to + n * a.inputs);
  });
}

void widen(const Linear& a, float* to, int64_t first, int64_t last) {
  switch (a.kind) {
    case Kind::kFloat32: return widen_dense<float>(a, to, first, last);
    case Kind::kBFloat16: return widen_dense<BFloat16>(a, to, first, last);
    case Kind::kFloat16: return widen_dense<Float16>(a, to, first, last);
    case Kind::kInt8: return widen_quantised<int8_t>(a, to, first, last);
    case Kind::kFloat8: return widen_quantised<Float8>(a, to, first, last);
    case Kind::kUint4: return widen_quantised<Nibbles>(a, to, first, last);
    case Kind::kUint5: return widen_quantised<Fives>(a, to, first, last);
    case Kind::kUint6: return widen_quantised<Sixes>(a, to, first, last);
    case Kind::kFloat4: return widen_quantised<Float4>(a, to, first, last);
    default: return;
  }
}

bool prepare(const Linear& a, float* room) {
  switch (a.kind) {
    case Kind::kInt8: return prepare_for<int8_t>(a, room);
    case Kind::kFloat8: return prepare_for<Float8>(a, room);
    case Kind::kUint4: case Kind::kUint5: case Kind::kUint6: return prepare_for<Nibbles>(a, room);
    case Kind::kFloat4: return prepare_for<Float4>(a, room);
    default: return false;
  }
}

void linear(const Linear& a, int64_t first, int64_t last) {
  switch (a.kind) {
    case Kind::kFloat32: return dense(a, static_cast<const float*>(a.weight), first, last);
    case Kind::kBFloat16: return dense(a, static_cast<const BFloat16*>(a.weight), first, last);
    case Kind::kFloat16: return dense(a, static_cast<const Float16*>(a.weight), first, last);
    case Kind::kInt8: return quantised_by_scales<int8_t>(a, first, last);
    case Kind::kFloat8: return quantised_by_scales<Float8>(a, first, last);
    case Kind::kUint4: return quantised_by_scales<Nibbles>(a, first, last);
    case Kind::kUint5: return quantised_by_scales<Fives>(a, first, last);
    case Kind::kUint6: return quantised_by_scales<Sixes>(a, first, last);
    case Kind::kFloat4: return quantised_by_scales<Float4>(a, first, last);
    default: return;
  }
}

}  // namespace
