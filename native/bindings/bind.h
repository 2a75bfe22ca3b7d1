// Bindings convert arguments, check bounds, release the GIL and call the core, nothing else. One bind_* function per
// core header.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "bounds.h"

namespace clickfleet {

template <class T, int Dims = 1>
using Array = nanobind::ndarray<T, nanobind::ndim<Dims>, nanobind::c_contig, nanobind::device::cpu>;

template <class T>
const T* data_or_null(const std::optional<Array<const T>>& array) {
  return array ? array->data() : nullptr;
}

// Every entry point checks its arguments: a caller's mistake raises ValueError and never causes an invalid read.
inline void need(bool given, const char* what) {
  if (!given) throw nanobind::value_error(what);
}

// Returns whether the array has `size` values or is absent.
template <class T>
bool fits(const std::optional<Array<const T>>& array, size_t size) {
  return !array || array->size() == size;
}

void bind_buckets(nanobind::module_& m);
void bind_cut(nanobind::module_& m);
void bind_fields(nanobind::module_& m);
void bind_frozen(nanobind::module_& m);
void bind_pairs(nanobind::module_& m);
void bind_hash(nanobind::module_& m);
void bind_key_set(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_recurrence(nanobind::module_& m);
void bind_rules(nanobind::module_& m);
void bind_shows(nanobind::module_& m);
void bind_table(nanobind::module_& m);
void bind_spread(nanobind::module_& m);
void bind_print(nanobind::module_& m);
void bind_parse(nanobind::module_& m);
void bind_touched(nanobind::module_& m);
void bind_tower(nanobind::module_& m);
void bind_unique(nanobind::module_& m);
}  // namespace clickfleet
