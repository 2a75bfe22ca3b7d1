#include "recurrence.h"

#include <nanobind/stl/optional.h>

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

// Checks that all events are below `events` and all places below `places`.
Sequences sequences(const Array<const int64_t>& from, const Array<const int64_t>& to,
                    const Array<const int64_t>& length, size_t events, size_t places) {
  need(from.size() == length.size() && to.size() == length.size(), "from, to and length must have the same size");
  const auto inside = [](int64_t start, int64_t n, size_t size) {
    return start >= 0 && n >= 0 && static_cast<size_t>(start) <= size && static_cast<size_t>(n) <= size - start;
  };
  for (size_t i = 0; i < length.size(); ++i)
    need(inside(from.data()[i], length.data()[i], events) && inside(to.data()[i], length.data()[i], places),
         "a sequence ends behind the last event");
  return {from.data(), to.data(), length.data(), length.size()};
}

using Ints = Array<const int64_t>;
using Matrix = Array<const float, 2>;
using Factors = std::optional<Array<const float>>;

Gru gru(const Matrix& gates, const Matrix& recurrent, const Factors& factors, size_t places) {
  const size_t width = recurrent.shape(1);
  need(width > 0 && recurrent.shape(0) == 3 * width && gates.shape(1) == 3 * width && fits(factors, places),
       "array shapes do not match");
  return {gates.data(), recurrent.data(), data_or_null(factors), width};
}

bool has_shape(const auto& array, size_t rows, size_t columns) {
  return array.shape(0) == rows && array.shape(1) == columns;
}

}  // namespace

void bind_recurrence(nb::module_& m) {
  m.def("gru_kept", &gru_kept, nb::arg("width"));
  m.def(
      "gru_forward",
      [](const Matrix& gates, const Matrix& recurrent, const Factors& factors, const Ints& from, const Ints& to,
         const Ints& length, const Array<float, 2>& states, const std::optional<Array<float, 2>>& kept) {
        const size_t places = states.shape(0);
        const Gru unit = gru(gates, recurrent, factors, places);
        need(states.shape(1) == unit.width && (!kept || has_shape(*kept, places, gru_kept(unit.width))),
             "array shapes do not match");
        const Sequences all = sequences(from, to, length, gates.shape(0), places);
        const nb::gil_scoped_release nogil;
        gru_forward(unit, all, states.data(), kept ? kept->data() : nullptr);
      },
      nb::arg("gates"), nb::arg("recurrent"), nb::arg("factors").none(), nb::arg("from"), nb::arg("to"),
      nb::arg("length"), nb::arg("states").noconvert(), nb::arg("kept").none().noconvert());
  m.def(
      "gru_backward",
      [](const Matrix& gates, const Matrix& recurrent, const Factors& factors, const Ints& from, const Ints& to,
         const Ints& length, const Matrix& states, const Matrix& kept, const std::optional<Matrix>& d_states,
         const std::optional<Matrix>& d_last, const Array<float, 2>& d_gates, const Array<float, 2>& d_recurrent,
         const std::optional<Array<float>>& d_factors, bool shared) {
        const size_t places = states.shape(0);
        const Gru unit = gru(gates, recurrent, factors, places);
        const size_t width = unit.width;
        need(states.shape(1) == width && has_shape(kept, places, gru_kept(width)) &&
                 (!d_states || has_shape(*d_states, places, width)) &&
                 (!d_last || has_shape(*d_last, length.size(), width)) &&
                 has_shape(d_gates, gates.shape(0), 3 * width) && has_shape(d_recurrent, 3 * width, width) &&
                 (!d_factors || d_factors->size() == places),
             "array shapes do not match");
        const Sequences all = sequences(from, to, length, gates.shape(0), places);
        const GruGradients gradients{states.data(),
                                     kept.data(),
                                     d_states ? d_states->data() : nullptr,
                                     d_last ? d_last->data() : nullptr,
                                     d_gates.data(),
                                     d_recurrent.data(),
                                     d_factors ? d_factors->data() : nullptr,
                                     shared};
        const nb::gil_scoped_release nogil;
        gru_backward(unit, all, gradients);
      },
      nb::arg("gates"), nb::arg("recurrent"), nb::arg("factors").none(), nb::arg("from"), nb::arg("to"),
      nb::arg("length"), nb::arg("states"), nb::arg("kept"), nb::arg("d_states").none(), nb::arg("d_last").none(),
      nb::arg("d_gates").noconvert(), nb::arg("d_recurrent").noconvert(), nb::arg("d_factors").none().noconvert(),
      nb::arg("shared"));
  m.def(
      "attend",
      [](const Matrix& states, const Matrix& queries, const Ints& from, const Ints& to, const Ints& length,
         const Array<float>& weights) {
        const size_t width = states.shape(1);
        need(has_shape(queries, length.size(), width), "array shapes do not match");
        const Sequences all = sequences(from, to, length, states.shape(0), weights.size());
        const nb::gil_scoped_release nogil;
        attend(states.data(), queries.data(), all, width, weights.data());
      },
      nb::arg("states"), nb::arg("queries"), nb::arg("from"), nb::arg("to"), nb::arg("length"),
      nb::arg("weights").noconvert());
  m.def(
      "attend_backward",
      [](const Matrix& states, const Matrix& queries, const Ints& from, const Ints& to, const Ints& length,
         const Array<const float>& weights, const Array<const float>& d_weights, const Array<float, 2>& d_states,
         const Array<float, 2>& d_queries) {
        const size_t width = states.shape(1);
        need(has_shape(queries, length.size(), width) && d_weights.size() == weights.size() &&
                 has_shape(d_states, states.shape(0), width) && has_shape(d_queries, length.size(), width),
             "array shapes do not match");
        const Sequences all = sequences(from, to, length, states.shape(0), weights.size());
        const nb::gil_scoped_release nogil;
        attend_backward(states.data(), queries.data(), all, width, weights.data(), d_weights.data(), d_states.data(),
                        d_queries.data());
      },
      nb::arg("states"), nb::arg("queries"), nb::arg("from"), nb::arg("to"), nb::arg("length"), nb::arg("weights"),
      nb::arg("d_weights"), nb::arg("d_states").noconvert(), nb::arg("d_queries").noconvert());
  m.def(
      "next_events",
      [](const Matrix& states, const Matrix& events, const Ints& starts, const Ints& lengths,
         const Array<float, 2>& d_states, const Array<float, 2>& d_events) {
        const size_t size = states.shape(0), width = states.shape(1);
        need(has_shape(events, size, width) && has_shape(d_states, size, width) && has_shape(d_events, size, width),
             "array shapes do not match");
        const Sequences all = sequences(starts, starts, lengths, size, size);
        const nb::gil_scoped_release nogil;
        return next_events(states.data(), events.data(), all.from, all.length, all.size, width, d_states.data(),
                           d_events.data());
      },
      nb::arg("states"), nb::arg("events"), nb::arg("starts"), nb::arg("lengths"), nb::arg("d_states").noconvert(),
      nb::arg("d_events").noconvert());
}

}  // namespace clickfleet
