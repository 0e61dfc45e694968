#include "module.h"

void bind_tier(nanobind::module_&) {}
