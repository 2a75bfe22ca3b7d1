#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  int passed = 0;
  for (const auto& test : clickfleet::test::cases()) {
    if (argc > 1 && test.name.find(argv[1]) == std::string::npos) continue;
    std::fprintf(stderr, "%s\n", test.name.c_str());
    test.run();
    ++passed;
  }
  std::printf("%d passed, 0 failed\n", passed);
  return passed == 0;
}
