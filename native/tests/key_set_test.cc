#include "key_set.h"

#include <algorithm>
#include <set>

#include "check.h"

namespace clickfleet {
namespace {

TEST(a_key_set_has_what_was_added_and_nothing_else) {
  KeySet held;
  std::set<uint64_t> wanted;
  std::vector<uint64_t> keys;
  for (uint64_t i = 0; i < 20'000; ++i) keys.push_back(i % 3 == 0 ? i / 2 : mix64(i));  // includes 0 and duplicates
  for (size_t at = 0; at < keys.size(); at += 500) {
    if (at % 1000 == 0) {
      held.add(keys.data() + at, 500);
    } else {
      std::vector<uint8_t> is_new(500);
      held.insert(keys.data() + at, 500, is_new.data());
      for (size_t i = 0; i < 500; ++i) CHECK((is_new[i] != 0) == wanted.insert(keys[at + i]).second);
    }
    wanted.insert(keys.begin() + static_cast<std::ptrdiff_t>(at), keys.begin() + static_cast<std::ptrdiff_t>(at) + 500);
    CHECK(held.size() == wanted.size());
  }
  std::vector<uint64_t> asked = keys;
  for (uint64_t i = 0; i < 5'000; ++i) asked.push_back(mix64(i << 20));
  std::vector<uint8_t> has(asked.size());
  held.has(asked.data(), asked.size(), has.data());
  for (size_t i = 0; i < asked.size(); ++i) CHECK((has[i] != 0) == wanted.contains(asked[i]));
  std::vector<uint64_t> all(held.size());
  held.copy(all.data());
  CHECK(std::set<uint64_t>(all.begin(), all.end()) == wanted);
}

TEST(keys_in_the_order_of_their_hashes_do_not_crowd_a_key_set) {
  std::vector<uint64_t> keys(100'000);
  for (uint64_t i = 0; i < keys.size(); ++i) keys[i] = i + 1;
  std::sort(keys.begin(), keys.end(), [](uint64_t a, uint64_t b) { return mix64(a) < mix64(b); });
  KeySet held;
  for (size_t at = 0; at < keys.size(); at += 10'000) {
    held.add(keys.data() + at, 10'000);
    CHECK(held.longest_run() < 200);
  }
}

}  // namespace
}  // namespace clickfleet
