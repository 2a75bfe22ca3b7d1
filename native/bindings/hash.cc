#include "hash.h"

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {

void bind_hash(nb::module_& m) {
  m.attr("VIRTUAL_SHARDS") = kVirtualShards;
  m.def(
      "mix64",
      [](const Array<const uint64_t>& keys, const Array<uint64_t>& out) {
        nb::gil_scoped_release nogil;
        for (size_t i = 0; i < keys.size(); ++i) out.data()[i] = mix64(keys.data()[i]);
      },
      nb::arg("keys"), nb::arg("out"), "Writes mix64 of every key to `out`.");
}

}  // namespace clickfleet
