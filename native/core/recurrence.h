// Gated recurrent units over jagged sequences, and the attention and the loss that dien needs beside them.
//
// The events of all histories are packed: the events of history u are the rows starts[u] … starts[u] + lengths[u] - 1
// of an array. A sequence is one pass over a history; several sequences may share a history. All results are the same
// on every CPU.
#pragma once
#include <cstddef>
#include <cstdint>

namespace clickfleet {

// Sequences of a recurrence. Sequence i reads the events from[i] … from[i] + length[i] - 1 and writes to the places
// to[i] … to[i] + length[i] - 1.
struct Sequences {
  const int64_t *from, *to, *length;
  size_t size;
};

// The recurrence h ← h + a·u ∘ (p − h), from h = 0, with u = σ(x₀ + U₀ h), r = σ(x₁ + U₁ h), p = tanh(x₂ + r ∘ U₂ h).
struct Gru {
  const float* gates;      // [E, 3·width]: x of every event
  const float* recurrent;  // [3·width, width]: U
  const float* factors;    // a of every place; nullptr: 1
  size_t width;
};

// Returns the floats that the forward pass keeps for each place.
size_t gru_kept(size_t width);

// Writes h after every event to states [places, width], and what the backward pass needs to kept [places, gru_kept],
// unless that is nullptr.
void gru_forward(const Gru& gru, const Sequences& sequences, float* states, float* kept);

// What the backward pass reads and writes.
struct GruGradients {
  const float* states;    // of the forward pass
  const float* kept;      // of the forward pass
  const float* d_states;  // [places, width] by every state; nullptr: 0
  const float* d_last;    // [sequences, width] by the last state of each sequence; nullptr: 0
  float* d_gates;         // [E, 3·width], overwritten; if `shared`, added to
  float* d_recurrent;     // [3·width, width], overwritten
  float* d_factors;       // of every place, overwritten; nullptr: not needed
  bool shared;            // several sequences may read an event
};
void gru_backward(const Gru& gru, const Sequences& sequences, const GruGradients& gradients);

// weights of every place = softmax over each sequence of ⟨states of the event, query of the sequence⟩.
void attend(const float* states, const float* queries, const Sequences& sequences, size_t width, float* weights);

// Adds the gradients of `attend` to d_states [E, width] and overwrites d_queries.
void attend_backward(const float* states, const float* queries, const Sequences& sequences, size_t width,
                     const float* weights, const float* d_weights, float* d_states, float* d_queries);

// The mean log loss of telling the next event of a history from the one at the same place of the history before it;
// the first history comes after the last. Overwrites the gradients by states and events, both [E, width].
double next_events(const float* states, const float* events, const int64_t* starts, const int64_t* lengths,
                   size_t histories, size_t width, float* d_states, float* d_events);

}  // namespace clickfleet
