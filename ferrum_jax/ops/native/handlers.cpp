// The kernels as targets of XLA's foreign function interface. They check shapes and types, divide the work, and choose
// the instruction set once.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ferrum {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;
using FloatResult = ffi::ResultBuffer<ffi::F32>;

constexpr int64_t kMostRows = 8192;  // of x in one product
constexpr int64_t kFew = 4, kFewOfLong = 8;  // rows of a product that are few, and where the weight's rows are long
constexpr int64_t kLong = 1024, kFewChoices = 256;  // inputs of a long row; rows of a product of experts that are few
constexpr int64_t kOutputsOfBlock = 96;  // of whole tiles or panels, that a block of many rows meets at once: fetching it costs little
constexpr int64_t kPart = 1 << 14;  // numbers of a row whose exponentials are summed together: they stay in a cache
constexpr int64_t kLeastWork = 1 << 15;  // numbers of a weight that one thread takes at once, at least

}  // namespace

#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512;
// Asks the processor itself: not every compiler's library can say it. The system must keep the registers, too.
static const Kernels* choose() {
  const auto has = [](unsigned word, std::initializer_list<int> bits) {
    return std::all_of(bits.begin(), bits.end(), [&](int bit) { return word >> bit & 1; });
  };
  unsigned a, b, c, d, kept, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, {12, 27, 28, 29})) return nullptr;  // FMA, XGETBV, AVX, F16C
  __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  if (!has(kept, {1, 2}) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return nullptr;
  if (has(kept, {5, 6, 7}) && has(b, {16, 17, 30, 31})) return &kernels_avx512;  // AVX512 F, DQ, BW, VL
  return has(b, {5}) ? &kernels_avx2 : nullptr;
}
// Whether the processor fetches several sequences of memory ahead by itself, faster than instructions do for one: of those
// with 32 registers AMD's family 25, Zen 4, does. On others reading in the order of memory was measured, and not this.
static bool follows_several() {
#if defined(FERRUM_APART)  // tests build both ways
  return FERRUM_APART;
#endif
  unsigned a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != 0x68747541) return false;  // "Auth", of AuthenticAMD
  return __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) == 25;
}
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
static const Kernels* choose() { return &kernels_neon; }
static bool follows_several() { return false; }
#else
static const Kernels* choose() { return nullptr; }
static bool follows_several() { return false; }
#endif

namespace {

const Kernels* const kernels = choose();
const bool reads_apart = follows_several();

bool kind_of(ffi::DataType type, Kind* kind) {
  switch (type) {
    case ffi::DataType::F32: *kind = Kind::kFloat32; return true;
    case ffi::DataType::BF16: *kind = Kind::kBFloat16; return true;
    case ffi::DataType::F16: *kind = Kind::kFloat16; return true;
    case ffi::DataType::S8: *kind = Kind::kInt8; return true;
    case ffi::DataType::F8E4M3FN: *kind = Kind::kFloat8; return true;
    case ffi::DataType::U8: *kind = Kind::kUint4; return true;
    default: return false;
  }
}

bool is_float(Kind kind) { return kind == Kind::kFloat32 || kind == Kind::kBFloat16 || kind == Kind::kFloat16; }
int upper_bits(Kind kind) { return kind == Kind::kUint5 ? 1 : kind == Kind::kUint6 ? 2 : 0; }
bool is_packed(Kind kind) { return kind == Kind::kUint4 || kind == Kind::kFloat4 || upper_bits(kind); }

bool kind_of_pool(ffi::DataType type, Kind* kind) {
  return kind_of(type, kind) && (is_float(*kind) || *kind == Kind::kFloat8);
}

// Fills in the units of scales or offsets of kInt8, of which there are as many for both.
const char* describe_units(const ffi::RemainingArgs& parts, size_t at, int64_t count, Linear* a, const void** units) {
  auto found = parts.get<ffi::Buffer<ffi::F16>>(at);
  if (!found.has_value()) return "scales in bytes count units in float16";
  const int64_t own = found->dimensions()[found->dimensions().size() - 1];
  const int64_t run = a->groups == 8 * own ? 3 : 4;
  if (a->scale_units && run != a->run) return "offsets have other units than scales";
  a->run = run;
  if (own < 1 || a->groups != own << a->run || int64_t(found->element_count()) != count * a->outputs * own)
    return "eight or sixteen groups share a unit";
  *units = found->untyped_data();
  return nullptr;
}

// Fills in the upper bits of values, the last part if it has bytes.
const char* describe_upper(const ffi::RemainingArgs& parts, int64_t count, Linear* a) {
  auto found = parts.get<ffi::AnyBuffer>(parts.size() - 1);
  if (!found.has_value() || found->element_type() != ffi::DataType::U8) return nullptr;
  const int64_t bytes = found->element_count(), words = count * a->outputs * a->inputs / 8;
  if (a->inputs / a->groups % 8 || (bytes != words && bytes != 2 * words)) return "eight numbers share one or two bytes";
  if (a->scale_kind != Kind::kInt8 && a->scale_kind != Kind::kFloat16) return "scales have another type";
  a->kind = bytes == words ? Kind::kUint5 : Kind::kUint6;
  a->high = found->untyped_data();
  return nullptr;
}

// Fills in what a product's weight is: values, scales and offsets, and how many there are in the stack. Returns what is
// wrong, or null.
const char* describe(const ffi::RemainingArgs& parts, Linear* a, int64_t* count) {
  auto values = parts.get<ffi::AnyBuffer>(0);
  if (!values.has_value() || !kind_of(values->element_type(), &a->kind)) return "a weight of this type has no kernel";
  auto sizes = values->dimensions();
  if (sizes.size() != 2 && sizes.size() != 3) return "a weight has two axes, a stack of them three";
  const bool is_quantised = !is_float(a->kind);
  a->weight = values->untyped_data();
  a->reads_apart = reads_apart;
  a->outputs = sizes[sizes.size() - 2];
  a->inputs = sizes[sizes.size() - 1] * (is_packed(a->kind) ? 2 : 1);
  *count = sizes.size() == 3 ? sizes[0] : 1;
  if (is_quantised != (parts.size() > 1)) return "a weight has scales if it is quantised";
  if (!is_quantised) return nullptr;
  auto scales = parts.get<ffi::AnyBuffer>(1);
  if (!scales.has_value() || !kind_of(scales->element_type(), &a->scale_kind)) return "scales have another type";
  if (is_packed(a->kind) && a->scale_kind == Kind::kUint4) {  // values with scales in bytes are floats
    a->kind = Kind::kFloat4;
    a->scale_kind = Kind::kPower;
  } else if (!is_float(a->scale_kind) && (a->scale_kind != Kind::kInt8 || a->kind == Kind::kFloat8)) {
    return "scales have another type";
  }
  a->scales = scales->untyped_data();
  a->groups = scales->dimensions()[scales->dimensions().size() - 1];
  const auto is_of_groups = [&](const auto& of) { return int64_t(of.element_count()) == *count * a->outputs * a->groups; };
  size_t next = 2;
  if (a->scale_kind == Kind::kInt8)
    if (const char* problem = describe_units(parts, next++, *count, a, &a->scale_units)) return problem;
  if (!is_of_groups(*scales)) return "each group of each weight has a scale";
  if (a->groups < 1 || a->inputs % a->groups || (is_packed(a->kind) && a->inputs / a->groups % 2))
    return "the groups do not divide the inputs";
  if (a->inputs > kMostInputs) return "a quantised weight has too many inputs";
  if (parts.size() > next && a->kind == Kind::kUint4)
    if (const char* problem = describe_upper(parts, *count, a)) return problem;
  if (parts.size() - (upper_bits(a->kind) > 0) <= next) return nullptr;
  auto offsets = parts.get<ffi::AnyBuffer>(next++);
  if (!offsets.has_value() || !kind_of(offsets->element_type(), &a->offset_kind)) return "offsets have another type";
  if (!is_of_groups(*offsets)) return "each group of each weight has an offset";
  if (a->kind == Kind::kFloat4) return "floats of four bits have no offsets";
  const bool is_other = a->scale_kind == Kind::kInt8 || upper_bits(a->kind) || a->offset_kind != Kind::kFloat32;
  if (a->offset_kind != a->scale_kind && is_other) return "offsets are not as the scales";
  a->offsets = offsets->untyped_data();
  return a->scale_kind == Kind::kInt8 ? describe_units(parts, next, *count, a, &a->offset_units) : nullptr;
}

int64_t size_of(Kind kind) { return kind == Kind::kFloat32 ? 4 : is_float(kind) ? 2 : 1; }

template <class T> const void* ahead(const void* p, T bytes) { return p ? static_cast<const char*>(p) + bytes : p; }

// One weight of a stack.
Linear take(const Linear& stack, int64_t at) {
  Linear a = stack;
  const int64_t numbers = at * a.outputs * a.inputs, groups = at * a.outputs * a.groups;
  a.weight = ahead(a.weight, is_packed(a.kind) ? numbers / 2 : numbers * size_of(a.kind));
  a.scales = ahead(a.scales, groups * size_of(a.scale_kind));
  a.offsets = ahead(a.offsets, groups * size_of(a.offset_kind));
  a.high = ahead(a.high, numbers / 8 * upper_bits(a.kind));
  a.scale_units = ahead(a.scale_units, (groups >> a.run) * 2);
  a.offset_units = ahead(a.offset_units, (groups >> a.run) * 2);
  return a;
}

// Outputs that are taken together at least: whole tiles, or panels.
int64_t whole_tiles(int64_t outputs, int64_t tile = 12) { return (outputs + tile - 1) / tile * tile; }
int64_t outputs_at_least(const Linear& a) { return whole_tiles((kLeastWork + a.inputs - 1) / a.inputs); }

// Multiplies, with rows and outputs divided among the threads.
void multiply(ffi::ThreadPool& pool, const Linear& a) {
  const int64_t most = a.by_panels ? kPanelBlock : kBlock;
  int64_t blocks = (a.rows + most - 1) / most;
  if (a.by_panels) {  // with fewer panels than threads, more blocks of rows
    const int64_t panels = (a.outputs + kernels->panel - 1) / kernels->panel;
    blocks = std::max(blocks, std::min((threads_of(pool) + panels - 1) / panels, a.rows / kBlock));
  }
  const int64_t rows = a.by_panels ? (a.rows + blocks - 1) / blocks : most;  // of a block
  const int64_t shares = 4 * threads_of(pool);
  const int64_t even = whole_tiles((a.outputs * blocks + shares - 1) / shares, a.by_panels ? kernels->panel : 12);
  const int64_t size = !a.by_panels && a.rows < kBlock ? outputs_at_least(a) : std::min(even, kOutputsOfBlock);
  const int64_t pieces = (a.outputs + size - 1) / size;
  in_parallel(pool, blocks * pieces, [&](int64_t first, int64_t last) {
    for (int64_t at = first / pieces; at * pieces < last; at++) {
      Linear block = a;
      block.rows = std::min(a.rows - at * rows, rows);
      block.x = a.x + at * rows;
      block.y = a.y + at * rows;
      const int64_t begin = std::max(first - at * pieces, int64_t(0)), end = std::min(last - at * pieces, pieces);
      kernels->linear(block, begin * size, std::min(a.outputs, end * size));
    }
  });
}

// Prepares x once for all threads, in a frame of its own: products of many rows need not have the room.
[[gnu::noinline]] void multiply_few(ffi::ThreadPool& pool, Linear a) {
  alignas(64) float room[kRoom];
  if (kernels->prepare(a, room)) a.prepared = room;
  multiply(pool, a);
}

// All rows of x [X, K] with one weight: the only one [N, K], or that of a layer in a stack [L, N, K].
ffi::Error run_linear(ffi::ThreadPool pool, Floats x, Integers layer, ffi::RemainingArgs parts, FloatResult y) {
  Linear a{};
  int64_t layers;
  if (const char* problem = describe(parts, &a, &layers)) return ffi::Error::InvalidArgument(problem);
  if (layer.element_count() != 1) return ffi::Error::InvalidArgument("a product has one layer");
  const int64_t own = layer.typed_data()[0];
  if (own < 0 || own >= layers) return ffi::Error::InvalidArgument("the stack has no weight of this layer");
  a = take(a, own);
  a.rows = x.dimensions()[0];
  if (x.dimensions()[1] != a.inputs || a.rows > kMostRows) return ffi::Error::InvalidArgument("x has another shape");
  const float* from[kMostRows];
  float* to[kMostRows];
  for (int64_t row = 0; row < a.rows; row++) {
    from[row] = x.typed_data() + row * a.inputs;
    to[row] = y->typed_data() + row * a.outputs;
  }
  a.x = from;
  a.y = to;
  a.is_few = a.rows <= (a.inputs < kLong ? kFew : kFewOfLong);
  a.by_panels = kernels->panel && a.rows > kMany;
  a.is_few ? multiply_few(pool, a) : multiply(pool, a);
  return ffi::Error::Success();
}

// The first operand is not read: it says when the result is needed, or XLA would widen all weights of a step at first.
ffi::Error run_widen(ffi::ThreadPool pool, ffi::AnyBuffer, ffi::RemainingArgs parts, FloatResult wide) {
  Linear a{};
  int64_t layers;
  if (const char* problem = describe(parts, &a, &layers)) return ffi::Error::InvalidArgument(problem);
  if (int64_t(wide->element_count()) != a.outputs * a.inputs) return ffi::Error::InvalidArgument("not the weight's size");
  const int64_t size = outputs_at_least(a);
  in_parallel(pool, (a.outputs + size - 1) / size, [&](int64_t first, int64_t last) {
    kernels->widen(a, wide->typed_data(), first * size, std::min(a.outputs, last * size));
  });
  return ffi::Error::Success();
}

// Row i of x with the weight of its own expert: x [A, K], ids [A], weights [E, N, K]. An expert that is not in the stack
// is another device's: its rows are zeros.
ffi::Error run_experts(ffi::ThreadPool pool, Floats x, Integers ids, ffi::RemainingArgs parts, FloatResult y) {
  Linear stack{};
  int64_t experts;
  if (const char* problem = describe(parts, &stack, &experts)) return ffi::Error::InvalidArgument(problem);
  const int64_t rows = x.dimensions()[0];
  if (x.dimensions()[1] != stack.inputs || rows > kMostRows) return ffi::Error::InvalidArgument("x has another shape");
  const float* from[kMostRows];
  float* to[kMostRows];
  int64_t of[kMostRows], starts[kMostRows + 1], used = 0, placed = 0;
  bool is_placed[kMostRows] = {};
  for (int64_t row = 0; row < rows; row++) {  // rows of one expert together
    if (is_placed[row]) continue;
    const int32_t expert = ids.typed_data()[row];
    if (expert < 0 || expert >= experts) {
      std::fill_n(y->typed_data() + row * stack.outputs, stack.outputs, 0.0f);
      continue;
    }
    of[used] = expert;
    starts[used++] = placed;
    for (int64_t other = row; other < rows; other++)
      if (ids.typed_data()[other] == expert) {
        is_placed[other] = true;
        from[placed] = x.typed_data() + other * stack.inputs;
        to[placed++] = y->typed_data() + other * stack.outputs;
      }
  }
  starts[used] = placed;
  stack.is_few = rows <= kFewChoices;
  const int64_t size = outputs_at_least(stack), pieces = (stack.outputs + size - 1) / size;
  in_parallel(pool, used * pieces, [&](int64_t first, int64_t last) {
    for (int64_t at = first / pieces; at * pieces < last; at++) {
      Linear a = take(stack, of[at]);
      a.rows = starts[at + 1] - starts[at];
      a.x = from + starts[at];
      a.y = to + starts[at];
      const int64_t begin = std::max(first - at * pieces, int64_t(0)), end = std::min(last - at * pieces, pieces);
      kernels->linear(a, begin * size, std::min(a.outputs, end * size));
    }
  });
  return ffi::Error::Success();
}

// `place` is int32 [2]: the layer and the window, 0 for none. Sinks and values that are not there have no numbers.
ffi::Error run_attend(ffi::ThreadPool pool, Floats q, ffi::AnyBuffer keys, ffi::AnyBuffer values, Floats sinks,
                      Integers lengths, Integers counts, Integers tables, Integers place, FloatResult out,
                      FloatResult parts, float scale, float softcap, int64_t span) {
  Attention a{};
  auto sizes = q.dimensions(), pool_sizes = keys.dimensions();
  if (!kind_of_pool(keys.element_type(), &a.kind)) return ffi::Error::InvalidArgument("a KV of this type has no kernel");
  a.q = q.typed_data();
  a.keys = keys.untyped_data();
  a.values = values.element_count() ? values.untyped_data() : nullptr;
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.lengths = lengths.typed_data();
  a.counts = counts.typed_data();
  a.tables = tables.typed_data();
  a.out = out->typed_data();
  a.parts = parts->typed_data();
  a.batch = sizes[0], a.tokens = sizes[1], a.heads = sizes[2], a.width = sizes[3];
  a.blocks = pool_sizes[1], a.kv_heads = pool_sizes[2], a.block = pool_sizes[4];
  a.columns = tables.dimensions()[1];
  a.layer = place.typed_data()[0];
  a.window = place.typed_data()[1];
  a.scale = scale;
  a.softcap = softcap;
  a.span = span;
  if (a.width > kMostWidth || pool_sizes[3] != a.width || !a.kv_heads || a.heads % a.kv_heads || !a.block ||
      span < 1 || span % a.block)
    return ffi::Error::InvalidArgument("attention of these sizes has no kernel");
  a.splits = (a.columns * a.block + span - 1) / span;
  a.tile = std::max<int64_t>(1, std::min<int64_t>(16, kTileRows / std::max<int64_t>(1, a.heads / a.kv_heads)));
  const auto attend = [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; item++) kernels->attend(a, item);
  };
  if (a.tokens > 1) {
    const int64_t tiles = (a.tokens + a.tile - 1) / a.tile;
    in_parallel(pool, a.batch * a.kv_heads * tiles, attend);
    return ffi::Error::Success();
  }
  in_parallel(pool, a.batch * a.kv_heads * a.splits, attend);
  for (int64_t item = 0; item < a.batch * a.kv_heads; item++) kernels->join(a, item);
  return ffi::Error::Success();
}

const char* check_write(Floats k, Floats v, const ffi::AnyBuffer& keys, const ffi::AnyBuffer& values,
                        const void* written, Write* a) {
  if (!kind_of_pool(keys.element_type(), &a->kind)) return "a KV of this type has no kernel";
  if (keys.untyped_data() != written) return "the KV was copied";
  auto sizes = keys.dimensions(), given = k.dimensions();
  a->blocks = sizes[1], a->kv_heads = sizes[2], a->width = sizes[3], a->block = sizes[4];
  a->tokens = given.size() == 3 ? given[0] : -1;
  const auto elements = size_t(a->tokens * a->kv_heads * a->width);
  if (a->tokens < 0 || given[1] != a->kv_heads || given[2] != a->width ||
      (values.element_count() && (values.element_count() != keys.element_count() || v.element_count() != elements)))
    return "keys and values do not have the KV's shape";
  return nullptr;
}

ffi::Error run_write(ffi::ThreadPool pool, Floats k, Floats v, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                     Integers block_ids, Integers offsets, Integers layer, ffi::Result<ffi::AnyBuffer> new_keys,
                     ffi::Result<ffi::AnyBuffer> new_values) {
  Write a{};
  if (const char* problem = check_write(k, v, keys, values, new_keys->untyped_data(), &a))
    return ffi::Error::Internal(problem);
  if (int64_t(block_ids.element_count()) != a.tokens || int64_t(offsets.element_count()) != a.tokens)
    return ffi::Error::Internal("there are not as many places as tokens");
  if (values.element_count() && values.untyped_data() != new_values->untyped_data())
    return ffi::Error::Internal("the KV was copied");
  a.k = k.typed_data();
  a.v = v.typed_data();
  a.keys = keys.untyped_data();
  a.values = values.element_count() ? values.untyped_data() : nullptr;
  a.block_ids = block_ids.typed_data();
  a.offsets = offsets.typed_data();
  a.layer = layer.typed_data()[0];
  constexpr int64_t kAtLeast = 2;  // tokens of one thread
  in_parallel(pool, (a.tokens + kAtLeast - 1) / kAtLeast, [&](int64_t first, int64_t last) {
    kernels->write(a, first * kAtLeast, std::min(a.tokens, last * kAtLeast));
  });
  return ffi::Error::Success();
}

// The logarithm of the sum of exponentials of each row of x [R, V]; `parts` are [R, S, 2].
ffi::Error run_logsumexp(ffi::ThreadPool pool, Floats x, FloatResult out, FloatResult parts) {
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1], splits = (size + kPart - 1) / kPart;
  if (int64_t(parts->element_count()) != rows * splits * 2) return ffi::Error::InvalidArgument("not the parts' size");
  in_parallel(pool, rows * splits, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; item++) {
      const int64_t from = item % splits * kPart;
      const float* row = x.typed_data() + item / splits * size;
      kernels->sum_exponentials(row + from, std::min(kPart, size - from), parts->typed_data() + item * 2);
    }
  });
  for (int64_t row = 0; row < rows; row++) {
    const float* part = parts->typed_data() + row * splits * 2;
    double best = -HUGE_VAL, sum = 0.0;
    for (int64_t s = 0; s < splits; s++)
      if (!std::isnan(best) && !(part[2 * s] <= best)) best = part[2 * s];  // what is not a number stays so
    for (int64_t s = 0; s < splits; s++) sum += part[2 * s + 1] * std::exp(part[2 * s] - best);
    out->typed_data()[row] = float(std::isinf(best) ? best : best + std::log(sum));
  }
  return ffi::Error::Success();
}

// Chooses a token of each row of scores [R, V], and says from which relative score on tokens were kept.
ffi::Error run_choose(ffi::ThreadPool pool, Floats scores, Floats temperature, Integers top_k, Floats top_p, Floats min_p,
                      ffi::Buffer<ffi::U32> seed, Integers position, ffi::ResultBuffer<ffi::S32> ids, FloatResult thresholds) {
  const int64_t rows = scores.dimensions()[0], size = scores.dimensions()[1];
  const auto is_of_rows = [rows](const auto& of) { return int64_t(of.element_count()) == rows; };
  if (size < 1 || !is_of_rows(temperature) || !is_of_rows(top_k) || !is_of_rows(top_p) || !is_of_rows(min_p) ||
      !is_of_rows(seed) || !is_of_rows(position) || !is_of_rows(*ids) || !is_of_rows(*thresholds))
    return ffi::Error::InvalidArgument("a choice takes one of each option a row, and a token to choose");
  in_parallel(pool, rows, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      Chosen found;
      kernels->choose({scores.typed_data() + row * size, size, temperature.typed_data()[row], top_p.typed_data()[row],
                       min_p.typed_data()[row], top_k.typed_data()[row], seed.typed_data()[row],
                       uint32_t(position.typed_data()[row])}, &found);
      ids->typed_data()[row] = found.id;
      thresholds->typed_data()[row] = found.threshold;
    }
  });
  return ffi::Error::Success();
}

// Finds the largest numbers of each row of x [R, V], and their columns.
ffi::Error run_best(ffi::ThreadPool pool, Floats x, FloatResult values, ffi::ResultBuffer<ffi::S32> ids) {
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1], count = values->dimensions()[1];
  const size_t found = size_t(rows * count);
  if (count < 1 || count > size || values->element_count() != found || ids->element_count() != found)
    return ffi::Error::InvalidArgument("at least one number of a row is asked for, and at most all");
  in_parallel(pool, rows, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
      kernels->find_largest(x.typed_data() + row * size, size, count, values->typed_data() + row * count,
                            ids->typed_data() + row * count);
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ferrum_linear, run_linear,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Integers>().RemainingArgs().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ferrum_widen, run_widen,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().RemainingArgs().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ferrum_experts, run_experts,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Integers>().RemainingArgs().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ferrum_attend, run_attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("span"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ferrum_write, run_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ferrum_logsumexp, run_logsumexp,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Ret<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ferrum_choose, run_choose,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<Integers>()
                                  .Ret<Integers>()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ferrum_best, run_best,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Ret<Floats>().Ret<Integers>());

// Which sources the library was built of.
extern "C" const char* ferrum_sources() { return FERRUM_SOURCES; }

// The instruction set in use, or null where the processor has none of them.
extern "C" const char* ferrum_instruction_set() { return kernels ? kernels->name : nullptr; }
#pragma GCC visibility pop

}  // namespace ferrum
