#include "pool.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

using Offsets = Array<const int64_t>;
using Where = Array<const uint32_t>;
using MaybeFloats = std::optional<Array<const float>>;
using MaybeBytes = std::optional<Array<const uint8_t>>;

// Checks and wraps the keys of a batch that refer to `rows` pulled rows. Rows have `columns` columns of keys, of which
// the first `slots` are pooled.
Ragged ragged(const Offsets& offsets, const Where& where, const MaybeFloats& values, const MaybeBytes& mean,
              size_t slots, size_t columns, size_t rows) {
  need(ascending(offsets.data(), offsets.size(), where.size()), "offsets must not decrease or point outside the keys");
  need(slots <= columns && (columns == 0 ? offsets.size() == 1 : (offsets.size() - 1) % columns == 0),
       "every row needs one offset per column of keys");
  need(below(where.data(), where.size(), rows), "a key points outside the rows");
  need(fits(values, where.size()), "values must have one entry per key");
  need(fits(mean, slots), "mean must have one entry per slot");
  return {columns == 0 ? 0 : (offsets.size() - 1) / columns,
          slots,
          offsets.data(),
          where.data(),
          data_or_null(values),
          data_or_null(mean),
          columns,
          nullptr};
}

// Checks that the distinct histories `from` fit an array [distinct, longest, columns, factors] behind their rows.
Events checked_events(const Ragged& keys, size_t first, const Array<const int64_t>& from, size_t distinct,
                      size_t longest, size_t columns) {
  need(columns >= 1 && first <= keys.columns && columns <= keys.columns - first, "unknown columns of keys");
  need(from.size() == distinct, "array shapes do not match");
  for (size_t i = 0; i < distinct; ++i) {
    need(from.data()[i] >= 0 && static_cast<size_t>(from.data()[i]) < keys.batch, "a history points outside the rows");
    const int64_t* const ends = keys.offsets + static_cast<size_t>(from.data()[i]) * keys.columns + first;
    for (size_t c = 0; c < columns; ++c)
      need(static_cast<size_t>(ends[c + 1] - ends[c]) <= longest && ends[c + 1] - ends[c] == ends[1] - ends[0],
           "a history is longer than the array, or its columns differ");
  }
  return {first, columns, distinct, longest, from.data()};
}

// Returns whether the pooled arrays have the shape of these cells. Without slots there are no cells, for any number of
// rows.
template <class First, class Factors>
bool shaped(const Ragged& keys, const First& first, const Factors& factors) {
  return factors.shape(0) == first.shape(0) && factors.shape(1) == first.shape(1) &&
         (keys.columns == 0 || first.shape(0) == keys.batch);
}

}  // namespace

void bind_pool(nb::module_& m) {
  m.def(
      "pool",
      [](const Offsets& offsets, const Where& where, const MaybeFloats& values, const MaybeBytes& mean, size_t columns,
         const Array<const float, 2>& rows, const Array<float, 2>& first, const Array<float, 3>& factors) {
        const Ragged keys = ragged(offsets, where, values, mean, first.shape(1), columns, rows.shape(0));
        need(shaped(keys, first, factors) && rows.shape(1) == 1 + factors.shape(2), "array shapes do not match");
        const nb::gil_scoped_release nogil;
        pool(keys, rows.data(), static_cast<int>(factors.shape(2)), first.data(), factors.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("values").none(), nb::arg("mean").none(), nb::arg("columns"),
      nb::arg("rows"), nb::arg("first").noconvert(), nb::arg("factors").noconvert());
  m.def(
      "unpool",
      [](const Offsets& offsets, const Where& where, const MaybeFloats& values, const MaybeBytes& mean, size_t columns,
         const Array<const float, 2>& first, const Array<const float, 3>& factors, const Array<float, 2>& grads) {
        const Ragged keys = ragged(offsets, where, values, mean, first.shape(1), columns, grads.shape(0));
        need(shaped(keys, first, factors) && grads.shape(1) == 1 + factors.shape(2), "array shapes do not match");
        const nb::gil_scoped_release nogil;
        unpool(keys, first.data(), factors.data(), static_cast<int>(factors.shape(2)), grads.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("values").none(), nb::arg("mean").none(), nb::arg("columns"),
      nb::arg("first"), nb::arg("factors"), nb::arg("grads").noconvert());
  m.def(
      "count",
      [](const Offsets& offsets, const Where& where, size_t columns, const MaybeFloats& show, const MaybeFloats& click,
         const std::optional<Array<const uint16_t>>& numbers, const Array<float>& shows, const Array<float>& clicks,
         const Array<uint16_t>& slot) {
        const Ragged keys = ragged(offsets, where, {}, {}, columns, columns, shows.size());
        need(clicks.size() == shows.size() && slot.size() == shows.size(), "array shapes do not match");
        need(columns == 0 || (fits(show, keys.batch) && fits(click, keys.batch)),
             "show and click must have one entry per row");
        need(fits(numbers, columns), "numbers must have one entry per column of keys");
        const nb::gil_scoped_release nogil;
        count(keys, data_or_null(show), data_or_null(click), data_or_null(numbers), shows.data(), clicks.data(),
              slot.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("columns"), nb::arg("show").none(), nb::arg("click").none(),
      nb::arg("numbers").none(), nb::arg("shows").noconvert(), nb::arg("clicks").noconvert(),
      nb::arg("slot").noconvert());
  m.def(
      "find_events",
      [](const Offsets& offsets, const Where& where, const MaybeFloats& values, size_t columns, size_t first,
         size_t count, const Array<int64_t>& row, const Array<int64_t>& from, const Array<int64_t>& length) {
        const Ragged keys = ragged(offsets, where, values, {}, 0, columns, SIZE_MAX);
        need(count >= 1 && first <= columns && count <= columns - first, "unknown columns of keys");
        need(row.size() == keys.batch && from.size() == keys.batch && length.size() == keys.batch,
             "array shapes do not match");
        Events events{first, count};
        {
          const nb::gil_scoped_release nogil;
          if (!find_events(keys, events, row.data(), from.data(), length.data())) events.distinct = SIZE_MAX;
        }
        need(events.distinct != SIZE_MAX, "the columns of a history have different lengths");
        return std::pair(events.distinct, events.longest);
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("values").none(), nb::arg("columns"), nb::arg("first"),
      nb::arg("count"), nb::arg("row").noconvert(), nb::arg("origin").noconvert(), nb::arg("length").noconvert(),
      "Find the distinct histories of consecutive rows. Return their number and the longest length.");
  m.def(
      "gather",
      [](const Offsets& offsets, const Where& where, const MaybeFloats& values, size_t columns, size_t first,
         const Array<const int64_t>& from, const Array<const float, 2>& rows, const Array<float, 4>& out) {
        const Ragged keys = ragged(offsets, where, values, {}, 0, columns, rows.shape(0));
        need(rows.shape(1) == 1 + out.shape(3), "array shapes do not match");
        const Events events = checked_events(keys, first, from, out.shape(0), out.shape(1), out.shape(2));
        const nb::gil_scoped_release nogil;
        gather(keys, events, rows.data(), static_cast<int>(out.shape(3)), out.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("values").none(), nb::arg("columns"), nb::arg("first"),
      nb::arg("origin"), nb::arg("rows"), nb::arg("out").noconvert());
  m.def(
      "scatter",
      [](const Offsets& offsets, const Where& where, const MaybeFloats& values, size_t columns, size_t first,
         const Array<const int64_t>& from, const Array<const float, 4>& out, const Array<float, 2>& grads) {
        const Ragged keys = ragged(offsets, where, values, {}, 0, columns, grads.shape(0));
        need(grads.shape(1) == 1 + out.shape(3), "array shapes do not match");
        const Events events = checked_events(keys, first, from, out.shape(0), out.shape(1), out.shape(2));
        const nb::gil_scoped_release nogil;
        scatter(keys, events, out.data(), static_cast<int>(out.shape(3)), grads.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("values").none(), nb::arg("columns"), nb::arg("first"),
      nb::arg("origin"), nb::arg("out"), nb::arg("grads").noconvert());
}

}  // namespace clickfleet
