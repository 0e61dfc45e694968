#include "base/log.h"

#include <cstdio>
#include <mutex>
#include <utility>

namespace nostall {
namespace {

struct Registry {
  std::mutex mutex;
  LogSink sink;
};

Registry& registry() {
  static Registry r;
  return r;
}

}  // namespace

void set_log_sink(LogSink sink) {
  const std::scoped_lock lock(registry().mutex);
  registry().sink = std::move(sink);
}

void log(LogLevel level, const std::string& message) noexcept {
  try {
    LogSink sink;
    {
      const std::scoped_lock lock(registry().mutex);
      sink = registry().sink;
    }
    if (sink) {
      sink(level, message);
      return;
    }
  } catch (...) {
    // A warning must not end the thread that warns.
  }
  std::fprintf(stderr, "nostall: %s: %s\n", level == LogLevel::warning ? "warning" : "info",
               message.c_str());
}

}  // namespace nostall
