// Vectors of float32 in the compiler's own extension: one source for AVX2, AVX-512 and NEON.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kManyRegisters = true;  // 32 instead of 16
#else
constexpr bool kManyRegisters = false;
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
struct Float8 { uint8_t bits; };   // e4m3fn: 4 bits of exponent, no infinity
struct Nibbles { uint8_t bits; };  // two integers
struct Fives { uint8_t bits; };    // the same, whose fifth bits are elsewhere
struct Sixes { uint8_t bits; };    // and fifth and sixth bits
struct Float4 { uint8_t bits; };   // two floats of e2m1: one bit of sign, two of exponent, one of fraction
struct Power { uint8_t bits; };    // e8m0: a power of two, as float32's exponent

// How many bits of a number are elsewhere, and the type that has those of the eight numbers of a 32-bit word.
template <class V> struct Upper { static constexpr int kBits = 0; using Word = uint8_t; };
template <> struct Upper<Fives> { static constexpr int kBits = 1; using Word = uint8_t; };
template <> struct Upper<Sixes> { static constexpr int kBits = 2; using Word = uint16_t; };

template <int N> struct Size { static constexpr int value = N; };

// Calls f with a size of 1 to N, which is then known when compiled.
template <int N, class F> inline void by_size(int64_t size, const F& f) {
  if (size == N) return f(Size<N>());
  if constexpr (N > 1) by_size<N - 1>(size, f);
}

// Calls f for groups of rows of a size that is known when compiled.
template <class F> inline void by_rows(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) f(Size<6>(), r);
  for (; r + 3 <= rows; r += 3) f(Size<3>(), r);
  if (rows - r == 2) f(Size<2>(), r);
  if (rows - r == 1) f(Size<1>(), r);
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline Vector splat(float x) { return x - Vector{}; }
template <class To, class From> inline To cast(const From& from) {
  To to;
  static_assert(sizeof to == sizeof from, "the same bits");
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return cast<float>(uint32_t(x.bits) << 16); }
inline float widen(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
  if (rest >= 0x7c00u << 13) return cast<float>(sign | 0x7f800000u | rest);  // infinite or not a number
  if (rest >= 0x0400u << 13) return cast<float>(sign | (rest + (112u << 23)));
  const float size = float(x.bits & 0x3ff) * 0x1p-24f;  // XLA's threads take subnormal float32 for zero
  return sign ? -size : size;
#endif
}
inline float widen(Float8 x) {
  const uint32_t sign = uint32_t(x.bits & 0x80) << 24, rest = x.bits & 0x7f;
  if (rest == 0x7f) return cast<float>(sign | 0x7fc00000u);  // not a number
  if (rest >= 8) return cast<float>(sign | ((rest << 20) + (120u << 23)));
  const float size = float(rest) * 0x1p-9f;
  return sign ? -size : size;
}
inline float widen(int8_t x) { return x; }
inline float widen(Power x) { return cast<float>(uint32_t(x.bits) << 23); }

alignas(64) constexpr float kFloat4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
inline float low_of(Nibbles x) { return float(x.bits & 15); }
inline float high_of(Nibbles x) { return float(x.bits >> 4); }
inline float low_of(Float4 x) { return kFloat4[x.bits & 15]; }
inline float high_of(Float4 x) { return kFloat4[x.bits >> 4]; }

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, BFloat16* to) {  // to nearest, ties to even
  const uint32_t bits = cast<uint32_t>(x);
  to->bits = x != x ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float x, Float16* to) {
  const uint32_t bits = cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
  const uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) {
    to->bits = uint16_t(sign | 0x7e00);
  } else if (rest >= 0x477ff000) {  // rounds to more than the largest
    to->bits = uint16_t(sign | 0x7c00);
  } else if (rest < 0x38800000) {  // subnormal: the addition rounds
    to->bits = uint16_t(sign | (cast<uint32_t>(cast<float>(rest) + 0.5f) - 0x3f000000u));
  } else {
    to->bits = uint16_t(sign | ((rest + 0xfff + (rest >> 13 & 1)) - 0x38000000) >> 13);
  }
}
inline void narrow(float x, Float8* to) {  // what is beyond the largest, 448, becomes that
  const uint32_t bits = cast<uint32_t>(x), sign = bits >> 24 & 0x80;
  const uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) {
    to->bits = uint8_t(sign | 0x7f);
  } else if (rest >= 0x43e00000) {
    to->bits = uint8_t(sign | 0x7e);
  } else if (rest < 0x3c800000) {  // subnormal: the addition rounds
    to->bits = uint8_t(sign | (cast<uint32_t>(cast<float>(rest) + 16384.0f) - 0x46800000u));
  } else {
    to->bits = uint8_t(sign | ((rest + 0x7ffff + (rest >> 20 & 1)) - 0x3c000000) >> 20);
  }
}

inline Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }

// Bits of Float8 as those of halves, whose exponent has one more bit: numbers 2^8 times too small.
typedef int16_t Shorts __attribute__((vector_size(kLanes * 2)));
inline Shorts as_halves(Shorts bits) {
  const Shorts half = (bits << 8 >> 1) & int16_t(0xbf80);
  return half | (((half & 0x3f80) == 0x3f80) << 10);  // what is not a number stays so
}

#if defined(__AVX512F__)
inline Vector load(const BFloat16* p) {
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline Vector load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vector load(const Float8* p) {
  const Shorts half = as_halves((Shorts)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)));
  return (Vector)_mm512_cvtph_ps((__m256i)half) * 256.0f;
}
inline Vector load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline void load(const Nibbles* p, Vector* low, Vector* high) {
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  *low = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
  *high = _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4));
}
inline Vector load(const Power* p) {
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
}
// The floats of the lowest four bits of each lane.
inline Vector lowest_float4(Integers codes) { return _mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(kFloat4)); }
inline void load(const Float4* p, Vector* low, Vector* high) {
  const Integers both = (Integers)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  *low = lowest_float4(both);
  *high = lowest_float4(both >> 4);
}
#elif defined(__AVX2__)
inline Vector load(const BFloat16* p) {
  return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline Vector load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vector load(const Float8* p) {
  const Shorts half = as_halves((Shorts)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)));
  return (Vector)_mm256_cvtph_ps((__m128i)half) * 256.0f;
}
inline Vector load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline void load(const Nibbles* p, Vector* low, Vector* high) {
  const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  *low = _mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15)));
  *high = _mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4));
}
inline Vector load(const Power* p) {
  return (Vector)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
}
// The floats of the lowest four bits of each lane: three say the size, the fourth the sign.
inline Vector lowest_float4(Integers codes) {
  const __m256 size = _mm256_permutevar8x32_ps(_mm256_load_ps(kFloat4), (__m256i)codes);
  return _mm256_xor_ps(size, (__m256)_mm256_slli_epi32((__m256i)(codes >> 3), 31));
}
inline void load(const Float4* p, Vector* low, Vector* high) {
  const Integers both = (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  *low = lowest_float4(both);
  *high = lowest_float4(both >> 4);
}
#else
template <class T> inline Vector load(const T* p) {
  Vector v;
  for (int i = 0; i < kLanes; i++) v[i] = widen(p[i]);
  return v;
}
#if defined(__aarch64__)
inline Vector load(const Float16* p) { return (Vector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline Vector load(const BFloat16* p) { return (Vector)vshll_n_u16(vld1_u16(&p->bits), 16); }
#endif
template <class T> inline void load(const T* p, Vector* low, Vector* high) {
  for (int i = 0; i < kLanes; i++) {
    (*low)[i] = low_of(p[i]);
    (*high)[i] = high_of(p[i]);
  }
}
inline Vector lowest_float4(Integers codes) {
  Vector v;
  for (int i = 0; i < kLanes; i++) v[i] = kFloat4[codes[i] & 15];
  return v;
}
#endif

// A vector of words of eight numbers each, or the bytes of one that are there; and the j-th numbers: integers 16^j fold
// but for the last.
template <class V> inline Integers load_words(const V* p) {
  Integers words;
  std::memcpy(&words, p, sizeof words);
  return words;
}
template <class V> inline Integers load_words(const V* p, int64_t bytes) {
#if defined(__AVX512F__)
  return (Integers)_mm512_maskz_loadu_epi8((__mmask64(1) << bytes) - 1, p);
#else
  Integers words = {};
  std::memcpy(&words, p, size_t(bytes));
  return words;
#endif
}
inline Vector number_of(Integers words, Integers, int j, Nibbles) {
  return __builtin_convertvector(j < 7 ? words & (15 << 4 * j) : (words >> 28) & 15, Vector);
}
inline Vector number_of(Integers words, Integers, int j, Float4) { return lowest_float4(words >> 4 * j); }
// The same with the upper bits before the lower four: those of number j are `bits` bits from bit `bits * j` of `upper` on.
template <class V> inline Vector number_of(Integers words, Integers upper, int j, V) {
  constexpr int bits = Upper<V>::kBits, mask = (1 << bits) - 1;
  const Integers lower = j < 7 ? words & (15 << 4 * j) : (words >> 28) & 15;
  const Integers moved = j < 7 ? upper << (4 * j + 4 - bits * j) : upper >> (7 * bits - 4);
  return __builtin_convertvector(lower | (moved & (mask << (j < 7 ? 4 * j + 4 : 4))), Vector);
}

// A vector of bytes, or of pairs of them, as integers; and the first ones, then zeros.
inline Integers load_integers(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Integers)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  Integers v;
  for (int i = 0; i < kLanes; i++) v[i] = p[i];
  return v;
#endif
}
inline Integers load_integers(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Integers)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (Integers)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  Integers v;
  for (int i = 0; i < kLanes; i++) v[i] = p[i];
  return v;
#endif
}
template <class W> inline Integers load_integers(const W* p, int64_t count) {
  W padded[kLanes] = {};
  std::memcpy(padded, p, size_t(count) * sizeof(W));
  return load_integers(padded);
}

// `count` numbers at p, each in as many lanes as `width` says, a power of two, and then zeros.
inline Vector spread(const float* p, int64_t count, int64_t width) {
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i from = _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(__builtin_ctz(unsigned(width))));
  return _mm512_permutexvar_ps(from, _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p));
#else
#if defined(__AVX2__)
  if (width == 4 && count == 2) return _mm256_set_m128(_mm_broadcast_ss(p + 1), _mm_broadcast_ss(p));
#endif
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count * width; i++) lanes[i] = p[i / width];
  return load(lanes);
#endif
}

#if defined(__AVX512F__)
// The numbers of eight bytes: first those in the low bits, then those in the high ones.
inline Integers both_of(const void* p) {
  int64_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const __m512i shifts = _mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0);
  return (Integers)_mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_set1_epi64x(bytes)), shifts);
}
inline Vector load_group16(const Nibbles* p, const uint8_t*) { return __builtin_convertvector(both_of(p) & 15, Vector); }
inline Vector load_group16(const Float4* p, const uint8_t*) { return lowest_float4(both_of(p)); }
#endif

inline Integers lanes_from(int64_t first) {
  Integers v;
  for (int i = 0; i < kLanes; i++) v[i] = int32_t(first) + i;
  return v;
}

// Four rows of four numbers at `from`, turned into columns that are `stride` numbers apart, each times its factor.
inline void turn_four(const float* const* from, float* to, int64_t stride, const float* factors) {
#if defined(__x86_64__)
  __m128 a = _mm_loadu_ps(from[0]), b = _mm_loadu_ps(from[1]), c = _mm_loadu_ps(from[2]), d = _mm_loadu_ps(from[3]);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  const __m128 columns[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++) _mm_storeu_ps(to + i * stride, _mm_mul_ps(columns[i], _mm_set1_ps(factors[i])));
#else
  for (int i = 0; i < 4; i++)
    for (int row = 0; row < 4; row++) to[i * stride + row] = from[row][i] * factors[i];
#endif
}

// Of each lane the lane of v that `from` names.
inline Vector lanes_of(Vector v, Integers from) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps((__m512i)from, v);
#elif defined(__AVX2__)
  return _mm256_permutevar8x32_ps(v, (__m256i)from);
#else
  Vector found;
  for (int i = 0; i < kLanes; i++) found[i] = v[from[i] % kLanes];
  return found;
#endif
}

// The first n numbers at p, then zeros; and the first n of v to p.
template <class T> inline Vector load_first(const T* p, int64_t n) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, size_t(n) * sizeof(T));
  return load(padded);
}
#if defined(__AVX512F__)
inline Vector load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
#elif defined(__AVX2__)
inline Vector load_first(const float* p, int64_t n) {
  static const int32_t kMask[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_maskload_ps(p, _mm256_loadu_si256((const __m256i*)(kMask + 8 - n)));
}
#endif
// For each lane i p[words[i]]; `words` are below `count`, which is at most four.
template <class W> inline Integers load_upper(const W* p, int count, Integers words) {
#if defined(__AVX2__)
  uint64_t few = 0;
  std::memcpy(&few, p, size_t(count) * sizeof(W));
  const __m128i bytes = _mm_cvtsi64_si128(int64_t(few));
  const __m128i own = sizeof(W) == 1 ? _mm_cvtepu8_epi32(bytes) : _mm_cvtepu16_epi32(bytes);
#if defined(__AVX512F__)
  return (Integers)_mm512_permutexvar_epi32((__m512i)words, _mm512_castsi128_si512(own));
#else
  return (Integers)_mm256_permutevar8x32_epi32(_mm256_castsi128_si256(own), (__m256i)words);
#endif
#else
  Integers v;
  for (int i = 0; i < kLanes; i++) v[i] = p[words[i]];
  return v;
#endif
}

// A vector of bytes with two numbers each: those in the low bits and those in the high ones, whose upper bits `upper` has.
template <class V, class W> inline void load_numbers(const V* p, const W* upper, Vector* low, Vector* high) {
  if constexpr (Upper<V>::kBits == 0) {
    load(p, low, high);
  } else {
    constexpr int bits = Upper<V>::kBits, mask = ((1 << bits) - 1) << 4;
    const Integers lanes = lanes_from(0), own = load_upper(upper, kLanes / 4, lanes >> 2) << 4 >> (lanes & 3) * (2 * bits);
    const Integers both = load_integers(&p->bits);
    *low = __builtin_convertvector((both & 15) | (own & mask), Vector);
    *high = __builtin_convertvector(both >> 4 | ((own >> bits) & mask), Vector);
  }
}
#if defined(__AVX512F__)
template <class V, class W> inline Vector load_group16(const V* p, const W* upper) {
  constexpr int bits = Upper<V>::kBits, mask = ((1 << bits) - 1) << 4;
  const Integers lanes = lanes_from(0), shift = (lanes & 3) * (2 * bits) + (lanes >> 3) * bits;
  const Integers own = load_upper(upper, 2, (lanes & 7) >> 2) << 4 >> shift;
  return __builtin_convertvector((both_of(p) & 15) | (own & mask), Vector);
}
#endif
inline void store_first(float* p, Vector v, int64_t n) { std::memcpy(p, &v, size_t(n) * sizeof(float)); }

// The larger number; NaN if one of the two is NaN. Of vectors, lane by lane.
template <class T> inline T larger(T a, T b) { return ((a > b) | (a != a)) ? a : b; }

// Whether a comparison holds in any lane.
inline bool any(Integers is_true) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)is_true) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)is_true) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)is_true) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < kLanes; i++) found |= is_true[i];
  return found != 0;
#endif
}

// All lanes taken together: the halves of v, then the halves of what came of that, whatever the instruction set.
#if defined(__AVX2__)
template <class F> inline float fold(Vector v, const F& both) {
#if defined(__AVX512F__)
  const __m256 eight = both(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 eight = (__m256)v;
#endif
  const __m128 four = both(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = both(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(both(two, _mm_movehdup_ps(two)));
}
#else
template <class F> inline float fold(Vector v, const F& both) {
  float lanes[kLanes];
  store(lanes, v);
  for (int n = kLanes / 2; n; n /= 2)
    for (int i = 0; i < n; i++) lanes[i] = both(lanes[i], lanes[i + n]);
  return lanes[0];
}
#endif
inline float total(Vector v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}
inline float largest(Vector v) {
  return fold(v, [](auto a, auto b) { return larger(a, b); });
}

// exp(x) to about 2 units in the last place; 0 below -87. Cephes' polynomial, Moshier 1989.
inline Vector exponential(Vector x) {
  const Vector low = x < splat(-87.33654f) ? splat(-87.33654f) : x;  // NaN stays
  const Vector shifted = low * 1.44269504088896341f + 12582912.0f;  // rounds to an integer in the low bits
  const Vector n = shifted - 12582912.0f;
  Vector r = low - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vector p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Integers power = (cast<Integers>(shifted) + (127 - 0x4b400000)) << 23;
  const Vector found = p * cast<Vector>(power);
  return x < splat(-87.33654f) ? Vector{} : found;
}
inline Vector hyperbolic_tangent(Vector x) {  // 1 - 2 / (exp(2 |x|) + 1) with the sign of x
  const Vector size = x < Vector{} ? -x : x, bounded = size > splat(20.0f) ? splat(20.0f) : size;
  const Vector square = x * x;
  const Vector near = size * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315))));
  const Vector far = 1.0f - 2.0f / (exponential(2.0f * bounded) + 1.0f);
  const Vector found = size < splat(0.15f) ? near : far;
  return x < Vector{} ? -found : found;
}

}  // namespace
