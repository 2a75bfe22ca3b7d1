#include "bind.h"
#include "kernels.h"

NB_MODULE(_core, m) {
  m.doc() = "The native core of clickfleet: the sparse table, hashing, parsing, pooling.";
  m.attr("__version__") = CLICKFLEET_VERSION;
  m.def("cpu_level", &clickfleet::cpu_level, "The instruction set the inner loops were chosen for.");
  clickfleet::bind_hash(m);
  clickfleet::bind_print(m);
  clickfleet::bind_parse(m);
  clickfleet::bind_unique(m);
}
