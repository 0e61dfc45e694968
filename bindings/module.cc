// The native module nostall._native: one file per room, errors mapped here and nowhere else.
#include "module.h"

#include <string_view>
#include <system_error>

#include "base/error.h"
#include "base/log.h"
#include "base/refusal.h"
#include "text.h"

namespace nb = nanobind;

namespace {

// Python's classes live in nostall/errors.py, so that they can be caught without the native module.
const char* python_class(nostall::ErrorKind kind) {
  switch (kind) {
    case nostall::ErrorKind::usage:
      return "UsageError";
    case nostall::ErrorKind::io:
      return "IoError";
    case nostall::ErrorKind::peer:
      return "PeerError";
    case nostall::ErrorKind::corruption:
      return "CorruptionError";
    case nostall::ErrorKind::transform:
      return "TransformError";
    case nostall::ErrorKind::stopped:
      return "StoppedError";
    case nostall::ErrorKind::bug:
      break;
  }
  return "BugError";
}

// For people: a path may be of bytes that are no text.
nb::str shown(std::string_view text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

void raise(nostall::ErrorKind kind, const char* what, int number = 0) {
  nb::object type = nb::module_::import_("nostall.errors").attr(python_class(kind));
  const nb::object error = type(shown(what));
  if (kind == nostall::ErrorKind::io && number > 0) nb::setattr(error, "errno", nb::int_(number));
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const nostall::Error& e) {
    raise(e.kind(), e.what(), e.error_number());
  } catch (const std::system_error& e) {
    raise(nostall::ErrorKind::io, nostall::io_error(e).what(), e.code().value());
  }
}

}  // namespace

NB_MODULE(_native, m) {
  // At the end of a program, torch still holds a process group that was not destroyed, and tensors
  // in our memory, and with them objects of this module. They are not leaks, so nanobind is not to
  // warn of them.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);
  nostall::set_log_sink([](nostall::LogLevel level, const std::string& message) {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire gil;
    try {
      nb::object logger = nb::module_::import_("logging").attr("getLogger")("nostall");
      logger.attr(level == nostall::LogLevel::warning ? "warning" : "info")(shown(message));
    } catch (nb::python_error& error) {
      if (!nostall::bindings::pass_on_interrupt(error)) {
        error.discard_as_unraisable("nostall's log");
      }
    }
  });
  bind_base(m);
  bind_plan(m);
  bind_source(m);
  bind_composite(m);
  bind_records(m);
  bind_ranges(m);
  bind_tokens(m);
  bind_image(m);
  bind_fields(m);
  bind_peer(m);
  bind_stage(m);
  bind_tiers(m);
  bind_timeline(m);
  bind_trace(m);
  bind_checkpoint(m);
  bind_collective(m);
  bind_sync(m);
  bind_simulate(m);
}
