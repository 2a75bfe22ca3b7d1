#include "unique.h"

#include <nanobind/ndarray.h>

#include <memory>

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {

void bind_unique(nb::module_& m) {
  m.def(
      "unique",
      [](const nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& keys) {
        const size_t n = keys.size();
        if (n >= (1ULL << 31)) throw nb::value_error("more than 2^31 keys in one call");
        auto distinct = std::make_unique_for_overwrite<uint64_t[]>(n);
        auto where = std::make_unique_for_overwrite<int64_t[]>(n);
        size_t count;
        {
          nb::gil_scoped_release nogil;
          count = unique(keys.data(), n, distinct.get(), where.get());
        }
        nb::capsule own_distinct(distinct.get(), [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
        uint64_t* const first = distinct.release();
        nb::capsule own_where(where.get(), [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
        int64_t* const second = where.release();
        return nb::make_tuple(nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>(first, {count}, own_distinct),
                              nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(second, {n}, own_where));
      },
      nb::arg("keys"),
      "Return the distinct keys in order of first occurrence, and the position of every key among them.");
  m.def(
      "unique_into",
      [](const Array<const uint64_t>& keys, const Array<uint64_t>& distinct, const Array<uint32_t>& where) {
        const size_t n = keys.size();
        if (n >= (1ULL << 31) || distinct.size() < n || where.size() < n)
          throw nb::value_error("distinct and where must have one entry per key, fewer than 2^31");
        const nb::gil_scoped_release nogil;
        return unique(keys.data(), n, distinct.data(), where.data());
      },
      nb::arg("keys"), nb::arg("distinct").noconvert(), nb::arg("where").noconvert(),
      "Like `unique`, but write to existing arrays. Return the number of distinct keys.");
}

}  // namespace clickfleet
