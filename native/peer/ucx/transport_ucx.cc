// The UCX transport: active messages, eager for small payloads, rendezvous for large ones.
#include <poll.h>
#include <sys/eventfd.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <exception>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "peer/transport.h"

namespace nostall::peer {
namespace {

constexpr unsigned kActiveMessage = 0x4e;
constexpr std::chrono::seconds kCloseLimit{3};
constexpr int kProgressAtOnce = 1024;  // calls, of one event or a few each
// UCX 1.13 ends the whole process if a peer ends while a connection to it is being made.
constexpr unsigned kOldestMajor = 1, kOldestMinor = 18;

void check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) {
    throw Error(ErrorKind::peer, std::string("UCX: ") + what + ": " + ucs_status_string(status));
  }
}

class UcxTransport final : public Transport {
 public:
  explicit UcxTransport(const TransportOptions& options) {
    unsigned major = 0, minor = 0, release = 0;
    ucp_get_version(&major, &minor, &release);
    if (std::pair(major, minor) < std::pair(kOldestMajor, kOldestMinor)) {
      throw Error(ErrorKind::usage, "UCX " + std::to_string(major) + "." + std::to_string(minor) +
                                        " is too old to lose a peer without ending the process: "
                                        "install a newer one (pip install nostall[cluster]), or "
                                        "pass peers=\"off\"");
    }
    ucp_config_t* config = nullptr;
    check(ucp_config_read(nullptr, nullptr, &config), "cannot read its configuration");
    ucs_status_t status = UCS_OK;
    if (!options.transports.empty()) {
      status = ucp_config_modify(config, "TLS", options.transports.c_str());
    }
    if (status == UCS_OK && !options.devices.empty()) {
      status = ucp_config_modify(config, "NET_DEVICES", options.devices.c_str());
    }
    // Else the thread of all messages waits in connect() for a node that does not answer, for as
    // long as the kernel asks it.
    if (status == UCS_OK && !std::getenv("UCX_TCP_CONN_NB")) {
      status = ucp_config_modify(config, "TCP_CONN_NB", "y");
    }
    if (status == UCS_OK) {
      ucp_params_t params{};
      params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
      params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
      params.name = "nostall";
      status = ucp_init(&params, config, &context_);
    }
    ucp_config_release(config);
    check(status, "cannot start on the chosen transports and devices");
    try {
      start();
    } catch (...) {
      stop();
      throw;
    }
  }

  ~UcxTransport() override { stop(); }
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;

  std::string address() override {
    ucp_address_t* address = nullptr;
    size_t length = 0;
    check(ucp_worker_get_address(worker_, &address, &length), "cannot tell its address");
    std::string copy(reinterpret_cast<const char*>(address), length);
    ucp_worker_release_address(worker_, address);
    return copy;
  }

  void connect(uint32_t rank, const std::string& address) override {
    if (peers_.contains(rank)) return;
    // All memory first: what is connected can then be kept, and be closed without any.
    links_.push_back(std::make_unique<Link>(Link{this, rank, nullptr}));
    Link* const link = links_.back().get();
    doomed_.reserve(links_.size());
    closing_.reserve(links_.size());
    const auto place = peers_.try_emplace(rank, link).first;
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = &UcxTransport::failed;
    params.err_handler.arg = link;
    const ucs_status_t status = ucp_ep_create(worker_, &params, &link->endpoint);
    if (status == UCS_OK) return;
    peers_.erase(place);
    links_.pop_back();
    check(status, ("cannot reach rank " + std::to_string(rank)).c_str());
  }

  void send(uint32_t rank, const HeaderBytes& header, std::span<const std::byte> payload,
            std::function<void(bool)> done) override {
    const auto found = peers_.find(rank);
    if (found == peers_.end()) {
      if (done) done(false);
      return;
    }
    auto sending = std::make_unique<Sending>(Sending{this, header, std::move(done)});
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.cb.send = &UcxTransport::sent;
    params.user_data = sending.get();
    const ucs_status_ptr_t request =
        ucp_am_send_nbx(found->second->endpoint, kActiveMessage, sending->header.data(),
                        sending->header.size(), payload.data(), payload.size(), &params);
    if (UCS_PTR_IS_PTR(request)) {
      // The callback owns it from here.
      [[maybe_unused]] Sending* kept = sending.release();
      ++under_way_;
      return;
    }
    if (sending->done) sending->done(UCS_PTR_STATUS(request) == UCS_OK);
  }

  void drop(uint32_t rank) override {
    const auto found = peers_.find(rank);
    if (found == peers_.end()) return;
    // This may be inside a callback of the endpoint itself.
    doomed_.push_back(found->second);
    peers_.erase(found);
  }

  bool progress(Receiver& receiver) override {
    receiver_ = &receiver;
    bool any = false;
    // Where messages come faster than they are handled, the rest of the thread's work has its turn too.
    bool moved = true;
    for (int i = 0; moved && i < kProgressAtOnce; ++i) {
      moved = ucp_worker_progress(worker_) != 0;
      // Before more arrives: a session refuses what thousands of messages have overtaken.
      for (; !offered_.empty(); moved = true) {
        const Offer offer = offered_.front();
        offered_.pop_front();
        take(offer);
      }
      any = any || moved;
    }
    while (!gone_.empty()) {
      any = true;
      const auto [link, why] = gone_.front();
      gone_.pop_front();
      // It may have been dropped since, and the rank be connected anew.
      const auto found = peers_.find(link->rank);
      if (found == peers_.end() || found->second != link) continue;
      const uint32_t rank = link->rank;
      drop(rank);
      receiver.on_gone(rank, why);
    }
    // Closing one may doom another.
    for (size_t i = 0; i < doomed_.size(); ++i) close(doomed_[i]);
    doomed_.clear();
    reap();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    return any;
  }

  void wait(std::chrono::milliseconds timeout) override {
    if (ucp_worker_arm(worker_) != UCS_OK) return;  // something came in the meantime
    pollfd fds[2] = {{events_, POLLIN, 0}, {wake_, POLLIN, 0}};
    ::poll(fds, 2, static_cast<int>(timeout.count()));
    if ((fds[1].revents & POLLIN) != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t n = ::read(wake_, &count, sizeof count);
    }
  }

  void wake() noexcept override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof one);
  }

 private:
  struct Link {
    UcxTransport* owner;
    uint32_t rank;
    ucp_ep_h endpoint;
  };
  struct Sending {
    UcxTransport* owner;
    HeaderBytes header;
    std::function<void(bool)> done;
  };
  struct Receiving {
    UcxTransport* owner;
    std::function<void(bool)> done;
  };
  // A payload that its sender still holds.
  struct Offer {
    void* descriptor;
    size_t length;
    std::vector<std::byte> header;
  };

  void start() {
    ucp_worker_params_t params{};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    check(ucp_worker_create(context_, &params, &worker_), "cannot create a worker");
    check(ucp_worker_get_efd(worker_, &events_), "its transports cannot wake a sleeping thread");
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) throw io_error("cannot create an eventfd", "", errno);
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kActiveMessage;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = &UcxTransport::arrived;
    handler.arg = this;
    check(ucp_worker_set_am_recv_handler(worker_, &handler), "cannot receive messages");
  }

  void stop() {
    receiver_ = nullptr;
    if (worker_) {
      for (const Offer& offer : offered_) ucp_am_data_release(worker_, offer.descriptor);
      offered_.clear();
      for (const auto& [rank, link] : peers_) close(link);
      for (Link* const link : doomed_) close(link);
      peers_.clear();
      const auto limit = std::chrono::steady_clock::now() + kCloseLimit;
      // What a closed endpoint has under way ends in a later progress. UCX frees memory twice where
      // it has to end that while it destroys the worker.
      while ((under_way_ > 0 || !closing_.empty()) && std::chrono::steady_clock::now() < limit) {
        ucp_worker_progress(worker_);
        reap();
      }
      ucp_worker_destroy(worker_);
      worker_ = nullptr;
    }
    if (context_) ucp_cleanup(context_);
    context_ = nullptr;
    if (wake_ >= 0) ::close(wake_);
    wake_ = -1;
  }

  void close(Link* link) {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_EP_CLOSE_FLAG_FORCE;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(link->endpoint, &params);
    if (UCS_PTR_IS_PTR(request)) {
      closing_.emplace_back(request, link);
    } else if (UCS_PTR_STATUS(request) == UCS_OK) {
      forget(link);
    }
  }

  // For a closed endpoint; its error handler is not called any more.
  void forget(const Link* link) {
    std::erase_if(gone_, [&](const auto& gone) { return gone.first == link; });
    std::erase_if(links_, [&](const auto& kept) { return kept.get() == link; });
  }

  void reap() {
    std::erase_if(closing_, [&](const auto& closing) {
      const auto [request, link] = closing;
      if (ucp_request_check_status(request) == UCS_INPROGRESS) return false;
      ucp_request_free(request);
      forget(link);
      return true;
    });
  }

  // Fetches an offered payload to the place that the receiver gave.
  void take(const Offer& offer) {
    Delivery delivery;
    std::unique_ptr<Receiving> receiving;
    guarded([&] {
      receiving = std::make_unique<Receiving>(Receiving{this, {}});
      delivery = receiver_->on_message(offer.header, offer.length);
    });
    if (!receiving || delivery.into.size() != offer.length) {
      ucp_am_data_release(worker_, offer.descriptor);
      if (delivery.done) delivery.done(false);
      return;
    }
    receiving->done = std::move(delivery.done);
    ucp_request_param_t params{};
    params.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    params.cb.recv_am = &UcxTransport::received;
    params.user_data = receiving.get();
    const ucs_status_ptr_t request = ucp_am_recv_data_nbx(
        worker_, offer.descriptor, delivery.into.data(), offer.length, &params);
    if (UCS_PTR_IS_PTR(request)) {
      [[maybe_unused]] Receiving* kept = receiving.release();
      ++under_way_;
      return;
    }
    if (receiving->done) receiving->done(UCS_PTR_STATUS(request) == UCS_OK);
  }

  // UCX calls these from C, through which no exception may go. One that is out of memory is kept
  // and thrown by progress; the message it came from is as good as lost.
  template <typename Work>
  void guarded(const Work& work) noexcept {
    try {
      work();
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
  }

  static ucs_status_t arrived(void* self, const void* header, size_t header_length, void* data,
                              size_t length, const ucp_am_recv_param_t* param) {
    auto* transport = static_cast<UcxTransport*>(self);
    ucs_status_t status = UCS_OK;
    transport->guarded([&] {
      status = transport->receive({static_cast<const std::byte*>(header), header_length}, data,
                                  length, *param);
    });
    return status;
  }

  ucs_status_t receive(std::span<const std::byte> header, void* data, size_t length,
                       const ucp_am_recv_param_t& param) {
    if (!receiver_) return UCS_OK;  // it is ending
    if ((param.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
      offered_.push_back({data, length, {header.begin(), header.end()}});
      return UCS_INPROGRESS;
    }
    Delivery delivery = receiver_->on_message(header, length);
    const bool wanted = delivery.into.size() == length;
    if (wanted && length > 0) {
      std::copy_n(static_cast<const std::byte*>(data), length, delivery.into.data());
    }
    if (delivery.done) delivery.done(wanted);
    return UCS_OK;
  }

  static void sent(void* request, ucs_status_t status, void* user_data) {
    const std::unique_ptr<Sending> sending(static_cast<Sending*>(user_data));
    ucp_request_free(request);
    --sending->owner->under_way_;
    if (sending->done) sending->owner->guarded([&] { sending->done(status == UCS_OK); });
  }

  static void received(void* request, ucs_status_t status, size_t, void* user_data) {
    const std::unique_ptr<Receiving> receiving(static_cast<Receiving*>(user_data));
    ucp_request_free(request);
    --receiving->owner->under_way_;
    if (receiving->done) receiving->owner->guarded([&] { receiving->done(status == UCS_OK); });
  }

  static void failed(void* arg, ucp_ep_h, ucs_status_t status) {
    const auto* link = static_cast<const Link*>(arg);
    link->owner->guarded([&] { link->owner->gone_.emplace_back(link, ucs_status_string(status)); });
  }

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int events_ = -1;  // belongs to the worker
  int wake_ = -1;
  Receiver* receiver_ = nullptr;              // since the first progress(), until stop()
  std::vector<std::unique_ptr<Link>> links_;  // not closed: error handlers point to them
  std::map<uint32_t, Link*> peers_;
  std::deque<Offer> offered_;
  std::deque<std::pair<const Link*, std::string>> gone_;
  std::vector<Link*> doomed_;  // to be closed
  std::vector<std::pair<void*, Link*>> closing_;
  size_t under_way_ = 0;      // sends and fetches whose callback is still to come
  std::exception_ptr error_;  // of a callback
};

}  // namespace
}  // namespace nostall::peer

extern "C" __attribute__((visibility("default"))) nostall::peer::Transport*
nostall_make_ucx_transport(const nostall::peer::TransportOptions& options, std::string& error) {
  try {
    return std::make_unique<nostall::peer::UcxTransport>(options).release();
  } catch (const std::exception& e) {
    error = e.what();
    return nullptr;
  }
}
