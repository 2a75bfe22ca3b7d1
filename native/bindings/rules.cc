#include "rules.h"

#include <nanobind/stl/string.h>

#include <vector>

#include "bind.h"
#include "kernels.h"
#include "rule_from.h"

namespace nb = nanobind;

namespace clickfleet {
namespace {

constexpr size_t kMostWeights = size_t{1} << 24;

template <class Visit, size_t... I>
void each_rule(const Visit& visit, std::index_sequence<I...>) {
  (visit(std::variant_alternative_t<I, Rule>{}), ...);
}
template <class Visit>
void each_rule(const Visit& visit) {
  each_rule(visit, std::make_index_sequence<kRules>{});
}

const char* name_of(Scale scale) { return scale == Scale::show ? "show" : scale == Scale::batch ? "batch" : "none"; }

nb::list describe() {
  nb::list all;
  each_rule([&](const auto& rule) {
    nb::list fields;
    std::apply(
        [&](const auto&... field) { (fields.append(nb::make_tuple(field.name, rule.*field.value, field.help)), ...); },
        rule.fields());
    nb::dict one;
    one["name"] = rule.name;
    one["scale"] = name_of(rule.scale);
    one["fields"] = fields;
    all.append(one);
  });
  return all;
}

}  // namespace

Rule rule_from(const nb::handle& name, const nb::dict& settings) {
  const auto wanted = nb::cast<std::string>(name);
  Rule found;
  bool known = false;
  each_rule([&](auto rule) {
    if (wanted != rule.name) return;
    known = true;
    std::apply([&](const auto&... field) { ((rule.*field.value = nb::cast<float>(settings[field.name])), ...); },
               rule.fields());
    found = rule;
  });
  need(known, "unknown rule");
  return found;
}

void bind_rules(nb::module_& m) {
  m.def("rules", &describe, "Return every rule: its name, default scale and fields (name, default, help).");
  m.def(
      "rule_state",
      [](const std::string& name, const nb::dict& settings, const Array<const float>& weights) {
        const Rule rule = rule_from(nb::cast(name), settings);
        need(weights.size() <= kMostWeights, "too many weights for one row");
        const int n = static_cast<int>(weights.size());
        nb::list state;
        std::visit(
            [&](const auto& r) {
              std::vector<float> first(static_cast<size_t>(r.state(n)));
              r.init(weights.data(), first.data(), n);
              for (const float x : first) state.append(x);
            },
            rule);
        return state;
      },
      nb::arg("name"), nb::arg("settings"), nb::arg("weights"), "Return the initial state of a rule.");
  m.def(
      "apply_rule",
      [](const std::string& name, const nb::dict& settings, const Array<float>& w, const Array<float>& state,
         const Array<const float>& g, float divisor, float lower, float upper, const std::string& level) {
        const Rule rule = rule_from(nb::cast(name), settings);
        need(level == "base" || level == cpu_level(), "unknown level, or not supported by this CPU");
        need(w.size() <= kMostWeights, "too many weights for one row");
        std::visit(
            [&](const auto& r) {
              const auto n = static_cast<int>(w.size());
              need(g.size() == w.size() && state.size() == static_cast<size_t>(r.state(n)),
                   "array shapes do not match");
              kernels(level.c_str())
                  .apply[rule.index()](&r, {lower, upper}, w.data(), state.data(), g.data(), n, 1 / divisor);
            },
            rule);
      },
      nb::arg("name"), nb::arg("settings"), nb::arg("w").noconvert(), nb::arg("state").noconvert(), nb::arg("g"),
      nb::arg("divisor"), nb::arg("lower"), nb::arg("upper"), nb::arg("level"),
      "Take one step of a rule in place, exactly as the table does.");
}

}  // namespace clickfleet
