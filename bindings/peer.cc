// nostall._native.PeerTransport: the way to other nodes, before the loader has it.
#include "peer.h"

#include "module.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

void bind_peer(nb::module_& m) {
  nb::class_<bindings::PyTransport>(
      m, "PeerTransport", "Messages between ranks (native/peer/transport.h); starts nothing.")
      .def(
          "__init__",
          [](bindings::PyTransport* self, const std::string& library, const std::string& transports,
             const std::string& devices) {
            new (self) bindings::PyTransport{bindings::without_gil([&] {
              return peer::load_ucx(library, {transports, devices});
            })};
          },
          nb::arg("library"), nb::arg("transports") = "", nb::arg("devices") = "")
      .def_prop_ro("address", [](const bindings::PyTransport& self) {
        const std::string address = self.taken() ? std::string() : self.transport->address();
        return nb::bytes(address.data(), address.size());
      });
}
