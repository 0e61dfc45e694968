// base/refusal.h - what the standard library throws where the system refuses, as an Error.
#pragma once

#include <system_error>

#include "base/error.h"

namespace nostall {

// Of kind io. If the system refused a thread, the text says so and names the remedy.
Error io_error(const std::system_error& error);

}  // namespace nostall
