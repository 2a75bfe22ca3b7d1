// Plain text: one sentence per line, words separated by whitespace.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "../hash.h"

namespace clickfleet {

struct Sentences {
  std::vector<uint64_t> keys;    // of the words, under the seed of one slot
  std::vector<int64_t> offsets;  // two per line: its words belong to the first of two slots
};

// The text must consist of whole lines. A carriage return counts as whitespace.
inline Sentences parse_sentences(std::string_view text, uint64_t seed) {
  Sentences found;
  found.keys.reserve(text.size() / 5);
  found.offsets.push_back(0);
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; };
  while (at < end) {
    if (*at == '\n') {
      found.offsets.insert(found.offsets.end(), 2, static_cast<int64_t>(found.keys.size()));
      ++at;
    } else if (blank(*at)) {
      ++at;
    } else {
      const char* const begin = at;
      while (at < end && !blank(*at)) ++at;
      found.keys.push_back(hash64(seed, begin, static_cast<size_t>(at - begin)));
    }
  }
  return found;
}

}  // namespace clickfleet
