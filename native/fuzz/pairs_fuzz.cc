// Draws pairs from sentences of arbitrary words and takes one step of each kind.
#include "fuzz.h"
#include "pairs.h"

using namespace clickfleet;
using clickfleet::fuzz::raw;

FUZZ(pairs, raw("\3\2\1\0\2\4\0\1\2\3\4\1\0")) {
  const size_t n = 1 + in.below(6), window = 1 + in.below(5), negatives = in.below(4), dim = in.below(20);
  std::vector<uint64_t> ins(n), outs(n);
  std::vector<double> keep(n), noise(n);
  for (size_t i = 0; i < n; ++i) {
    ins[i] = i;
    outs[i] = 100 + i;
    keep[i] = static_cast<double>(in.below(3)) / 2;
    noise[i] = static_cast<double>(in.below(4)) + (i == 0 ? 1e-9 : 0);
  }
  const Words words(ins.data(), outs.data(), keep.data(), noise.data(), n);
  Pairs pairs(words, static_cast<uint32_t>(window), static_cast<uint32_t>(negatives));
  std::vector<uint64_t> keys;
  std::vector<int64_t> offsets{0};
  while (!in.empty()) {
    for (size_t length = in.below(8); length > 0; --length) keys.push_back(in.below(8));
    offsets.push_back(static_cast<int64_t>(keys.size()));
  }
  pairs.draw(keys.data(), offsets.data(), offsets.size() - 1, 1, 3);
  const size_t rows = pairs.gather();
  std::vector<uint64_t> gathered(rows);
  std::vector<float> show(rows), values(rows * (1 + dim), 0.5F), grads(values.size());
  std::vector<uint16_t> slots(rows);
  pairs.rows(gathered.data(), show.data(), slots.data());
  pairs.move(values.data(), static_cast<int>(dim), 0.1F, 0.1F, true, {}, {}, grads.data());
  pairs.gradient(values.data(), static_cast<int>(dim), false, grads.data());
}
