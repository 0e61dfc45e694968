#include "module.h"

void bind_image(nanobind::module_&) {}
