// A minimal test harness: TEST(name) { CHECK(...); } in any file. `core_tests [part of a name]` runs the tests.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace clickfleet::test {

struct Case {
  std::string name;
  std::function<void()> run;
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
struct Register {
  Register(const char* name, std::function<void()> run) { cases().push_back({name, std::move(run)}); }
};

}  // namespace clickfleet::test

#define TEST(name)                                                             \
  static void test_##name();                                                   \
  static const clickfleet::test::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)
