// Descriptors passed between processes over abstract Unix sockets (SCM_RIGHTS).
//
// A job has a few names for its turn and a few for each member. The turn is a bound socket: the
// kernel gives a name to one process at a time and takes it back when that process ends. A member
// that gives its files listens at one of its names; a thread accepts callers, compares their user
// with its own (SO_PEERCRED), and answers with a fixed header and the descriptors. A caller asks
// the members in turn, and the next one too when a member does not answer for kPatience.
//
// No system call binds a socket and listens at it in one, so a process may stand still between the
// two. /proc says whether what is bound belongs to a process of this user, which then has the name.
#include "base/handover.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>
#include <sstream>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/fnv.h"

namespace nostall {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint32_t kAttempts = 4;  // names, where other users have taken some
constexpr int kBacklog = 4096;
constexpr size_t kMaxFiles = 64;
constexpr uint64_t kMagic = 0x32564f444e48534e;  // "NSHNDOV2"
// Between two looks whose a name is that is bound, and that nobody listens at.
constexpr milliseconds kBetween{1000};
// Between two looks at a name that takes no callers.
constexpr milliseconds kLook{1};
// Between two calls of `waiting`.
constexpr milliseconds kAttention{200};
// A member that does not answer for this long is asked together with the next one.
constexpr milliseconds kPatience{100};

struct Greeting {
  uint64_t magic = kMagic;
  uint64_t places = 0;
  uint64_t present = 0;  // bit i: the file of place i follows
  uint64_t refused = 0;  // the errno of the system, where it would not send them
};

struct Address {
  explicit Address(const std::string& name) {
    at.sun_family = AF_UNIX;
    const size_t n = std::min(name.size(), sizeof at.sun_path - 1);
    std::memcpy(at.sun_path + 1, name.data(), n);
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&at); }
  sockaddr_un at{};
  socklen_t size = 0;
};

Descriptor make_socket(int flags = 0) {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!socket) throw io_error("cannot make", "a local socket", errno);
  return socket;
}

// Takes the name, for this process without its children; an empty descriptor if it is taken.
Descriptor take(const std::string& name) {
  NoForks held;
  Descriptor socket = make_socket();
  const Address address(name);
  if (::bind(socket.get(), address.get(), address.size) != 0) {
    if (errno == EADDRINUSE) return {};
    throw io_error("cannot take the socket name", "@" + name, errno);
  }
  if (::listen(socket.get(), kBacklog) != 0) {
    throw io_error("cannot listen at", "@" + name, errno);
  }
  held.close_in_children(socket.get());
  return socket;
}

std::optional<ucred> peer_of(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer;
}

bool is_ours(const std::optional<ucred>& peer) { return peer && peer->uid == ::geteuid(); }

// The inode of the socket that has an abstract name, 0 if none has it; nothing without /proc.
std::optional<uint64_t> inode_of(const std::string& name) {
  std::ifstream sockets("/proc/self/net/unix");
  if (!sockets) return std::nullopt;
  for (std::string line; std::getline(sockets, line);) {
    std::istringstream fields(line);
    std::string skipped, path;
    uint64_t inode = 0;
    for (int i = 0; i < 6; ++i) fields >> skipped;
    if (fields >> inode >> path && path == "@" + name) return inode;
  }
  return 0;
}

// Whether a process of this user has the name, or none has it any more, as far as /proc shows.
bool may_be_ours(const std::string& name) {
  namespace fs = std::filesystem;
  const std::optional<uint64_t> inode = inode_of(name);
  if (!inode || *inode == 0) return inode.has_value();
  const fs::path link = "socket:[" + std::to_string(*inode) + "]";
  std::error_code ended, closed;
  for (fs::directory_iterator process("/proc", ended), last; !ended && process != last;
       process.increment(ended)) {
    for (fs::directory_iterator file(process->path() / "fd", closed), end; !closed && file != end;
         file.increment(closed)) {
      // To follow the link of another file may hang with its file system.
      std::error_code gone;
      if (fs::read_symlink(file->path(), gone) != link) continue;
      struct stat found {};
      return ::stat(file->path().c_str(), &found) == 0 && found.st_uid == ::geteuid();
    }
  }
  return inode_of(name) != inode;
}

// What one call waits for, with `waiting` now and then.
class Waits {
 public:
  explicit Waits(const Handover::Waiting& waiting) : waiting_(waiting) {}

  // Whether one of the sockets has news by then.
  bool poll(std::span<pollfd> sockets, Clock::time_point deadline) {
    for (;;) {
      const auto until = waiting_ ? std::min(next_, deadline) : deadline;
      const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
      const auto slice = static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000));
      if (::poll(sockets.data(), sockets.size(), slice) > 0) return true;
      if (waiting_ && Clock::now() >= next_) {
        waiting_();
        next_ = Clock::now() + kAttention;
      }
      if (Clock::now() >= deadline) return false;
    }
  }

 private:
  const Handover::Waiting& waiting_;
  Clock::time_point next_ = Clock::now() + kAttention;
};

void send_files(int socket, const std::vector<int>& files) noexcept {
  Greeting greeting;
  greeting.places = files.size();
  std::array<int, kMaxFiles> sent{};
  size_t n = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    if (files[i] < 0) continue;
    greeting.present |= uint64_t{1} << i;
    sent[n++] = files[i];
  }
  iovec bytes{&greeting, sizeof greeting};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof sent)> control{};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  if (n > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(n * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(n * sizeof(int));
    std::memcpy(CMSG_DATA(header), sent.data(), n * sizeof(int));
  }
  if (::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return;
  // Without an answer the other side would take this process for gone.
  Greeting refusal;
  refusal.refused = static_cast<uint64_t>(errno);
  ::send(socket, &refusal, sizeof refusal, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Nothing if the other side went away, is no nostall of this kind, or is told by its system that
// it cannot; `refused` then says why.
std::optional<std::vector<Descriptor>> receive_files(int socket, int& refused) {
  Greeting greeting;
  iovec bytes{&greeting, sizeof greeting};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFiles * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t n = 0;
  do {
    n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  std::vector<Descriptor> received;
  for (cmsghdr* h = n < 0 ? nullptr : CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= h->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(h) + at, sizeof fd);
      received.emplace_back(fd);
    }
  }
  if (n != sizeof greeting || greeting.magic != kMagic || greeting.places > kMaxFiles) {
    return std::nullopt;
  }
  if (greeting.refused != 0) {
    refused = static_cast<int>(greeting.refused);
    return std::nullopt;
  }
  const auto expected = static_cast<size_t>(__builtin_popcountll(greeting.present));
  if ((message.msg_flags & MSG_CTRUNC) != 0 || received.size() != expected) {
    throw Error(ErrorKind::io,
                "too many files are open in this process to share those of the other ranks of its "
                "node; raise ulimit -n",
                EMFILE);
  }
  std::vector<Descriptor> files;
  for (size_t i = 0, next = 0; i < greeting.places; ++i) {
    const bool there = (greeting.present >> i & 1) != 0 && next < received.size();
    files.push_back(there ? std::move(received[next++]) : Descriptor());
  }
  return files;
}

std::string base_of(const std::string& job) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(Fnv().bytes(job).value()));
  return "nostall-" + std::to_string(::geteuid()) + "-" + text + "-";
}

}  // namespace

// A thread that waits in accept, and answers.
struct Handover::Giving {
  Giving(Descriptor at, std::vector<int> what) : socket(std::move(at)), files(std::move(what)) {}
  ~Giving() { close_with_children(socket); }

  void start() {
    thread = std::thread([this] {
      pthread_setname_np(pthread_self(), "nostall-give");
      answer();
    });
  }
  void answer() noexcept {
    // Closed to serve a caller when no other descriptor is free: without an answer the caller would
    // take this process for one that hangs.
    Descriptor spare;
    while (!stopping.load()) {
      if (!spare) spare = Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      Descriptor caller(::accept4(socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!caller && (errno == EMFILE || errno == ENFILE)) {
        spare.reset();
        caller = Descriptor(::accept4(socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
      }
      if (caller) {
        if (is_ours(peer_of(caller.get()))) send_files(caller.get(), files);
      } else if (!stopping.load() && errno != EINTR && errno != ECONNABORTED) {
        std::this_thread::sleep_for(kPatience / 2);  // no descriptor is free
      }
    }
  }

  Descriptor socket;
  const std::vector<int> files;
  const pid_t owner = ::getpid();
  std::atomic<bool> stopping{false};
  std::thread thread;
};

Handover::Turn::Turn(Descriptor socket) noexcept : socket_(std::move(socket)) {}

Handover::Turn::~Turn() {
  if (socket_) close_with_children(socket_);
}

Handover::Handover(const std::string& job, uint32_t member, uint32_t members)
    : base_(base_of(job)), member_(member), members_(members) {}

Handover::~Handover() { stop(); }

std::string Handover::name(uint32_t attempt, const std::string& last) const {
  return base_ + std::to_string(attempt) + "-" + last;
}

Handover::Turn Handover::turn(Deadline deadline, const Waiting& waiting) const {
  Waits waits(waiting);
  std::string others;
  for (uint32_t attempt = 0; attempt < kAttempts; ++attempt) {
    const std::string wanted = name(attempt, "turn");
    Clock::time_point unheard_since = Clock::time_point::max();
    for (;;) {
      Descriptor mine = take(wanted);
      if (mine) return Turn(std::move(mine));
      // The holder listens and accepts nothing: the connection ends with its turn. It is the only one
      // of this call, for those that are given up stay in the queue of callers, which has an end.
      const Descriptor caller = make_socket(SOCK_NONBLOCK);
      const Address address(wanted);
      if (::connect(caller.get(), address.get(), address.size) == 0) {
        const auto holder = peer_of(caller.get());
        if (holder && !is_ours(holder)) {
          others = "user " + std::to_string(holder->uid) + " has @" + wanted;
          break;
        }
        pollfd end{caller.get(), POLLIN, 0};
        if (!waits.poll({&end, 1}, deadline)) {
          throw Error(ErrorKind::peer, "process " + std::to_string(holder ? holder->pid : 0) +
                                           " of this job holds the set-up of the node's shared "
                                           "memory for too long; end that process");
        }
        unheard_since = Clock::time_point::max();
        continue;
      }
      const int error = errno;
      const auto now = Clock::now();
      if (error == ECONNREFUSED) {
        unheard_since = std::min(unheard_since, now);
        if (now - unheard_since > kBetween) {
          if (!may_be_ours(wanted)) {
            others = "another program has @" + wanted;
            break;
          }
          unheard_since = now;
        }
      }
      if (now >= deadline) {
        const std::string why = error == EAGAIN
                                    ? "as many processes as may wait (net.core.somaxconn) call @"
                                    : "a program answers no caller at @";
        throw Error(ErrorKind::io,
                    "the ranks of this node cannot find each other: " + why + wanted +
                        "; end the program that has it, or give the job another name",
                    EADDRINUSE);
      }
      waits.poll({}, std::min(now + kLook, deadline));
    }
  }
  throw Error(ErrorKind::io,
              "the ranks of this node cannot find each other: " + others +
                  " and the names beside it; give the job another name",
              EADDRINUSE);
}

std::vector<Descriptor> Handover::ask(Deadline deadline, const Waiting& waiting) const {
  Waits waits(waiting);
  std::vector<pollfd> asked;
  std::vector<Descriptor> sockets;
  std::string unanswered;
  int refused = 0;
  for (uint32_t next = 0; next < kAttempts * members_ || !sockets.empty();) {
    bool there = false;
    if (next < kAttempts * members_) {
      const Address address(name(next / members_, std::to_string(next % members_)));
      ++next;
      Descriptor socket = make_socket(SOCK_NONBLOCK);
      if (::connect(socket.get(), address.get(), address.size) == 0) {
        const auto member = peer_of(socket.get());
        if (is_ours(member)) {
          unanswered = std::to_string(member->pid);
          asked.push_back({socket.get(), POLLIN, 0});
          sockets.push_back(std::move(socket));
          there = true;
        }
      }
    }
    const bool more = next < kAttempts * members_;
    // There is nothing to wait for at the name of a member that is not there.
    if (sockets.empty() || (more && !there)) continue;
    const bool answered =
        waits.poll(asked, more ? std::min(deadline, Clock::now() + kPatience) : deadline);
    if (!answered && Clock::now() >= deadline) {
      throw Error(ErrorKind::peer, "process " + unanswered +
                                       " of this job does not hand over the node's shared memory; "
                                       "end that process");
    }
    for (size_t i = 0; answered && i < asked.size();) {
      if (asked[i].revents == 0) {
        ++i;
        continue;
      }
      auto files = receive_files(sockets[i].get(), refused);
      if (files) return std::move(*files);
      asked.erase(asked.begin() + static_cast<ptrdiff_t>(i));
      sockets.erase(sockets.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  if (refused != 0) {
    throw io_error("another rank cannot share (raise ulimit -n)", "the memory of this node",
                   refused);
  }
  return {};
}

void Handover::give(std::vector<int> files) {
  stop();
  for (uint32_t attempt = 0; attempt < kAttempts; ++attempt) {
    Descriptor socket = take(name(attempt, std::to_string(member_)));
    if (!socket) continue;
    try {
      auto giving = std::make_unique<Giving>(std::move(socket), std::move(files));
      giving->start();
      giving_ = std::move(giving);
    } catch (const std::system_error& e) {
      throw io_error("cannot share the node's memory with its other ranks:", "a thread",
                     e.code().value());
    }
    return;
  }
  throw Error(ErrorKind::io,
              "the other ranks of this node cannot find this one: @" +
                  name(0, std::to_string(member_)) +
                  " and the names beside it are taken by other programs; give the job another name",
              EADDRINUSE);
}

void Handover::stop() noexcept {
  if (!giving_) return;
  if (giving_->owner != ::getpid()) {
    // In a forked child the thread does not exist, and the socket was closed.
    [[maybe_unused]] Giving* lost = giving_.release();
    return;
  }
  giving_->stopping.store(true);
  ::shutdown(giving_->socket.get(), SHUT_RDWR);
  giving_->thread.join();
  giving_.reset();
}

}  // namespace nostall
