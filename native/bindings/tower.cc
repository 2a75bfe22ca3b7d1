#include "tower.h"

#include "bind.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

bool same_shape(const Array<float, 2>& a, const Array<const float, 2>& b) {
  return a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1);
}

}  // namespace

void bind_tower(nb::module_& m) {
  m.def(
      "add_bias_relu",
      [](const Array<float, 2>& x, const Array<const float>& bias) {
        need(bias.size() == x.shape(1), "bias must have one entry per column");
        const nb::gil_scoped_release nogil;
        add_bias_relu(x.data(), bias.data(), x.shape(0), x.shape(1));
      },
      nb::arg("x").noconvert(), nb::arg("bias"));
  m.def(
      "relu_backward",
      [](const Array<float, 2>& g, const Array<const float, 2>& h, const Array<float>& d_bias) {
        need(same_shape(g, h) && d_bias.size() == g.shape(1), "array shapes do not match");
        const nb::gil_scoped_release nogil;
        relu_backward(g.data(), h.data(), d_bias.data(), g.shape(0), g.shape(1));
      },
      nb::arg("g").noconvert(), nb::arg("h"), nb::arg("d_bias").noconvert());
  m.def(
      "relu_backward_of_product",
      [](const Array<const float, 2>& column, const Array<const float, 2>& row, const Array<float, 2>& g,
         const Array<const float, 2>& h, const Array<float>& d_bias) {
        need(same_shape(g, h) && d_bias.size() == g.shape(1) && column.size() == g.shape(0) && row.size() == g.shape(1),
             "array shapes do not match");
        const nb::gil_scoped_release nogil;
        relu_backward_of_product(column.data(), row.data(), g.data(), h.data(), d_bias.data(), g.shape(0), g.shape(1));
      },
      nb::arg("column"), nb::arg("row"), nb::arg("g").noconvert(), nb::arg("h"), nb::arg("d_bias").noconvert());
}

}  // namespace clickfleet
