// What the loader's bindings take from Python to reach other nodes.
#pragma once

#include <memory>

#include "arrays.h"
#include "base/error.h"
#include "peer/exchange.h"

namespace nostall::bindings {

struct PyTransport {
  std::unique_ptr<peer::Transport> transport;

  bool taken() const { return transport == nullptr; }
  // For the one loader that uses it. Throws Error(usage) the second time.
  std::unique_ptr<peer::Transport> take() {
    if (taken()) throw Error(ErrorKind::usage, "this transport has a loader already");
    return std::move(transport);
  }
};

}  // namespace nostall::bindings
