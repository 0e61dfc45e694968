// Walks a tar archive header by header. A header's size says where the next one is. pax and GNU
// extension members are read first and override name and size of the member that follows.
#include "records/tar.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <unordered_map>

namespace nostall::records {
namespace {

constexpr uint64_t kBlock = 512;
constexpr uint64_t kMaxExtended = 1 << 20, kMaxContent = 64;
constexpr size_t kMaxName = 4096;  // as the system's paths; one header may name all that follow

struct Header {
  std::string name, link;
  uint64_t size = 0;
  char type = 0;
  bool empty = false;  // a block of zeros: the end
};

std::string_view text_of(std::span<const std::byte> bytes) {
  const std::string_view s(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return s.substr(0, s.find('\0'));
}

// Octal digits, or a big-endian number marked by its first bit (GNU); nothing if neither.
std::optional<uint64_t> number(std::span<const std::byte> field) {
  if ((field[0] & std::byte{0x80}) != std::byte{0}) {
    if (field[0] != std::byte{0x80}) return {};  // negative, or too large to be a size
    uint64_t value = 0;
    for (const std::byte b : field.subspan(1)) {
      if (value >> 55) return {};
      value = value << 8 | uint8_t(b);
    }
    return value;
  }
  uint64_t value = 0;
  bool digits = false;
  for (const std::byte b : field) {
    const char c = static_cast<char>(b);
    if (c == ' ' || c == '\0') {
      if (digits) break;
      continue;
    }
    if (c < '0' || c > '7') return {};
    value = value * 8 + static_cast<uint64_t>(c - '0');
    digits = true;
  }
  return value;
}

// Nothing if the block is no header.
std::optional<Header> parse(std::span<const std::byte> block) {
  Header h;
  if (std::all_of(block.begin(), block.end(), [](std::byte b) { return b == std::byte{0}; })) {
    h.empty = true;
    return h;
  }
  uint64_t sum = 0;
  int64_t signed_sum = 0;  // some old writers add signed characters
  for (size_t i = 0; i < kBlock; ++i) {
    const auto b = i >= 148 && i < 156 ? uint8_t{' '} : uint8_t(block[i]);
    sum += b;
    signed_sum += static_cast<int8_t>(b);
  }
  const auto stored = number(block.subspan(148, 8));
  const auto size = number(block.subspan(124, 12));
  if (!stored || !size) return {};
  if (*stored != sum && static_cast<int64_t>(*stored) != signed_sum) return {};
  h.size = *size;
  h.type = static_cast<char>(block[156]);
  h.name = text_of(block.first(100));
  h.link = text_of(block.subspan(157, 100));
  const bool ustar = text_of(block.subspan(257, 5)) == "ustar";
  if (ustar && block[263] == std::byte{'0'}) {
    if (const auto prefix = text_of(block.subspan(345, 155)); !prefix.empty()) {
      h.name = std::string(prefix) + "/" + h.name;
    }
  }
  return h;
}

// gzip, zstd, bzip2 or xz, by their first bytes.
bool is_compressed(std::span<const std::byte> block) {
  using namespace std::string_view_literals;
  const std::string_view begin(reinterpret_cast<const char*>(block.data()), block.size());
  return begin.starts_with("\x1f\x8b"sv) || begin.starts_with("\x28\xb5\x2f\xfd"sv) ||
         begin.starts_with("BZh"sv) ||
         begin.starts_with(
             "\xfd"
             "7zXZ"sv);
}

struct Extended {
  std::optional<std::string> path, link;
  std::optional<uint64_t> size;
  bool sparse = false;
};

// "LENGTH KEY=VALUE\n" records; false if they are not.
bool parse_pax(std::string_view text, Extended& out) {
  while (!text.empty()) {
    uint64_t length = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
    const auto digits = static_cast<size_t>(end - text.data());
    if (error != std::errc() || length > text.size() || length < digits + 3) return false;
    std::string_view record = text.substr(0, length);
    text.remove_prefix(length);
    if (record[digits] != ' ' || record.back() != '\n') return false;
    record = record.substr(digits + 1, length - digits - 2);
    const size_t equals = record.find('=');
    if (equals == std::string_view::npos) return false;
    const auto key = record.substr(0, equals), value = record.substr(equals + 1);
    if (key.starts_with("GNU.sparse")) out.sparse = true;
    // An empty value takes back what was said before.
    if (key == "path") out.path.reset();
    if (key == "linkpath") out.link.reset();
    if (key == "size") out.size.reset();
    if (value.empty()) continue;
    if (key == "path") out.path = std::string(value);
    if (key == "linkpath") out.link = std::string(value);
    if (key == "size") {
      uint64_t size = 0;
      const auto [stop, bad] = std::from_chars(value.data(), value.data() + value.size(), size);
      if (bad != std::errc() || stop != value.data() + value.size()) return false;
      out.size = size;
    }
  }
  return true;
}

// Whether all the rest of the file is zeros, as writers fill up their last record; nothing if it
// cannot be read.
std::optional<bool> only_zeros(FileWindow& window, uint64_t at) {
  constexpr uint64_t kAtOnce = 64 << 10;
  while (at < window.file_size()) {
    const uint64_t size = std::min(kAtOnce, window.file_size() - at);
    const auto bytes = window.get(at, static_cast<size_t>(size));
    if (bytes.empty()) return std::nullopt;
    if (std::ranges::any_of(bytes, [](std::byte b) { return b != std::byte{0}; })) return false;
    at += size;
  }
  return true;
}

bool ends_with(std::string_view name, std::string_view small) {
  return name.size() >= small.size() &&
         std::ranges::equal(name.substr(name.size() - small.size()), small, {},
                            [](char c) { return c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c; });
}

// Finds the files that hard links name, which need not be there. The last one of a path counts, as
// when the archive is unpacked.
class Files {
 public:
  const TarMember* find(const std::vector<TarMember>& members, const std::string& name) {
    for (; known_ < members.size(); ++known_) place_of_[path_of(members[known_].name)] = known_;
    if (name.size() > kMaxName) return nullptr;
    const auto it = place_of_.find(path_of(name));
    if (it == place_of_.end() || members[it->second].kind == TarKind::unread_link) return nullptr;
    return &members[it->second];
  }

 private:
  // "./a" is "a".
  static std::string path_of(const std::string& name) {
    return std::filesystem::path(name).lexically_normal().string();
  }

  std::unordered_map<std::string, size_t> place_of_;
  size_t known_ = 0;  // archives without hard links need none
};

}  // namespace

Result<std::vector<TarMember>> scan_tar(FileWindow& window, std::string_view keep_content) {
  std::vector<TarMember> members;
  Files files;
  Extended next, global;
  uint64_t at = 0;
  const auto damaged = [&](const std::string& what) -> Error {
    if (window.error()) return *window.error();
    return Error(ErrorKind::corruption, window.path() + " is no sound tar archive: " + what +
                                            " at offset " + std::to_string(at));
  };
  for (;;) {
    // Every writer ends an archive with blocks of zeros; without them members may be missing.
    if (at >= window.file_size()) {
      return damaged("it ends without an end mark, so it was cut off or is still being written,");
    }
    const auto block = window.get(at, kBlock);
    if (block.empty()) return damaged("it is cut off in the middle of a header");
    const auto header = parse(block);
    if (!header) {
      if (at == 0 && is_compressed(block)) {
        return Error(ErrorKind::usage, window.path() +
                                           " is compressed: members of it cannot be read alone; "
                                           "unpack it");
      }
      return damaged("damaged header");
    }
    if (header->empty) {
      const auto zeros = only_zeros(window, at + kBlock);
      if (!zeros) return damaged("what follows its end mark cannot be read, which is");
      if (!*zeros) {
        return damaged(
            "more follows its end mark (a header was lost, or archives were joined by cat: join "
            "them by tar --concatenate), which is");
      }
      break;
    }
    const uint64_t data = at + kBlock;
    const bool sized =
        header->type == 'x' || header->type == 'g' || header->type == 'L' || header->type == 'K';
    // Links, devices, folders: their size, if they have one, is that of something else.
    const bool no_data = header->type >= '1' && header->type <= '6';
    const uint64_t size = sized     ? header->size
                          : no_data ? 0
                                    : next.size.value_or(global.size.value_or(header->size));
    if (size > window.file_size() - data) {
      return damaged("member \"" + source::printable(next.path.value_or(header->name)) + "\" of " +
                     std::to_string(size) + " bytes is cut off, its header is");
    }
    if (sized) {
      if (size > kMaxExtended) {
        return damaged("a name or extended header of " + std::to_string(size) + " bytes");
      }
      std::string_view text;
      if (size > 0) {
        const auto bytes = window.get(data, static_cast<size_t>(size));
        if (bytes.empty()) return damaged("a name cannot be read");
        text = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
      }
      if (header->type == 'L') next.path = std::string(text.substr(0, text.find('\0')));
      if (header->type == 'K') next.link = std::string(text.substr(0, text.find('\0')));
      if (header->type == 'x' && !parse_pax(text, next)) return damaged("damaged pax header");
      if (header->type == 'g' && !parse_pax(text, global)) return damaged("damaged pax header");
    } else {
      const std::string name = next.path ? *next.path : global.path ? *global.path : header->name;
      if (header->type == 'S' || next.sparse || global.sparse) {
        return Error(ErrorKind::usage, window.path() + ": member \"" + source::printable(name) +
                                           "\" has holes (a sparse file), which is not read: make "
                                           "the archive without --sparse");
      }
      if (name.size() > kMaxName) {
        return damaged("a name of " + std::to_string(name.size()) + " bytes");
      }
      // Old archives say that a member is a folder by its name alone.
      const bool folder = name.ends_with('/');
      TarMember m{name, data, size, {}, TarKind::file};
      const bool file = header->type == '0' || header->type == '\0' || header->type == '7';
      bool again = false;
      if (header->type == '1' || header->type == '2') {
        const std::string& to = next.link ? *next.link : global.link ? *global.link : header->link;
        const TarMember* target = header->type == '1' ? files.find(members, to) : nullptr;
        // tar writes a file that it is given twice as a link to itself: it is there already.
        const TarMember* there = target ? files.find(members, name) : nullptr;
        again = there && there->offset == target->offset;
        m.kind = target ? TarKind::hard_link : TarKind::unread_link;
        m.offset = target ? target->offset : 0;
        m.size = target ? target->size : 0;
      }
      if (!folder && !again && (file || m.kind != TarKind::file)) {
        if (!keep_content.empty() && ends_with(name, keep_content) && m.size <= kMaxContent &&
            m.size > 0) {
          const auto bytes = window.get(m.offset, static_cast<size_t>(m.size));
          if (bytes.empty())
            return damaged("member \"" + source::printable(name) + "\" cannot be read");
          m.content.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        }
        members.push_back(std::move(m));
      }
      next = {};
    }
    at = data + (size + kBlock - 1) / kBlock * kBlock;
  }
  return members;
}

}  // namespace nostall::records
