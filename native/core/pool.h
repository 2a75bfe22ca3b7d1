// Pools rows into slots, gathers the rows of histories, and the gradients of both. Training, batch scoring and the
// server share this code.
#pragma once
#include <cstddef>
#include <cstdint>

namespace clickfleet {

// The keys of a batch. Row b has the keys [offsets[b·C + c], offsets[b·C + c + 1]) in column c of C; key i refers to
// row `where[i]` of the pulled rows. The first S columns are pooled, the others are columns of histories.
struct Ragged {
  size_t batch = 0, slots = 0;
  const int64_t* offsets = nullptr;
  const uint32_t* where = nullptr;
  const float* values = nullptr;  // factor of each key's row before pooling; nullptr: 1
  const uint8_t* mean = nullptr;  // [slots]: whether to divide the sum by the number of keys; nullptr: for no slot
  size_t columns = 0;             // C, at least `slots`
  const int64_t* ends =
      nullptr;  // [batch·C]: where the keys of each cell end, if rows share cells; nullptr: offsets + 1

  // Where the keys of each column of a row begin and end.
  const int64_t* row_begins(size_t b) const { return offsets + b * columns; }
  const int64_t* row_ends(size_t b) const { return (ends == nullptr ? offsets + 1 : ends) + b * columns; }
};

// first[b, s] and factors[b, s, :] = Σ value · rows[where, 0] and rows[where, 1:]; zeros if there is no key. A cell
// that two consecutive rows share is pooled once.
void pool(const Ragged& keys, const float* rows, int factors, float* first, float* factors_out);

// The gradient of `pool`: grads[u, :] += Σ value · d(first, factors). Adds to the contents of `grads`.
void unpool(const Ragged& keys, const float* d_first, const float* d_factors, int factors, float* grads);

// The statistics of a push: shows[u] += Σ show[b], clicks[u] += Σ click[b], slot[u] = the slot of one occurrence. The
// keys of column c belong to the slot numbers[c]; nullptr: c.
void count(const Ragged& keys, const float* show, const float* click, const uint16_t* numbers, float* shows,
           float* clicks, uint16_t* slot);

// The events of a history: the keys of the columns [first, first + columns), which have equal lengths in every row.
// Consecutive rows often share a history, such as the candidates of one user. It then occurs once among the distinct
// histories.
struct Events {
  size_t first = 0, columns = 0;
  size_t distinct = 0, longest = 0;
  const int64_t* from = nullptr;  // [distinct]: a row of the batch that has the history
};

// Finds the distinct histories. Writes row[b], the index of row b's history among them, from[i] and the length[i] of
// each; all have room for one number per row. Returns false if two columns differ in length.
bool find_events(const Ragged& keys, Events& events, int64_t* row, int64_t* from, int64_t* length);

// out[i, l, c, :] = value · rows[where, 1:] of event l in column c of the distinct history i; zeros behind its last
// event.
void gather(const Ragged& keys, const Events& events, const float* rows, int factors, float* out);

// The gradient of `gather`. Adds to the contents of `grads`.
void scatter(const Ragged& keys, const Events& events, const float* d_out, int factors, float* grads);

}  // namespace clickfleet
