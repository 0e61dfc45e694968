// Runs a function in a forked child.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace nostall {

// The exit status of a child that runs `body`, whose value is its status; a signal that ended it, negative.
// The child ends at its _exit: neither destructors of statics nor the rest of the test run in it.
template <typename Body>
int status_of_child(const Body& body) {
  constexpr unsigned kSeconds = 30;  // a child that hangs is ended by SIGALRM
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kSeconds);
    ::_exit(body());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace nostall
