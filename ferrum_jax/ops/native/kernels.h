// What the handlers ask of the kernels. Plain data and functions only: every instruction set has a copy of the kernels
// in an object of its own, and nothing that the linker could merge between them may be compiled for one of them.
#pragma once
#include <cstdint>

namespace ferrum {

enum class Kind : int32_t { kFloat32, kBFloat16, kFloat16, kInt8, kUint4, kUint5, kUint6, kFloat4, kPower, kFloat8 };

// y[b, n] = sum over k of x[b, k] * w[n, k], in float32. With groups, w[n, k] = value * scale + offset of its group.
struct Linear {
  const float* const* x;  // `rows` pointers to K numbers each
  float* const* y;        // as many to N
  const void* weight;     // [N, K]; 4, 5 and 6 bits: [N, K / 2], byte i of a group has its column i low, i + half of it high
  const void* high;       // upper bits of 5 and 6: uint8 or uint16 [N, K / 8], one for each four bytes of `weight`; or null
  const void* scales;     // [N, groups], or null
  const void* offsets;    // [N, groups], of the scales' kind or float32; or null: then 8, 16 or 32 of unsigned values means 0
  const void* scale_units;   // float16 [N, groups >> run]: scales of kInt8 count these; else null
  const void* offset_units;  // the same of offsets
  int64_t run;               // log2 of the groups that share a unit
  Kind kind, scale_kind, offset_kind;
  int64_t rows, inputs, outputs, groups;
  const float* prepared;  // rows of x as a few are multiplied with this weight, once for all threads; or null
  bool is_few;            // so few rows that quantised values meet x before their scales: one order of sums for a call
  bool reads_apart;       // with 32 registers: a few rows of x read the weight in several sequences
  bool by_panels;         // so many that panels of the weight are brought into the order in which they are read
};

// Softmax attention of grouped heads over a paged KV: keys [L, P, K, H, C], values [L, P, K, C, H]. Without values, those
// are the keys.
struct Attention {
  const float* q;  // [B, T, N, H]
  const void* keys;
  const void* values;
  const float* sinks;        // [N], or null
  const int32_t* lengths;    // [B] positions in the KV before this step
  const int32_t* counts;     // [B] new ones
  const int32_t* tables;     // [B, M]
  float* out;                // [B, T, N, H]
  float* parts;              // [B, K, S, N / K, H + 2]: outputs, largest scores and sums of each part, where T is 1
  Kind kind;                 // of the KV
  int64_t batch, tokens, heads, kv_heads, width, block, columns, blocks, layer;
  int64_t window;            // positions that a token sees; 0: all
  int64_t splits, span;      // parts of a row of one token, and positions of each
  int64_t tile;              // tokens of a longer row that are computed together
  float scale, softcap;      // softcap 0: none
};

// Writes keys [X, K, H] and values, if any, where they belong; a token whose block is not in the pool goes nowhere.
struct Write {
  const float* k;
  const float* v;
  void* keys;
  void* values;
  const int32_t* block_ids;  // [X]
  const int32_t* offsets;    // [X]
  Kind kind;
  int64_t tokens, kv_heads, width, block, blocks, layer;
};

// A token to be chosen from a row of scores.
struct Choice {
  const float* scores;  // [V]
  int64_t size;         // V
  float temperature, top_p, min_p;
  int32_t top_k;
  uint32_t seed, position;
};
struct Chosen {
  int32_t id;
  float threshold;  // the score, less the best and over the temperature, from which on tokens were kept
};

struct Kernels {
  const char* name;
  int64_t panel;                                               // outputs of a panel of the weight, for many rows; 0: none
  void (*linear)(const Linear&, int64_t first, int64_t last);  // a range of outputs
  // Brings the few rows of x into the order in which they are multiplied; false if they stay as they are, or if kRoom
  // numbers are too few for them.
  bool (*prepare)(const Linear&, float* room);
  void (*widen)(const Linear&, float* to, int64_t first, int64_t last);  // a range of the weight's rows, to float32
  void (*attend)(const Attention&, int64_t item);              // of batch * kv_heads * (splits or tiles)
  void (*join)(const Attention&, int64_t item);                // of batch * kv_heads: parts to outputs
  void (*write)(const Write&, int64_t first, int64_t last);    // a range of tokens
  void (*sum_exponentials)(const float* x, int64_t count, float* part);
  void (*choose)(const Choice&, Chosen*);
  void (*find_largest)(const float* x, int64_t size, int64_t count, float* values, int32_t* ids);
};

constexpr int64_t kMostInputs = 32768;  // K of a quantised product: its rows are widened on the stack
constexpr int64_t kRoom = 3 * kMostInputs;  // numbers for rows of x that are prepared
constexpr int64_t kBlock = 128;         // rows of a product that are computed together: they stay in the second cache
constexpr int64_t kPanelBlock = 512;    // rows that meet a panel before the next one is made
constexpr int64_t kMany = 64;           // rows of a product above which panels gain
constexpr int64_t kMostWidth = 640;     // H
constexpr int64_t kTileRows = 48;       // query heads times tokens that attend together

}  // namespace ferrum
