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

Ragged ragged(const Offsets& offsets, const Where& where, const MaybeFloats& values, const MaybeBytes& mean,
              size_t slots) {
  return {slots == 0 ? 0 : (offsets.size() - 1) / slots,
          slots,
          offsets.data(),
          where.data(),
          data_or_null(values),
          data_or_null(mean)};
}

}  // namespace

void bind_pool(nb::module_& m) {
  m.def(
      "pool",
      [](const Offsets& offsets, const Where& where, const MaybeFloats& values, const MaybeBytes& mean,
         const Array<const float, 2>& rows, const Array<float, 2>& first, const Array<float, 3>& factors) {
        const nb::gil_scoped_release nogil;
        pool(ragged(offsets, where, values, mean, first.shape(1)), rows.data(), static_cast<int>(factors.shape(2)),
             first.data(), factors.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("values").none(), nb::arg("mean").none(), nb::arg("rows"),
      nb::arg("first").noconvert(), nb::arg("factors").noconvert());
  m.def(
      "unpool",
      [](const Offsets& offsets, const Where& where, const MaybeFloats& values, const MaybeBytes& mean,
         const Array<const float, 2>& first, const Array<const float, 3>& factors, const Array<float, 2>& grads) {
        const nb::gil_scoped_release nogil;
        unpool(ragged(offsets, where, values, mean, first.shape(1)), first.data(), factors.data(),
               static_cast<int>(factors.shape(2)), grads.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("values").none(), nb::arg("mean").none(), nb::arg("first"),
      nb::arg("factors"), nb::arg("grads").noconvert());
  m.def(
      "count",
      [](const Offsets& offsets, const Where& where, size_t slots, const MaybeFloats& show, const MaybeFloats& click,
         const Array<float>& shows, const Array<float>& clicks, const Array<uint16_t>& slot) {
        const nb::gil_scoped_release nogil;
        count(ragged(offsets, where, {}, {}, slots), data_or_null(show), data_or_null(click), shows.data(),
              clicks.data(), slot.data());
      },
      nb::arg("offsets"), nb::arg("where"), nb::arg("slots"), nb::arg("show").none(), nb::arg("click").none(),
      nb::arg("shows").noconvert(), nb::arg("clicks").noconvert(), nb::arg("slot").noconvert());
}

}  // namespace clickfleet
