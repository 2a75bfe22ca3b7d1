// Bindings convert, release the GIL and call; nothing else. One bind_* function per core header.
#pragma once
#include <nanobind/nanobind.h>

namespace clickfleet {
void bind_hash(nanobind::module_& m);
void bind_print(nanobind::module_& m);
void bind_parse(nanobind::module_& m);
void bind_unique(nanobind::module_& m);
}  // namespace clickfleet
