// Reads the table of algorithms, and finds from arrival times whether ranks are balanced.
#include "collective/selection.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/error.h"
#include "base/fnv.h"

namespace nostall::collective {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::usage, "the table of collectives " + what +
                                    "; write it again with nostall calibrate collectives, or set "
                                    "NOSTALL_COLLECTIVES=off");
}

// The number of the JSON member "version", or 0.
uint32_t version_of(std::string_view json) {
  constexpr std::string_view kKey = "\"version\"";
  const size_t key = json.find(kKey);
  if (key == std::string_view::npos) return 0;
  const size_t at = json.find_first_not_of(" \t\r\n:", key + kKey.size());
  uint32_t version = 0;
  if (at != std::string_view::npos) {
    std::from_chars(json.data() + at, json.data() + json.size(), version);
  }
  return version;
}

// The strings of the JSON array "table".
std::vector<std::string> rows_of(std::string_view json) {
  if (version_of(json) != 1) refuse("is not of version 1");
  const size_t key = json.find("\"table\"");
  const size_t open = key == std::string_view::npos ? key : json.find('[', key);
  const size_t close = open == std::string_view::npos ? open : json.find(']', open);
  if (close == std::string_view::npos) refuse("has no array \"table\"");
  std::vector<std::string> rows;
  for (size_t at = json.find('"', open); at < close; at = json.find('"', at + 1)) {
    const size_t end = json.find('"', at + 1);
    if (end == std::string_view::npos || end > close) refuse("has a string without an end");
    rows.emplace_back(json.substr(at + 1, end - at - 1));
    at = end;
  }
  return rows;
}

}  // namespace

Selection::Selection(std::string_view json, uint32_t ranks) {
  if (json.empty()) return;
  uint32_t least = std::numeric_limits<uint32_t>::max(), nearest = 0;
  for (const std::string& text : rows_of(json)) {
    std::istringstream words(text);
    Row row{};
    std::string arrival, algorithm, rest;
    words >> row.ranks >> arrival >> row.up_to >> algorithm;
    const auto found = find_algorithm(algorithm);
    if (!words || (words >> rest) || !found || (arrival != "together" && arrival != "apart")) {
      refuse("has the row \"" + text.substr(0, 80) +
             "\" where RANKS together|apart BYTES ALGORITHM should be");
    }
    row.imbalanced = arrival == "apart";
    row.algorithm = *found;
    rows_.push_back(row);
    least = std::min(least, row.ranks);
    if (row.ranks <= ranks) nearest = std::max(nearest, row.ranks);
  }
  const uint32_t kept = nearest > 0 ? nearest : least;
  std::erase_if(rows_, [kept](const Row& row) { return row.ranks != kept; });
  std::stable_sort(rows_.begin(), rows_.end(),
                   [](const Row& a, const Row& b) { return a.up_to < b.up_to; });
}

Algorithm Selection::choose(uint64_t bytes, bool imbalanced) const noexcept {
  for (const Row& row : rows_) {
    if (row.imbalanced == imbalanced && bytes <= row.up_to) return row.algorithm;
  }
  return Algorithm::cooperative;
}

uint64_t Selection::hash() const noexcept {
  if (rows_.empty()) return 0;
  Fnv hash;
  for (const Row& row : rows_) {
    hash.word(row.imbalanced).word(row.up_to).word(static_cast<uint64_t>(row.algorithm));
  }
  return hash.value();
}

std::string selection_text(std::string_view named) {
  if (named == "off") return {};
  std::string path(named);
  if (named.empty()) {
    const char* cache = std::getenv("XDG_CACHE_HOME");
    const char* home = std::getenv("HOME");
    if (cache == nullptr && home == nullptr) return {};
    path = cache != nullptr ? std::string(cache) : std::string(home) + "/.cache";
    path += "/nostall/collectives.json";
    if (::access(path.c_str(), F_OK) != 0) return {};
  }
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw io_error("cannot read the table of collectives", path, errno);
  if (text.empty()) refuse(path + " is empty");
  return text;
}

// The word: the call from which a finding counts, that finding, the one before.
bool Phase::arrive(int64_t now) noexcept {
  ++call_;
  shared_.line(rank_).arrived[call_ % 2].store(now, std::memory_order_relaxed);
  const uint64_t word = shared_.header().phase.load(std::memory_order_seq_cst);
  return (call_ >= word >> 2 ? word >> 1 & 1 : word & 1) != 0;
}

void Phase::leave(int64_t now) noexcept {
  if (rank_ != 0) return;
  int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
  for (uint32_t r = 0; r < ranks_; ++r) {
    const int64_t at = shared_.line(r).arrived[call_ % 2].load(std::memory_order_relaxed);
    first = std::min(first, at);
    last = std::max(last, at);
  }
  // Apart: the first waited for longer than the work takes.
  balance_ = std::clamp(balance_ + (last - first > now - last ? 1 : -1), -kCertain, kCertain);
  const uint64_t word = shared_.header().phase.load(std::memory_order_seq_cst);
  const uint64_t was = word >> 1 & 1, is = balance_ == kCertain    ? 1
                                           : balance_ == -kCertain ? 0
                                                                   : was;
  if (is == was || call_ < word >> 2) return;
  shared_.header().phase.store((call_ + 2) << 2 | is << 1 | was, std::memory_order_seq_cst);
}

}  // namespace nostall::collective
