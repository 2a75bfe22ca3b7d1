// core_fuzz RUNS [SEED [TARGET]]: runs this many inputs on every target, or on one. Inputs that reach new code are kept
// and mutated further. core_fuzz - TARGET FILE repeats one input.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <random>

#include "coverage.h"
#include "fuzz.h"

// Makes sanitizers abort, so that the handler below writes the input.
extern "C" const char* __asan_default_options() {
  return "abort_on_error=1:handle_abort=0:max_allocation_size_mb=2048:allocator_may_return_null=1:detect_leaks=0";
}
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

namespace clickfleet::fuzz {
namespace {

constexpr size_t kLongest = 1 << 12;
constexpr unsigned kSeconds = 20;

std::string current, current_name;

void keep_current() {
  const std::string path = "fuzz-" + current_name;
  std::ofstream(path, std::ios::binary) << current;
  std::fprintf(stderr, "%s: crashed on input %s (repeat with core_fuzz - %s %s)\n", current_name.c_str(), path.c_str(),
               current_name.c_str(), path.c_str());
}

void on_signal(int number) {
  keep_current();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

// Returns true if the target rejected the input.
bool run(const Target& target, const std::string& data) {
  current = data;
  const std::vector<char> exact(data.begin(), data.end());
  Input in({exact.data(), exact.size()});
  alarm(kSeconds);
  bool refused = false;
  try {
    target.run(in);
  } catch (const std::exception&) {
    refused = true;
  }
  alarm(0);
  return refused;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t n) { return n == 0 ? 0 : random_() % n; }

  std::string change(std::string data, const std::vector<std::string>& corpus) {
    for (size_t times = size_t{1} << below(4); times > 0; --times) step(data, corpus);
    if (data.size() > kLongest) data.resize(kLongest);
    return data;
  }

 private:
  void step(std::string& data, const std::vector<std::string>& corpus) {
    static const std::string texts[] = {"\n",
                                        "\t",
                                        " ",
                                        ":",
                                        ",",
                                        "|",
                                        "\"",
                                        "\r\n",
                                        std::string(1, '\0'),
                                        "-1",
                                        "1e400",
                                        "nan",
                                        "18446744073709551616",
                                        "0.000000001",
                                        "99999999",
                                        "\xff"};
    static constexpr int64_t numbers[] = {INT64_MIN, INT32_MIN, -1,    0,         1,          2,        31,
                                          127,       255,       65535, INT32_MAX, UINT32_MAX, INT64_MAX};
    const size_t at = below(data.size() + 1);
    switch (below(8)) {
      case 0:
        if (!data.empty()) data[at % data.size()] = static_cast<char>(data[at % data.size()] ^ (1 << below(8)));
        break;
      case 1:
        if (!data.empty()) data[at % data.size()] = static_cast<char>(random_());
        break;
      case 2: {
        const int64_t value = numbers[below(std::size(numbers))];
        const size_t size = size_t{1} << below(4);
        data.replace(at, std::min(size, data.size() - at), reinterpret_cast<const char*>(&value), size);
        break;
      }
      case 3:
        data.erase(at, size_t{1} << below(8));
        break;
      case 4:
        data.insert(at, data.substr(at, size_t{1} << below(8)));
        break;
      case 5:
        data.insert(at, texts[below(std::size(texts))]);
        break;
      case 6: {
        const std::string& other = corpus[below(corpus.size())];
        data = data.substr(0, at) + other.substr(std::min(other.size(), below(other.size() + 1)));
        break;
      }
      default:
        for (size_t n = below(16); n > 0; --n)
          data.insert(data.begin() + static_cast<ptrdiff_t>(at), static_cast<char>(random_()));
    }
  }
  std::mt19937_64 random_;
};

bool is_new(std::vector<uint8_t>& known) {
  bool fresh = false;
  for (size_t i = 0; i < kPlaces; ++i)
    if (reached[i] != 0) {
      fresh = fresh || known[i] == 0;
      known[i] = 1;
      reached[i] = 0;
    }
  return fresh;
}

void explore(const Target& target, size_t runs, uint64_t seed) {
  current_name = target.name;
  Mutator mutator(seed ^ std::hash<std::string>()(target.name));
  std::vector<uint8_t> known(kPlaces);
  std::vector<std::string> corpus = target.seeds;
  if (corpus.empty()) corpus.emplace_back();
  const size_t seeds = corpus.size();
  size_t refused = 0;
  for (size_t i = 0; i < runs; ++i) {
    const bool given = i < seeds;
    const size_t recent = std::min<size_t>(corpus.size(), 32);
    const std::string data =
        given ? corpus[i]
              : mutator.change(corpus[mutator.below(2) == 0 ? mutator.below(corpus.size())
                                                            : corpus.size() - 1 - mutator.below(recent)],
                               corpus);
    refused += run(target, data) ? 1 : 0;
    if (is_new(known) && !given) corpus.push_back(data);
  }
  std::printf("%s: %zu inputs, %zu rejected, %zu kept, %td edges\n", target.name.c_str(), runs, refused, corpus.size(),
              std::count(known.begin(), known.end(), 1));
  std::fflush(stdout);
}

}  // namespace
}  // namespace clickfleet::fuzz

int main(int argc, char** argv) {
  using namespace clickfleet::fuzz;
  for (const int number : {SIGABRT, SIGALRM}) std::signal(number, on_signal);
  if (argc < 2) {
    std::fprintf(stderr, "usage: core_fuzz RUNS [SEED [TARGET]], or core_fuzz - TARGET FILE\n");
    return 2;
  }
  const bool again = std::string_view(argv[1]) == "-" && argc == 4;
  const uint64_t seed = argc > 2 && !again ? std::strtoull(argv[2], nullptr, 10) : 0;
  int done = 0;
  for (const Target& target : targets()) {
    if (const char* const name = again ? argv[2] : argc > 3 ? argv[3] : nullptr; name != nullptr && target.name != name)
      continue;
    ++done;
    if (again) {
      std::ifstream file(argv[3], std::ios::binary);
      current_name = target.name;
      run(target, {std::istreambuf_iterator<char>(file), {}});
    } else {
      explore(target, std::strtoull(argv[1], nullptr, 10), seed);
    }
  }
  return done == 0;
}
