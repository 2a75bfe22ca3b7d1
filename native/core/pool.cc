#include "pool.h"

#include <algorithm>
#include <cstring>

namespace clickfleet {
namespace {

// Calls visit(b, c, begin, end, share) for the cells of the first `columns` columns. The share of each key is 1, or
// that of a mean.
template <class Visit>
void each_cell(const Ragged& keys, size_t columns, const Visit& visit) {
  for (size_t b = 0; b < keys.batch; ++b) {
    const int64_t *const begins = keys.row_begins(b), *const ends = keys.row_ends(b);
    for (size_t c = 0; c < columns; ++c) {
      const int64_t begin = begins[c], end = ends[c];
      const float share =
          keys.mean != nullptr && keys.mean[c] != 0 && end > begin ? 1.0F / static_cast<float>(end - begin) : 1.0F;
      visit(b, c, begin, end, share);
    }
  }
}

// Calls visit(b, c, i, weight) for every key i of the first `columns` columns. The weight is the key's value, divided
// by the number of keys if the slot takes the mean.
template <class Visit>
void each_key(const Ragged& keys, size_t columns, const Visit& visit) {
  each_cell(keys, columns, [&](size_t b, size_t c, int64_t begin, int64_t end, float share) {
    for (int64_t i = begin; i < end; ++i) visit(b, c, i, keys.values == nullptr ? share : share * keys.values[i]);
  });
}

// Calls visit(place, i) for every key i of the distinct histories; `place` is that of its factors among [i, l, c].
template <class Visit>
void each_event(const Ragged& keys, const Events& events, const Visit& visit) {
  for (size_t h = 0; h < events.distinct; ++h) {
    const auto b = static_cast<size_t>(events.from[h]);
    const int64_t *const begins = keys.row_begins(b) + events.first, *const ends = keys.row_ends(b) + events.first;
    for (size_t c = 0; c < events.columns; ++c) {
      size_t place = h * events.longest * events.columns + c;
      for (int64_t i = begins[c]; i < ends[c]; ++i, place += events.columns) visit(place, i);
    }
  }
}

// Returns whether the keys [a, a + n) and [b, b + n) and their values are the same.
bool same(const Ragged& keys, int64_t a, int64_t b, size_t n) {
  return a == b || (std::memcmp(keys.where + a, keys.where + b, n * sizeof(uint32_t)) == 0 &&
                    (keys.values == nullptr || std::memcmp(keys.values + a, keys.values + b, n * sizeof(float)) == 0));
}

// Returns whether two rows have the same history, which is as long in both.
bool same_history(const Ragged& keys, const Events& events, size_t a, size_t b) {
  const int64_t *const one = keys.row_begins(a) + events.first, *const other = keys.row_begins(b) + events.first;
  const auto n = static_cast<size_t>(keys.row_ends(a)[events.first] - one[0]);
  for (size_t c = 0; c < events.columns; ++c)
    if (!same(keys, one[c], other[c], n)) return false;
  return true;
}

}  // namespace

void pool(const Ragged& keys, const float* rows, int factors, float* first, float* factors_out) {
  const auto d = static_cast<size_t>(factors);
  for (size_t i = 0; i < keys.batch * keys.slots; ++i) first[i] = 0;
  for (size_t i = 0; i < keys.batch * keys.slots * d; ++i) factors_out[i] = 0;
  each_cell(keys, keys.slots, [&](size_t b, size_t s, int64_t begin, int64_t end, float share) {
    const size_t cell = b * keys.slots + s;
    float* out = factors_out + cell * d;
    if (keys.ends != nullptr && b > 0 && end > begin + 1 && keys.row_begins(b - 1)[s] == begin &&
        keys.row_ends(b - 1)[s] == end) {  // shared with the previous row
      first[cell] = first[cell - keys.slots];
      std::copy_n(out - keys.slots * d, d, out);
      return;
    }
    for (int64_t i = begin; i < end; ++i) {
      const float weight = keys.values == nullptr ? share : share * keys.values[i];
      const float* row = rows + keys.where[i] * (d + 1);
      first[cell] += weight * row[0];
      for (size_t k = 0; k < d; ++k) out[k] += weight * row[1 + k];
    }
  });
}

void unpool(const Ragged& keys, const float* d_first, const float* d_factors, int factors, float* grads) {
  const auto d = static_cast<size_t>(factors);
  each_key(keys, keys.slots, [&](size_t b, size_t s, int64_t i, float weight) {
    const size_t cell = b * keys.slots + s;
    float* grad = grads + keys.where[i] * (d + 1);
    const float* in = d_factors + cell * d;
    if (d_first != nullptr) grad[0] += weight * d_first[cell];
    for (size_t k = 0; k < d; ++k) grad[1 + k] += weight * in[k];
  });
}

void count(const Ragged& keys, const float* show, const float* click, const uint16_t* numbers, float* shows,
           float* clicks, uint16_t* slot) {
  each_key(keys, keys.columns, [&](size_t b, size_t c, int64_t i, float) {
    const uint32_t u = keys.where[i];
    shows[u] += show == nullptr ? 1.0F : show[b];
    clicks[u] += click == nullptr ? 0.0F : click[b];
    slot[u] = numbers == nullptr ? static_cast<uint16_t>(c) : numbers[c];
  });
}

bool find_events(const Ragged& keys, Events& events, int64_t* row, int64_t* from, int64_t* length) {
  events.distinct = events.longest = 0;
  events.from = from;
  for (size_t b = 0; b < keys.batch; ++b) {
    const int64_t *const begins = keys.row_begins(b) + events.first, *const ends = keys.row_ends(b) + events.first;
    const int64_t n = ends[0] - begins[0];
    for (size_t c = 1; c < events.columns; ++c)
      if (ends[c] - begins[c] != n) return false;
    const size_t last = events.distinct - 1;  // the last distinct history
    if (events.distinct == 0 || length[last] != n || !same_history(keys, events, static_cast<size_t>(from[last]), b)) {
      from[events.distinct] = static_cast<int64_t>(b);
      length[events.distinct++] = n;
      events.longest = std::max(events.longest, static_cast<size_t>(n));
    }
    row[b] = static_cast<int64_t>(events.distinct - 1);
  }
  return true;
}

void gather(const Ragged& keys, const Events& events, const float* rows, int factors, float* out) {
  const auto d = static_cast<size_t>(factors);
  const size_t event = events.columns * d;
  for (size_t h = 0; h < events.distinct; ++h) {
    const auto b = static_cast<size_t>(events.from[h]);
    const auto n = static_cast<size_t>(keys.row_ends(b)[events.first] - keys.row_begins(b)[events.first]);
    std::fill(out + (h * events.longest + n) * event, out + (h + 1) * events.longest * event, 0.0F);
  }
  each_event(keys, events, [&](size_t place, int64_t i) {
    const float* row = rows + keys.where[i] * (d + 1) + 1;
    const float value = keys.values == nullptr ? 1.0F : keys.values[i];
    for (size_t k = 0; k < d; ++k) out[place * d + k] = value * row[k];
  });
}

void scatter(const Ragged& keys, const Events& events, const float* d_out, int factors, float* grads) {
  const auto d = static_cast<size_t>(factors);
  each_event(keys, events, [&](size_t place, int64_t i) {
    float* grad = grads + keys.where[i] * (d + 1) + 1;
    const float value = keys.values == nullptr ? 1.0F : keys.values[i];
    for (size_t k = 0; k < d; ++k) grad[k] += value * d_out[place * d + k];
  });
}

}  // namespace clickfleet
