// base/own.h - files that are this user's alone, and files without a name.
//
// Thread-safety: all functions are thread-safe.
#pragma once

#include <string>

#include "base/error.h"
#include "base/file.h"

namespace nostall {

// Opens a file whose name other users can predict, in a directory where they may make files: it is
// a regular file of this user, with one name, that no other user may open, and not a link. With
// O_CREAT, what stands in its place is removed where the directory allows it, with a warning. An
// Error names the file and what is wrong with it. `path` is relative to `directory` by its last
// component if that is given, and is what messages show.
Result<Descriptor> open_own(const std::string& path, int flags, int directory = kByPath);
// A directory of this user that no other user may enter; created if it is not there.
Result<Descriptor> own_directory(const std::string& path);
// A file in `directory` that has no name, so that nothing is left of it when the last process that
// has it open ends, however it ends. Where the file system cannot make one it has a name for a
// moment, while it is empty.
Result<Descriptor> unnamed_file(const std::string& directory);
// Memory as a file; `name` is seen in /proc.
Result<Descriptor> memory_file(const std::string& name);
// The same file, opened once more: locks of its own.
Result<Descriptor> reopen(int fd);

// While one lives, no thread forks: for what a child must not have, from the moment it is made
// until close_in_children. Its thread must not fork.
class NoForks {
 public:
  NoForks();
  ~NoForks();
  NoForks(const NoForks&) = delete;
  NoForks& operator=(const NoForks&) = delete;

  // In children that this process forks from now on, the descriptor is closed; until it is forgotten.
  // Async-signal-safe in the child.
  void close_in_children(int fd);
};

// Closes it, and takes it off that list: no child that is forked meanwhile keeps it.
void close_with_children(Descriptor& file) noexcept;

}  // namespace nostall
