// The texts of errors that come from the operating system and the standard library.
#include "base/error.h"

#include <cerrno>

#include "base/refusal.h"

namespace nostall {

Error io_error(const std::string& what, const std::string& path, int error_number) {
  // Interrupted calls are made again (base/file.h): what is told of was, in vain.
  const std::string why = error_number == EINTR
                              ? "signals interrupted the call: make them rarer, those of a "
                                "profiler for example"
                              : std::generic_category().message(error_number);
  return Error(ErrorKind::io, what + " " + path + ": " + why, error_number);
}

Error no_memory_to_unpack() {
  return Error(
      ErrorKind::io,
      "there is no memory to unpack it: free memory, raise the limit (ulimit -v), or give the "
      "loader fewer threads",
      ENOMEM);
}

Error io_error(const std::system_error& error) {
  return Error(ErrorKind::io,
               error.code() == std::errc::resource_unavailable_try_again
                   ? "the system gives no more threads: raise the limit (ulimit -u, the pids "
                     "cgroup), or ask for fewer threads"
                   : error.what(),
               error.code().value());
}

}  // namespace nostall
