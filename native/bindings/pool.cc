#include "pool.h"

#include <nanobind/stl/optional.h>

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

using Offsets = Array<const int64_t>;
using Where = Array<const uint32_t>;
using MaybeFloats = std::optional<Array<const float>>;
using MaybeBytes = std::optional<Array<const uint8_t>>;

// Checks and wraps the keys of a batch that refer to `rows` pulled rows.
Ragged ragged(const Offsets& offsets, const Where& where, const MaybeFloats& values, const MaybeBytes& mean,
              size_t slots, size_t rows) {
  need(ascending(offsets.data(), offsets.size(), where.size()), "offsets must not decrease or point outside the keys");
  need(slots == 0 ? offsets.size() == 1 : (offsets.size() - 1) % slots == 0, "every row needs one offset per slot");
  need(below(where.data(), where.size(), rows), "a key points outside the rows");
  need(fits(values, where.size()), "values must have one entry per key");
  need(fits(mean, slots), "mean must have one entry per slot");
  return {slots == 0 ? 0 : (offsets.size() - 1) / slots,
          slots,
          offsets.data(),
          where.data(),
          data_or_null(values),
          data_or_null(mean)};
}

// Returns whether the pooled arrays have the shape of these cells. Without slots there are no cells, for any number of
// rows.
template <class First, class Factors>
bool shaped(const Ragged& keys, const First& first, const Factors& factors) {
  return factors.shape(0) == first.shape(0) && factors.shape(1) == first.shape(1) &&
         (keys.slots == 0 || first.shape(0) == keys.batch);
}

}  // namespace

void bind_pool(nb::module_& m) {
  m.def(
      "pool",
      [](const Offsets& offsets, const Where& where, const MaybeFloats& values, const MaybeBytes& mean,
         const Array<const float, 2>& rows, const Array<float, 2>& first, const Array<float, 3>& factors) {
        const Ragged keys = ragged(offsets, where, values, mean, first.shape(1), rows.shape(0));
        need(shaped(keys, first, factors) && rows.shape(1) == 1 + factors.shape(2), "array shapes do not match");
        const nb::gil_scoped_release nogil;
        pool(keys, rows.data(), static_cast<int>(factors.shape(2)), first.data(), factors.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("values").none(), nb::arg("mean").none(), nb::arg("rows"),
      nb::arg("first").noconvert(), nb::arg("factors").noconvert());
  m.def(
      "unpool",
      [](const Offsets& offsets, const Where& where, const MaybeFloats& values, const MaybeBytes& mean,
         const Array<const float, 2>& first, const Array<const float, 3>& factors, const Array<float, 2>& grads) {
        const Ragged keys = ragged(offsets, where, values, mean, first.shape(1), grads.shape(0));
        need(shaped(keys, first, factors) && grads.shape(1) == 1 + factors.shape(2), "array shapes do not match");
        const nb::gil_scoped_release nogil;
        unpool(keys, first.data(), factors.data(), static_cast<int>(factors.shape(2)), grads.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("values").none(), nb::arg("mean").none(), nb::arg("first"),
      nb::arg("factors"), nb::arg("grads").noconvert());
  m.def(
      "count",
      [](const Offsets& offsets, const Where& where, size_t slots, const MaybeFloats& show, const MaybeFloats& click,
         const Array<float>& shows, const Array<float>& clicks, const Array<uint16_t>& slot) {
        const Ragged keys = ragged(offsets, where, {}, {}, slots, shows.size());
        need(clicks.size() == shows.size() && slot.size() == shows.size(), "array shapes do not match");
        need(slots == 0 || (fits(show, keys.batch) && fits(click, keys.batch)),
             "show and click must have one entry per row");
        const nb::gil_scoped_release nogil;
        count(keys, data_or_null(show), data_or_null(click), shows.data(), clicks.data(), slot.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("slots"), nb::arg("show").none(), nb::arg("click").none(),
      nb::arg("shows").noconvert(), nb::arg("clicks").noconvert(), nb::arg("slot").noconvert());
}

}  // namespace clickfleet
