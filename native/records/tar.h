// records/tar.h - the members of a tar archive: names, places, sizes. POSIX ustar and pax, GNU long
// names, sizes over 8 GiB. Sparse files (holes) and compressed archives are refused by name, and so
// is an archive without its end mark, or with more than zeros behind it, for members may be
// missing. Total: any bytes give a list or an Error (io, corruption with the offset, usage).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "records/file_window.h"

namespace nostall::records {

enum class TarKind : uint8_t {
  file,
  hard_link,    // another name for the bytes of a file before it, whose place it has
  unread_link,  // symbolic, or a hard one to what is no file before it: it has no place
};

struct TarMember {
  std::string name;
  uint64_t offset = 0, size = 0;  // of its bytes
  std::string content;            // of members with the suffix asked for, at most 64 bytes
  TarKind kind = TarKind::file;
};

// Files and links in the order of the archive, without hard links to the file that their path has
// already. `keep_content`: a suffix like ".cls" in small letters, which names may have in others;
// empty: none.
Result<std::vector<TarMember>> scan_tar(FileWindow& window, std::string_view keep_content = {});

}  // namespace nostall::records
