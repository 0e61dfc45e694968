// The sink of this process, and standard error where there is none or it throws.
#include "base/log.h"

#include <cstdio>
#include <utility>

#include "base/mutex.h"

namespace nostall {
namespace {

struct Registry {
  Mutex mutex;
  LogSink sink NOSTALL_GUARDED_BY(mutex);
};

Registry& registry() {
  static Registry r;
  return r;
}

}  // namespace

void set_log_sink(LogSink sink) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  all.sink = std::move(sink);
}

void log(LogLevel level, const std::string& message) noexcept {
  try {
    LogSink sink;
    {
      Registry& all = registry();
      const MutexLock lock(all.mutex);
      sink = all.sink;
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
