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

struct TarMember {
  std::string name;
  uint64_t offset = 0, size = 0;  // of its bytes
  std::string content;            // of members with the suffix asked for, at most 64 bytes
};

// Regular files in the order of the archive. `keep_content`: a suffix like ".cls"; empty: none.
Result<std::vector<TarMember>> scan_tar(FileWindow& window, std::string_view keep_content = {});

}  // namespace nostall::records
