#include "module.h"

void bind_source(nanobind::module_&) {}
