// peer/transport.h - messages between ranks: the only interface between nostall and UCX.
//
// A transport has no thread of its own. One thread at a time calls it; messages are delivered inside
// progress() alone, and what was under way ends in drop(), progress() or the destructor. wake() and
// now() alone may be called from any thread. A message is a fixed header and a payload that is
// neither copied on its way out nor, where the network can, on its way in.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "peer/wire.h"

namespace nostall::peer {

// Where a payload is to go, and what to do when it is there (true) or will never be (false). An
// `into` of another length than the payload refuses it.
struct Delivery {
  std::span<std::byte> into;
  std::function<void(bool)> done;
};

class Receiver {
 public:
  virtual ~Receiver() = default;
  // A message has arrived; `header` is whatever was sent, of any length.
  virtual Delivery on_message(std::span<const std::byte> header, uint64_t payload) = 0;
  // The rank cannot be reached any more; all sends to it have ended.
  virtual void on_gone(uint32_t rank, const std::string& why) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;  // ends all transfers first
  // What other ranks need to reach this one.
  virtual std::string address() = 0;
  // Makes `rank` reachable, if it is not. Throws Error(peer) if the address is of no use.
  virtual void connect(uint32_t rank, const std::string& address) = 0;
  // `payload` must stay as it is until `done`, which may be called before send returns.
  virtual void send(uint32_t rank, const HeaderBytes& header, std::span<const std::byte> payload,
                    std::function<void(bool)> done) = 0;
  // Forgets the rank; what is under way to it or from it ends. on_gone is not called.
  virtual void drop(uint32_t rank) = 0;
  // Does what there is to do; true if there was anything. Throws what a callback threw, or
  // std::bad_alloc: a message was lost then, and all else goes on.
  virtual bool progress(Receiver& receiver) = 0;
  // Sleeps until there is something to do, wake() or the timeout.
  virtual void wait(std::chrono::milliseconds timeout) = 0;
  virtual void wake() noexcept = 0;
  // What deadlines are compared with: a test can let time pass.
  virtual std::chrono::steady_clock::time_point now() const noexcept {
    return std::chrono::steady_clock::now();
  }
};

struct TransportOptions {
  std::string transports;  // UCX_TLS, for example "tcp"; empty: all that UCX finds
  std::string devices;     // UCX_NET_DEVICES, for example "eth0,mlx5_0:1"; empty: all
};

// The UCX transport, from the shared library at `library`, loaded now: a process that has no peers
// never loads UCX. Throws Error(usage) if it cannot be loaded, with the loader's reason.
std::unique_ptr<Transport> load_ucx(const std::string& library, const TransportOptions& options);

}  // namespace nostall::peer
