// base/refusal.h - what the standard library throws where the system refuses, as an Error.
#pragma once

#include <system_error>

#include "base/error.h"

namespace nostall {

// Of kind io; that there are no more threads is told with its remedy.
Error io_error(const std::system_error& error);

}  // namespace nostall
