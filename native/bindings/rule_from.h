#pragma once
#include <nanobind/nanobind.h>

#include "rules.h"

namespace clickfleet {

Rule rule_from(const nanobind::handle& name, const nanobind::dict& settings);

}  // namespace clickfleet
