// The step's bookkeeping: names for messages, the oldest gradient, the thread's use of the
// processor.
#include "sync/step.h"

#include <sys/resource.h>

#include <algorithm>

#include "base/error.h"

namespace nostall::sync {
namespace {

constexpr size_t kMostNames = 8;

int64_t nanoseconds(const timeval& t) {
  return int64_t{t.tv_sec} * 1'000'000'000 + int64_t{t.tv_usec} * 1000;
}

}  // namespace

Step::Step(GradientOptions chosen, std::shared_ptr<Collectives> connection,
           std::vector<TensorSpec> specs)
    : options(std::move(chosen)),
      collectives(std::move(connection)),
      tensors(std::move(specs)),
      pending(tensors.size()) {}

std::string Step::names(std::span<const uint32_t> list) const {
  std::string text;
  for (size_t i = 0; i < list.size() && i < kMostNames; ++i) {
    text += (i ? ", " : "") + tensors[list[i]].name;
  }
  if (list.size() > kMostNames) {
    text += " and " + std::to_string(list.size() - kMostNames) + " more";
  }
  return text;
}

void Step::check_runs(const char* call) const {
  if (error) std::rethrow_exception(error);
  if (stop) {
    throw Error(ErrorKind::usage, std::string(call) +
                                      ": the gradient engine was stopped, as all are "
                                      "at the end of a program");
  }
}

int64_t Step::oldest() const {
  int64_t since = 0;
  for (const Pending& p : pending) {
    if (p.waits()) since = since == 0 ? p.since_ns : std::min(since, p.since_ns);
  }
  return since;
}

void Step::account() {
  rusage use{};
  if (::getrusage(RUSAGE_THREAD, &use) != 0) return;
  stats.user_ns = nanoseconds(use.ru_utime) + collectives->own_cpu_ns();
  stats.system_ns = nanoseconds(use.ru_stime);
  stats.voluntary_switches = static_cast<uint64_t>(use.ru_nvcsw);
  stats.involuntary_switches = static_cast<uint64_t>(use.ru_nivcsw);
}

}  // namespace nostall::sync
