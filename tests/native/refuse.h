// A thread in which the kernel refuses system calls, as it does at a limit; other threads are not
// touched.
#pragma once

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <functional>
#include <thread>
#include <vector>

namespace nostall {

// From now on, calls of `numbers` by this thread and those that it starts fail with `error`.
inline void refuse(const std::vector<int>& numbers, int error) {
  std::vector<sock_filter> filter = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0)};  // the number
  for (const int number : numbers) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<__u32>(number), 0, 1));
    filter.push_back(
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (static_cast<__u32>(error) & 0xffff)));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

// Runs `work` in a thread whose calls of `numbers` fail with `error`.
inline void with_refused(const std::vector<int>& numbers, int error,
                         const std::function<void()>& work) {
  std::thread([&] {
    ASSERT_NO_FATAL_FAILURE(refuse(numbers, error));
    work();
  }).join();
}

// Whether this machine has io_uring; containers often forbid it.
inline bool has_uring() {
  unsigned char parameters[120] = {};  // io_uring_params
  const long ring = ::syscall(SYS_io_uring_setup, 1, parameters);
  if (ring >= 0) ::close(static_cast<int>(ring));
  return ring >= 0;
}

// What starts a thread.
inline const std::vector<int> kThreadCalls = {SYS_clone, SYS_clone3};

}  // namespace nostall
