// Names and sizes of element types, operations and algorithms.
#include "collective/types.h"

#include <array>

namespace nostall::collective {
namespace {

struct TypeRow {
  std::string_view name;
  size_t size, alignment;
};
constexpr std::array<TypeRow, kDataTypes> kTypeRows{{{"float16", 2, 2},
                                                     {"bfloat16", 2, 2},
                                                     {"float32", 4, 4},
                                                     {"float64", 8, 8},
                                                     {"int8", 1, 1},
                                                     {"int16", 2, 2},
                                                     {"int32", 4, 4},
                                                     {"int64", 8, 8},
                                                     {"uint8", 1, 1},
                                                     {"uint16", 2, 2},
                                                     {"uint32", 4, 4},
                                                     {"uint64", 8, 8},
                                                     {"bool", 1, 1},
                                                     {"complex64", 8, 4},
                                                     {"complex128", 16, 8}}};
constexpr std::array<std::string_view, kOps> kOpNames{"sum", "prod", "min",  "max", "land",
                                                      "lor", "lxor", "band", "bor", "bxor"};
constexpr std::array<std::string_view, kAlgorithms> kAlgorithmNames{
    "cooperative",        "arrival_leader", "arrival_chain", "leader",
    "recursive_doubling", "ring",           "rsa",           "binomial"};

template <typename T, typename Names>
std::optional<T> find(const Names& names, std::string_view name) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<T>(i);
  }
  return std::nullopt;
}

}  // namespace

size_t size_of(DataType type) noexcept { return kTypeRows[static_cast<size_t>(type)].size; }
size_t alignment_of(DataType type) noexcept {
  return kTypeRows[static_cast<size_t>(type)].alignment;
}
std::string_view name_of(DataType type) noexcept {
  return kTypeRows[static_cast<size_t>(type)].name;
}
std::string_view name_of(Op op) noexcept { return kOpNames[static_cast<size_t>(op)]; }
std::string_view name_of(Algorithm algorithm) noexcept {
  return kAlgorithmNames[static_cast<size_t>(algorithm)];
}
std::optional<DataType> find_data_type(std::string_view name) noexcept {
  for (size_t i = 0; i < kTypeRows.size(); ++i) {
    if (kTypeRows[i].name == name) return static_cast<DataType>(i);
  }
  return std::nullopt;
}
std::optional<Op> find_op(std::string_view name) noexcept { return find<Op>(kOpNames, name); }
std::optional<Algorithm> find_algorithm(std::string_view name) noexcept {
  return find<Algorithm>(kAlgorithmNames, name);
}

}  // namespace nostall::collective
