#include <unistd.h>

#include <cstring>

#include "check.h"

constexpr unsigned kMostSeconds = 900;  // of one test on a busy machine; one that hangs ends the program

int main(int argc, char** argv) {
  int passed = 0;
  for (const auto& test : clickfleet::test::cases()) {
    if (argc > 1 && test.name.find(argv[1]) == std::string::npos) continue;
    std::fprintf(stderr, "%s\n", test.name.c_str());
    alarm(kMostSeconds);
    test.run();
    ++passed;
  }
  std::printf("%d passed, 0 failed\n", passed);
  return passed == 0;
}
