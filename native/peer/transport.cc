// Loads the UCX transport with dlopen.
#include "peer/transport.h"

#include <dlfcn.h>
#include <unistd.h>

#include "base/error.h"

namespace nostall::peer {

std::unique_ptr<Transport> load_ucx(const std::string& library, const TransportOptions& options) {
  // A name without a folder is looked for where the system keeps libraries.
  if (library.find('/') != std::string::npos && ::access(library.c_str(), F_OK) != 0) {
    throw Error(ErrorKind::usage,
                "samples cannot travel between nodes, for nostall was built without UCX (" +
                    library +
                    " is not there): install UCX (Debian: libucx-dev) and build nostall again, or "
                    "pass peers=\"off\"");
  }
  // Never unloaded: UCX leaves hooks behind.
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    throw Error(ErrorKind::usage,
                std::string("samples cannot travel between nodes, for UCX cannot be loaded (") +
                    ::dlerror() +
                    "): pip install 'nostall[cluster]' (Debian: apt-get install libucx0), or pass "
                    "peers=\"off\"");
  }
  using Make = Transport* (*)(const TransportOptions&, std::string&);
  const auto make = reinterpret_cast<Make>(::dlsym(handle, "nostall_make_ucx_transport"));
  if (!make) {
    const bool is_ucx = ::dlsym(handle, "ucp_init_version") != nullptr;
    throw Error(
        ErrorKind::usage,
        "samples cannot travel between nodes, for " + library +
            (is_ucx ? " is UCX itself, not what nostall speaks to it with: leave "
                      "NOSTALL_UCX_LIBRARY empty, and put the folder of this UCX into "
                      "LD_LIBRARY_PATH to use it"
                    : " is not nostall's UCX transport: leave NOSTALL_UCX_LIBRARY empty for "
                      "that of the package"));
  }
  std::string error;
  std::unique_ptr<Transport> transport(make(options, error));
  if (!transport) throw Error(ErrorKind::peer, error);
  return transport;
}

}  // namespace nostall::peer
