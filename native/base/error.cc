#include "base/error.h"

#include <system_error>

namespace nostall {

Error io_error(const std::string& what, const std::string& path, int error_number) {
  return Error(ErrorKind::io,
               what + " " + path + ": " + std::generic_category().message(error_number),
               error_number);
}

}  // namespace nostall
