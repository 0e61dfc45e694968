// Texts between Python and the core, in place of nanobind/stl/string.h.
//
// The core's texts are bytes, UTF-8 where they are text: the name of a file may be of any. In Python
// they are what os.fsdecode makes of them where file names are UTF-8, and come back as they were.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace nanobind::detail {

template <>
struct type_caster<std::string> {
  NB_TYPE_CASTER(std::string, const_name("str"))

  bool from_python(handle from, uint32_t, cleanup_list*) noexcept {
    if (!PyUnicode_Check(from.ptr())) return false;
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(from.ptr(), &size);
    if (text != nullptr) {
      value.assign(text, static_cast<size_t>(size));
      return true;
    }
    PyErr_Clear();
    const object bytes = steal(PyUnicode_AsEncodedString(from.ptr(), "utf-8", "surrogateescape"));
    if (!bytes.is_valid()) {
      PyErr_Clear();
      return false;
    }
    value.assign(PyBytes_AsString(bytes.ptr()), static_cast<size_t>(PyBytes_Size(bytes.ptr())));
    return true;
  }

  static handle from_cpp(const std::string& text, rv_policy, cleanup_list*) noexcept {
    return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()),
                                "surrogateescape");
  }
};

}  // namespace nanobind::detail

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
    // It may have come while str() was at work; it is the program's, not the text's.
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    PyErr_Clear();
    bytes = encoded(nb::steal(PyObject_GetAttrString(object.type().ptr(), "__name__")));
  }
  if (!bytes.is_valid()) {
    PyErr_Clear();
    return "an object of Python";
  }
  return {PyBytes_AsString(bytes.ptr()), static_cast<size_t>(PyBytes_Size(bytes.ptr()))};
}

// Ctrl-C is meant for the program: what was being done fails, and the interrupt comes again where the
// program goes on. False for another exception.
inline bool pass_on_interrupt(const nanobind::python_error& error) {
  if (!error.matches(PyExc_KeyboardInterrupt)) return false;
  PyErr_SetInterrupt();
  return true;
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
