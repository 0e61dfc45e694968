// One table of the types.
#include "fields/types.h"

#include <algorithm>
#include <array>

namespace nostall::fields {
namespace {

struct Row {
  std::string_view name;
  size_t size;
};
// In the order of the enumerators.
constexpr std::array<Row, 12> kTypes{{{"bool", 1},
                                      {"uint8", 1},
                                      {"uint16", 2},
                                      {"uint32", 4},
                                      {"uint64", 8},
                                      {"int8", 1},
                                      {"int16", 2},
                                      {"int32", 4},
                                      {"int64", 8},
                                      {"float16", 2},
                                      {"float32", 4},
                                      {"float64", 8}}};

}  // namespace

size_t size_of(Type type) noexcept { return kTypes[static_cast<size_t>(type)].size; }

std::string_view name_of(Type type) noexcept { return kTypes[static_cast<size_t>(type)].name; }

Result<Type> type_named(std::string_view name) {
  std::string known;
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].name == name) return static_cast<Type>(i);
    known += (i == 0 ? "" : ", ") + std::string(kTypes[i].name);
  }
  return Error(ErrorKind::usage, "dtype " + std::string(name) + " is not one of " + known);
}

size_t Output::bytes() const noexcept {
  size_t bytes = size_of(type);
  for (const int64_t side : shape) bytes *= static_cast<size_t>(side);
  return bytes;
}

bool Output::by_rows() const noexcept {
  return !shape.empty() && shape[0] == kRagged &&
         std::none_of(shape.begin() + 1, shape.end(), [](int64_t d) { return d == kRagged; });
}

}  // namespace nostall::fields
