#include "kernels.h"

namespace clickfleet::CLICKFLEET_LEVEL {}
