#include "bind.h"
#include "kernels.h"

NB_MODULE(_core, m) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2") || !__builtin_cpu_supports("fma"))
    throw nanobind::import_error("clickfleet needs a CPU with AVX2 (x86-64-v3: Intel since 2013, AMD since 2015)");
#endif
  m.doc() = "The native core of clickfleet: the sparse table, hashing, parsing, pooling.";
  m.attr("__version__") = CLICKFLEET_VERSION;
  m.def("cpu_level", &clickfleet::cpu_level, "Return the CPU level whose inner loops are in use.");
  clickfleet::bind_buckets(m);
  clickfleet::bind_hash(m);
  clickfleet::bind_key_set(m);
  clickfleet::bind_recurrence(m);
  clickfleet::bind_rules(m);
  clickfleet::bind_table(m);
  clickfleet::bind_cut(m);
  clickfleet::bind_pairs(m);
  clickfleet::bind_pool(m);
  clickfleet::bind_print(m);
  clickfleet::bind_parse(m);
  clickfleet::bind_shows(m);
  clickfleet::bind_spread(m);
  clickfleet::bind_touched(m);
  clickfleet::bind_tower(m);
  clickfleet::bind_unique(m);
  clickfleet::bind_frozen(m);
  clickfleet::bind_fields(m);
}
