// What objects of Python say of themselves, as texts of the core.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace nostall::bindings {

// For people, what str() of an object gives; where that raises, the name of its type.
inline std::string text_of(nanobind::handle object) noexcept {
  namespace nb = nanobind;
  const auto encoded = [](nb::object text) {
    return nb::steal(text.is_valid()
                         ? PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace")
                         : nullptr);
  };
  nb::object bytes = encoded(nb::steal(PyObject_Str(object.ptr())));
  if (!bytes.is_valid()) {
    PyErr_Clear();
    bytes = encoded(nb::steal(PyObject_GetAttrString(object.type().ptr(), "__name__")));
  }
  if (!bytes.is_valid()) {
    PyErr_Clear();
    return "an object of Python";
  }
  return {PyBytes_AsString(bytes.ptr()), static_cast<size_t>(PyBytes_Size(bytes.ptr()))};
}

// An exception as Python prints it, with where it came from. (python_error::what() ends the process
// where the text has surrogates.)
inline std::string traceback_of(nanobind::handle error) noexcept {
  namespace nb = nanobind;
  try {
    const nb::object lines = nb::module_::import_("traceback").attr("format_exception")(error);
    return text_of(nb::str("").attr("join")(lines).attr("rstrip")());
  } catch (const nb::python_error&) {
    return text_of(error);
  }
}

}  // namespace nostall::bindings
