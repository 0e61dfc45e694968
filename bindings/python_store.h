// Tiers that a class in Python keeps.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "tier/node_cache.h"

namespace nostall::bindings {

// `tier` has put(key, bytes) and get(key), which gives bytes or None.
std::shared_ptr<tier::Store> python_store(nanobind::object tier);

}  // namespace nostall::bindings
