// base/log.h - warnings from the core, handed to a sink (the bindings set Python's logging).
#pragma once

#include <functional>
#include <string>

namespace nostall {

enum class LogLevel { info, warning };
using LogSink = std::function<void(LogLevel, const std::string&)>;

// Sets the sink of this process; an empty one means standard error. Thread-safe.
void set_log_sink(LogSink sink);
// Calls the sink; what that throws is dropped, and the message goes to standard error. Thread-safe;
// may be called from any thread of the core.
void log(LogLevel level, const std::string& message) noexcept;

}  // namespace nostall
