#include "module.h"

void bind_stage(nanobind::module_&) {}
