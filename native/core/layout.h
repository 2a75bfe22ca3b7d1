// The bytes of a row, in two parts. A pull reads only the hot part, a push both.
//
//   hot    0 key u64 · 8 delta_score f32 · 12 unseen_days u16 · 14 slot u16 · 16 epoch u8 · 17 flags u8 · 18 lock u8 ·
//          20 embed_w f32 · [24 embedx f32 × D]
//   cold   0 show f64 · 8 click f64 · 16 state of embed_w · [state of embedx]
//
// Short rows lack the fields in brackets. With D = 10 the hot part is one cache line. Byte 19 is padding that aligns
// the weights.
#pragma once
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

struct Layout {
  int factors = 0, embed_state = 0, embedx_state = 0;

  int hot_bytes(bool full) const {
    const int bytes = Row::kWeights + 4 * (1 + (full ? factors : 0));
    const int line = (bytes + 63) / 64 * 64;  // round up to whole cache lines if that costs almost nothing
    return line - bytes <= line / 32 ? line : bytes;
  }
  int cold_bytes(bool full) const { return Row::kState + 4 * (embed_state + (full ? embedx_state : 0)); }
  int bytes(bool full) const { return hot_bytes(full) + cold_bytes(full); }
  // The bytes of a row that hold its data, without overhead: epoch, flags, padding.
  int own_bytes(bool full) const {
    return 8 + 8 + 8 + 4 + 2 + 2 + 4 * (1 + embed_state + (full ? factors + embedx_state : 0));
  }
  float* state_of_embedx(Row row) const { return row.state_of_embed() + embed_state; }
};

}  // namespace clickfleet
