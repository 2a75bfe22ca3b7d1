#include <sys/time.h>

#include <cstring>

#include "check.h"

constexpr time_t kMostSeconds = 600;  // processor time of one test; one that never ends is killed under its name

int main(int argc, char** argv) {
  int passed = 0;
  for (const auto& test : clickfleet::test::cases()) {
    if (argc > 1 && test.name.find(argv[1]) == std::string::npos) continue;
    std::fprintf(stderr, "%s\n", test.name.c_str());
    const itimerval limit{{0, 0}, {kMostSeconds, 0}};
    setitimer(ITIMER_PROF, &limit, nullptr);
    test.run();
    ++passed;
  }
  std::printf("%d passed, 0 failed\n", passed);
  return passed == 0;
}
