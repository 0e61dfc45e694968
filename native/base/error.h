// base/error.h - one exception for the whole core, and a Result for code that must not throw.
//
// An Error carries a kind, which the bindings map to one Python class each, and one clear sentence
// that names the path, the rank, the value and the remedy. Parsers of untrusted bytes return
// Result<T> instead: they are total, every input gives a value or an Error.
// Thread-safety: values, no shared state.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

namespace nostall {

enum class ErrorKind {
  usage,       // the caller asked for something that cannot be: fix the call or the configuration
  io,          // the operating system refused: errno is set
  peer,        // another process of this job died, lags, or does not agree with us
  corruption,  // bytes are not what they should be
  transform,   // a function of the user's failed for a sample
  stopped,     // the user stopped the work
  bug,         // an invariant of nostall is broken: please report
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what, int error_number = 0)
      : std::runtime_error(what), kind_(kind), errno_(error_number) {}

  ErrorKind kind() const noexcept { return kind_; }
  int error_number() const noexcept { return errno_; }

 private:
  ErrorKind kind_;
  int errno_;
};

// "cannot open /data/x.jpg: No such file or directory"
Error io_error(const std::string& what, const std::string& path, int error_number);
// Of a sample that cannot be unpacked, which is none of its file's.
Error no_memory_to_unpack();

// A value or an Error. The accessors check: asking for the wrong one is a bug and throws.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Error error) : state_(std::move(error)) {}

  explicit operator bool() const noexcept { return std::holds_alternative<T>(state_); }
  T& value() & { return std::get<T>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T&& value() && { return std::get<T>(std::move(state_)); }
  const Error& error() const { return std::get<Error>(state_); }

  // The value, or the Error thrown.
  T take() && {
    if (!*this) throw std::get<Error>(state_);
    return std::get<T>(std::move(state_));
  }

 private:
  std::variant<T, Error> state_;
};

}  // namespace nostall
