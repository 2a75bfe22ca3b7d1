// The bytes of a row.
//
//   0 show f64 · 8 click f64 · 16 delta_score f32 · 20 unseen_days u16 · 22 slot u16 · 24 epoch u8 · 25 flags u8 · 28
//   key u64 36 embed_w f32 · [40 embedx f32 × D] · state of embed_w · [state of embedx]
//
// What stands in brackets is absent from a short row. Key and weights lie together, because a pull reads just these.
#pragma once
#include <cstdint>
#include <cstring>

namespace clickfleet {

enum Flag : uint8_t {
  kChanged = 1,  // differs from what was last published
  kListed = 2,   // readers of the published log have it
  kPending = 4,  // part of changes that were cut and not yet committed
  kEmitted = 8,  // those changes carry its values (without it: they carry its deletion)
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

// A view of one row. Floats are aligned to 4 bytes, the wider fields are not aligned.
struct Row {
  char* at;

  double show() const { return load<double>(at); }
  double click() const { return load<double>(at + 8); }
  float delta_score() const { return load<float>(at + 16); }
  uint16_t unseen_days() const { return load<uint16_t>(at + 20); }
  uint16_t slot() const { return load<uint16_t>(at + 22); }
  uint8_t& epoch() const { return reinterpret_cast<uint8_t&>(at[24]); }
  uint8_t& flags() const { return reinterpret_cast<uint8_t&>(at[25]); }
  uint64_t key() const { return load<uint64_t>(at + kKey); }
  float* weights() const { return reinterpret_cast<float*>(at + kWeights); }

  void set_show(double x) const { store(at, x); }
  void set_click(double x) const { store(at + 8, x); }
  void set_delta_score(float x) const { store(at + 16, x); }
  void set_unseen_days(uint16_t x) const { store(at + 20, x); }
  void set_slot(uint16_t x) const { store(at + 22, x); }
  void set_key(uint64_t x) const { store(at + kKey, x); }

  static constexpr int kKey = 28, kWeights = 36;
};

struct Layout {
  int factors = 0, embed_state = 0, embedx_state = 0;

  int bytes(bool full) const {
    const int floats = 1 + embed_state + (full ? factors + embedx_state : 0);
    return (Row::kWeights + 4 * floats + 7) / 8 * 8;
  }
  // What a row holds that a user asked for; the rest of `bytes` is ours: epoch, flags, padding.
  int own_bytes(bool full) const {
    return 8 + 8 + 8 + 4 + 2 + 2 + 4 * (1 + embed_state + (full ? factors + embedx_state : 0));
  }
  float* embedx(Row row) const { return row.weights() + 1; }
  float* state_of_embed(Row row, bool full) const { return row.weights() + 1 + (full ? factors : 0); }
  float* state_of_embedx(Row row) const { return row.weights() + 1 + factors + embed_state; }
};

}  // namespace clickfleet
