#include "module.h"

void bind_plan(nanobind::module_&) {}
