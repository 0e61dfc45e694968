// The fields of sources that have no more than a record and a label.
#include "source/source.h"

namespace nostall::source {

Result<std::monostate> Source::locate(uint64_t sample, std::span<const std::byte> record,
                                      std::span<FieldBytes> out) const {
  if (out.size() != fields()) {
    return Error(ErrorKind::bug, "locate() is given another number of fields");
  }
  for (FieldBytes& field : out) field = {{}, false};
  if (!out.empty()) out[0] = {record, true};
  if (out.size() > 1) out[1] = {std::as_bytes(labels().subspan(sample, 1)), true};
  return std::monostate{};
}

}  // namespace nostall::source
