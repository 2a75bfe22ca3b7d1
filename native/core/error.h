// The error that a user of the table can act on; it becomes TableError in Python.
#pragma once
#include <stdexcept>

namespace clickfleet {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace clickfleet
