#include "words.h"

#include <algorithm>
#include <cmath>

namespace clickfleet {

Words::Words(const uint64_t* in, const uint64_t* out, const double* keep, const double* noise, size_t n)
    : in_(in, in + n), out_(out, out + n), noise_(n) {
  for (size_t i = 0; i < n; ++i) keep_.push_back(static_cast<uint64_t>(std::clamp(keep[i], 0.0, 1.0) * 0x1p32));

  size_t places = 2;
  while (places < 2 * n) places *= 2;
  index_.assign(places, kNone);
  for (size_t id = 0; id < n; ++id) {
    size_t i = mix64(in_[id]) & (places - 1);
    while (index_[i] != kNone) i = (i + 1) & (places - 1);
    index_[i] = static_cast<uint32_t>(id);
  }

  // Every entry gets one n-th of the total weight: one heavy word makes up for what a light word lacks.
  double total = 0;
  for (size_t i = 0; i < n; ++i) total += noise[i];
  std::vector<double> share(n);
  std::vector<uint32_t> light, heavy;
  for (size_t i = 0; i < n; ++i) {
    share[i] = noise[i] * static_cast<double>(n) / total;
    (share[i] < 1 ? light : heavy).push_back(static_cast<uint32_t>(i));
  }
  const auto set = [&](uint32_t at, double part, uint32_t other) {
    noise_[at] = {static_cast<uint32_t>(std::min(part * 0x1p32, 4294967295.0)), other};
  };
  while (!light.empty() && !heavy.empty()) {
    const uint32_t small = light.back(), large = heavy.back();
    light.pop_back();
    set(small, share[small], large);
    share[large] -= 1 - share[small];
    if (share[large] < 1) {
      heavy.pop_back();
      light.push_back(large);
    }
  }
  for (const auto& rest : {light, heavy})
    for (const uint32_t at : rest) set(at, 1, at);
}

}  // namespace clickfleet
