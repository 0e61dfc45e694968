// nostall._native.memory_limits, kernels, and what a program of Python needs to end well.
#include <dlfcn.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>

#include "base/crc32c.h"
#include "base/ended_threads.h"
#include "base/limits.h"
#include "collective/kernels.h"
#include "image/resample.h"
#include "module.h"
#include "plan/permutation.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

namespace {

bool keep_threads() {
  constexpr unsigned long kKeepsThem = 0x030E0000;  // Python 3.14
  if (Py_Version >= kKeepsThem) return true;
  // Before 3.13 the stable interface lacks it, and its name is the second one.
  for (const char* name : {"Py_IsFinalizing", "_Py_IsFinalizing"}) {
    void* const found = ::dlsym(RTLD_DEFAULT, name);
    if (found != nullptr) {
      const auto* python = reinterpret_cast<const void*>(&PyEval_RestoreThread);
      return keep_ended_threads(python, reinterpret_cast<int (*)()>(found));
    }
  }
  return false;
}

}  // namespace

void bind_base(nb::module_& m) {
  m.def("keep_ended_threads", &keep_threads,
        "Lets threads that ask for Python's lock after it shut down sleep, for at most 10 s, and "
        "not end within native code (native/base/ended_threads.h). For the main thread, at the "
        "end of the program. Returns whether they will.");
  nb::class_<MemoryLimit>(m, "MemoryLimit", "A limit of memory (native/base/limits.h), in bytes.")
      .def_prop_ro("kind",
                   [](const MemoryLimit& l) {
                     switch (l.kind) {
                       case LimitKind::machine:
                         return "machine";
                       case LimitKind::cgroup:
                         return "cgroup";
                       case LimitKind::address_space:
                         return "address_space";
                       case LimitKind::shared_memory:
                         break;
                     }
                     return "shared_memory";
                   })
      .def_ro("what", &MemoryLimit::what)
      .def_ro("limit", &MemoryLimit::limit)
      .def_ro("used", &MemoryLimit::used)
      .def_prop_ro("reserve", &MemoryLimit::reserve)
      .def_prop_ro("left", &MemoryLimit::left)
      .def_prop_ro("most", &MemoryLimit::most);
  m.def(
      "memory_limits",
      [](const std::string& shm, const std::string& proc) {
        return MemoryLimits(shm, proc).read();
      },
      nb::arg("shm") = "/dev/shm", nb::arg("proc") = "/proc",
      nb::call_guard<nb::gil_scoped_release>(),
      "The limits of memory that bind this process, as they stand.");
  m.def(
      "kernels",
      [] {
        return std::map<std::string, std::string>{
            {"checksums", crc32c_kernels().front().name},
            {"images", image::kernels().name},
            {"orders", plan::KeyedPermutation::kernel()},
            {"reductions", collective::reduction_kernel()},
        };
      },
      "Which instructions each kind of vector code uses on this processor.");
}
