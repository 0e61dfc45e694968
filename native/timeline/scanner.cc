// Finds events in a stream. Whole events are parsed in place; the beginning of a cut one is carried
// over to the next call. After damage the scan goes on at the next '{'.
#include "timeline/scanner.h"

#include <algorithm>

namespace nostall::timeline {
namespace {

constexpr size_t kMaxHead = 64 << 10;

bool is_separator(char b) {
  return b == ',' || b == '\n' || b == ' ' || b == '\r' || b == '\t' || b == '[';
}

}  // namespace

void Scanner::damage(uint64_t offset, uint64_t count) {
  report_.damaged_bytes += count;
  if (in_damage_) return;
  in_damage_ = true;
  ++report_.damaged;
  if (report_.first_damage < 0) report_.first_damage = static_cast<int64_t>(offset);
}

size_t Scanner::scan(std::string_view text, bool last) {
  Event event;
  size_t at = 0;
  while (at < text.size()) {
    const char b = text[at];
    if (is_separator(b)) {
      ++at;
      continue;
    }
    if (b == ']') {
      report_.closed = true;
      ++at;
      continue;
    }
    const uint64_t offset = consumed_ + at;
    if (b != '{') {
      // After the array, the rest of its container is not damage.
      size_t next = at + 1;
      while (next < text.size() && !is_separator(text[next]) && text[next] != '{' &&
             text[next] != ']') {
        ++next;
      }
      if (!report_.closed) damage(offset, next - at);
      at = next;
      continue;
    }
    const std::string_view rest = text.substr(at, kMaxEventBytes);
    switch (parse_event(rest, event)) {
      case Parsed::event:
        ++report_.events;
        if (event.phase == 0) ++report_.foreign;
        if (report_.cut_off >= 0 && event.phase != 0) {  // so it was damage, not the end
          in_damage_ = false;
          damage(static_cast<uint64_t>(report_.cut_off), 0);
          report_.cut_off = -1;
        }
        in_damage_ = false;
        report_.closed = false;
        sink_(event, offset);
        at += event.raw.size();
        break;
      case Parsed::container:
        if (report_.head.empty()) {
          report_.head = std::string(event.raw.substr(0, std::min(kMaxHead, event.raw.size())));
        }
        in_damage_ = false;
        report_.closed = false;
        at += event.raw.size();
        break;
      case Parsed::more:
        if (rest.size() < kMaxEventBytes && !last) return at;
        if (last && rest.size() < kMaxEventBytes && report_.cut_off < 0) {
          report_.cut_off = static_cast<int64_t>(offset);
          in_damage_ = true;
        } else {
          damage(offset, 1);
        }
        ++at;
        break;
      case Parsed::bad:
        damage(offset, 1);
        ++at;
        break;
    }
  }
  return at;
}

void Scanner::feed(std::string_view bytes) {
  report_.bytes += bytes.size();
  if (!carry_.empty()) {
    // The cut event is finished with a copy of as few of the new bytes as any event may need.
    const size_t held = carry_.size();
    const size_t taken = std::min(bytes.size(), kMaxEventBytes);
    carry_.append(bytes.substr(0, taken));
    const size_t done = scan(carry_, false);
    consumed_ += done;
    if (taken == bytes.size()) {
      carry_.erase(0, done);
      return;
    }
    // A position in the held bytes has kMaxEventBytes behind it, so it was not waited at.
    bytes.remove_prefix(done - held);
    carry_.clear();
  }
  const size_t done = scan(bytes, false);
  consumed_ += done;
  carry_.assign(bytes.substr(done));
}

void Scanner::finish() {
  consumed_ += scan(carry_, true);
  carry_.clear();
}

}  // namespace nostall::timeline
