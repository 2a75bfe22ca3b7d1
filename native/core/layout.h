// The bytes of a row, in two parts. A pull reads only the hot part, a push both.
//
//   hot    0 key u64 · 8 delta_score f32 · 12 unseen_days u16 · 14 slot u16 · 16 epoch u8 · 17 flags u8 · 18 lock u8 ·
//          19 round u8 · 20 embed_w f32 · [24 embedx f32 × D]
//   cold   0 show f64 · 8 click f64 · 16 state of embed_w · [state of embedx]
//
// Short rows lack the fields in brackets. D is the width of the row's class. With D = 10 the hot part is one cache
// line. The round is the number of spills (tiers.cc) at the last push; no result depends on it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace clickfleet {

enum Flag : uint8_t {
  kChanged = 1,  // differs from the last published state
  kListed = 2,   // consumers of the published log have this row
  kPending = 4,  // part of changes that were read but not yet committed
  kEmitted = 8,  // those changes set this row (otherwise they delete it)
};

inline constexpr uint16_t kNoSlot = 0xffff;

template <class T>
inline T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <class T>
inline void store(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// A view of one row. Floats are aligned to 4 bytes; wider fields may be unaligned.
struct Row {
  char *hot, *cold;

  uint64_t key() const { return load<uint64_t>(hot); }
  float delta_score() const { return load<float>(hot + 8); }
  uint16_t unseen_days() const { return load<uint16_t>(hot + 12); }
  uint16_t slot() const { return load<uint16_t>(hot + 14); }
  uint8_t& epoch() const { return reinterpret_cast<uint8_t&>(hot[16]); }
  uint8_t& flags() const { return reinterpret_cast<uint8_t&>(hot[17]); }
  uint8_t& round() const { return reinterpret_cast<uint8_t&>(hot[19]); }
  double show() const { return load<double>(cold); }
  double click() const { return load<double>(cold + 8); }
  float* weights() const { return reinterpret_cast<float*>(hot + kWeights); }
  float* embedx() const { return weights() + 1; }
  float* state_of_embed() const { return reinterpret_cast<float*>(cold + kState); }

  void set_key(uint64_t x) const { store(hot, x); }
  void set_delta_score(float x) const { store(hot + 8, x); }
  void set_unseen_days(uint16_t x) const { store(hot + 12, x); }
  void set_slot(uint16_t x) const { store(hot + 14, x); }
  void set_show(double x) const { store(cold, x); }
  void set_click(double x) const { store(cold + 8, x); }

  static constexpr int kLock = 18, kWeights = 20, kState = 16;  // for the lock, see skipgram.h
};

// A table has one or more classes of rows, each with its own width and rules. RowKind 2c is a short row of class c,
// kind 2c + 1 a full one.
using RowKind = uint8_t;
inline constexpr int kMostClasses = 16, kMostKinds = 2 * kMostClasses;
inline constexpr int kAnyClass = -1;
constexpr bool is_full(RowKind kind) { return (kind & 1) != 0; }
constexpr int class_of(RowKind kind) { return kind >> 1; }
constexpr RowKind kind_of(int row_class, bool full) {
  return static_cast<RowKind>(2 * row_class + static_cast<int>(full));
}

// The sizes of rows, by kind.
class Layout {
 public:
  Layout() = default;
  void add_class(int factors, int embed_state, int embedx_state) {
    for (const bool full : {false, true}) {
      Sizes& size = sizes_[kinds_++];
      size.factors = full ? factors : 0;
      size.embed_state = embed_state;
      size.embedx_state = full ? embedx_state : 0;
      const int bytes = Row::kWeights + 4 * (1 + size.factors);
      const int line = (bytes + 63) / 64 * 64;  // round up to whole cache lines if that costs almost nothing
      size.hot = line - bytes <= line / 32 ? line : bytes;
      size.cold = Row::kState + 4 * (embed_state + size.embedx_state);
      most_bytes_ = std::max(most_bytes_, size.hot + size.cold);
    }
    widest_ = std::max(widest_, factors);
  }

  RowKind kinds() const { return kinds_; }
  int widest() const { return widest_; }          // factors of the widest class
  int most_bytes() const { return most_bytes_; }  // of any row
  int factors(RowKind kind) const { return sizes_[kind].factors; }
  int embed_state(RowKind kind) const { return sizes_[kind].embed_state; }
  int embedx_state(RowKind kind) const { return sizes_[kind].embedx_state; }
  int hot_bytes(RowKind kind) const { return sizes_[kind].hot; }
  int cold_bytes(RowKind kind) const { return sizes_[kind].cold; }
  int bytes(RowKind kind) const { return sizes_[kind].hot + sizes_[kind].cold; }
  // The bytes of a row that hold its data, without overhead: epoch, flags, padding.
  int own_bytes(RowKind kind) const {
    const Sizes& size = sizes_[kind];
    return 8 + 8 + 8 + 4 + 2 + 2 + 4 * (1 + size.embed_state + size.factors + size.embedx_state);
  }
  float* state_of_embedx(Row row, RowKind kind) const { return row.state_of_embed() + sizes_[kind].embed_state; }

 private:
  struct Sizes {
    int factors = 0, embed_state = 0, embedx_state = 0, hot = 0, cold = 0;
  };
  Sizes sizes_[kMostKinds];
  RowKind kinds_ = 0;
  int widest_ = 0, most_bytes_ = 0;
};

}  // namespace clickfleet
