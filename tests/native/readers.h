// The kinds of readers that this machine has.
#pragma once

#include <vector>

#include "refuse.h"
#include "source/source.h"

namespace nostall::source {

// Where io_uring is forbidden, `automatic` is what replaces it.
inline std::vector<ReaderKind> reader_kinds() {
  std::vector<ReaderKind> kinds{ReaderKind::pread, ReaderKind::automatic};
  if (has_uring()) kinds.push_back(ReaderKind::uring);
  return kinds;
}

}  // namespace nostall::source
