#include "hash.h"

#include <nanobind/ndarray.h>

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {

using Keys = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void bind_hash(nb::module_& m) {
  m.attr("VIRTUAL_SHARDS") = kVirtualShards;
  m.def(
      "mix64",
      [](const Keys& keys, nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
        nb::gil_scoped_release nogil;
        for (size_t i = 0; i < keys.size(); ++i) out.data()[i] = mix64(keys.data()[i]);
      },
      nb::arg("keys"), nb::arg("out"), "Writes mix64 of every key to `out`.");
}

}  // namespace clickfleet
