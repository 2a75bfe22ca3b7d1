// A fuzz target is FUZZ(name, seeds...) { ... } over `Input& in`. It takes values from the input and passes them to the
// core. No input may crash it, hang it or fail a CHECK; rejecting an input (std::exception) is fine.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "../tests/check.h"

namespace clickfleet::fuzz {

// The bytes of an input, consumed from the front; zeros after the end.
class Input {
 public:
  explicit Input(std::string_view bytes) : left_(bytes) {}
  bool empty() const { return left_.empty(); }
  size_t size() const { return left_.size(); }

  template <class T>
  T take() {
    T value{};
    const size_t n = std::min(sizeof value, left_.size());
    if (n > 0) std::memcpy(&value, left_.data(), n);
    left_.remove_prefix(n);
    return value;
  }
  size_t below(size_t n) { return take<uint8_t>() % n; }
  // Takes up to n values, in memory of exactly that size, so that sanitizers detect every access beyond it.
  template <class T>
  std::vector<T> some(size_t n) {
    std::vector<T> values(std::min(n, left_.size() / sizeof(T)));
    for (T& value : values) value = take<T>();
    values.shrink_to_fit();
    return values;
  }
  std::string rest() {
    std::string text(left_);
    left_ = {};
    return text;
  }

 private:
  std::string_view left_;
};

struct Target {
  std::string name;
  std::function<void(Input&)> run;
  std::vector<std::string> seeds;
};
inline std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}
struct Add {
  Add(const char* name, std::function<void(Input&)> run, std::vector<std::string> seeds) {
    targets().push_back({name, std::move(run), std::move(seeds)});
  }
};

// Lines in memory of exactly their size; the last one has its newline.
struct Block {
  explicit Block(std::string text) : bytes(text.begin(), text.end()) {
    if (bytes.empty() || bytes.back() != '\n') bytes.push_back('\n');
    bytes.shrink_to_fit();
  }
  std::string_view view() const { return {bytes.data(), bytes.size()}; }
  std::vector<char> bytes;
};

// Seeds that contain zeros.
template <size_t N>
std::string raw(const char (&text)[N]) {
  return std::string(text, N - 1);
}

}  // namespace clickfleet::fuzz

#define FUZZ(name, ...)                                                             \
  static void fuzz_##name(clickfleet::fuzz::Input& in);                             \
  static const clickfleet::fuzz::Add add_##name(#name, fuzz_##name, {__VA_ARGS__}); \
  static void fuzz_##name([[maybe_unused]] clickfleet::fuzz::Input& in)
