// Formats events as JSON and compresses them with zlib, on the background thread.
#include "trace/writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "base/utf8.h"

namespace nostall::trace {
namespace {

void append(std::string& out, int64_t value) {
  std::array<char, 24> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  out.append(digits.data(), end);
}

// Nanoseconds as microseconds, exactly.
void append_us(std::string& out, int64_t ns) {
  append(out, ns / 1000);
  const int64_t rest = ns % 1000;
  if (rest <= 0) return;
  const char digits[4] = {'.', static_cast<char>('0' + rest / 100),
                          static_cast<char>('0' + rest / 10 % 10),
                          static_cast<char>('0' + rest % 10)};
  out.append(digits, 4);
}

int64_t realtime_ns() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace

std::string quoted(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const size_t size = utf8_character(text);
    const auto code = static_cast<unsigned char>(text[0]);
    if (size == 0) {
      out += "\\ufffd";
    } else if (code < 0x20) {
      constexpr std::string_view kHex = "0123456789abcdef";
      out += "\\u00";
      out += kHex[code >> 4];
      out += kHex[code & 15];
    } else {
      if (code == '"' || code == '\\') out += '\\';
      out += text.substr(0, size);
    }
    text.remove_prefix(std::max<size_t>(size, 1));
  }
  return out + '"';
}

KindText kind_text(std::string_view category, std::string_view name,
                   const std::vector<std::string>& arguments, pid_t pid) {
  KindText out;
  out.before = ",\n{\"ph\": \"X\", \"cat\": " + quoted(category) + ", \"name\": " + quoted(name) +
               ", \"pid\": " + std::to_string(pid) + ", \"tid\": ";
  for (const std::string& argument : arguments) out.arguments.push_back(quoted(argument) + ": ");
  return out;
}

Writer::Writer(const Config& config) : path_(config.path) {
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) throw io_error("cannot write the trace", path_, errno);
  // 31: a window of 32 KiB in a gzip stream; level 1: the CPU is the training's.
  if (deflateInit2(&stream_, 1, Z_DEFLATED, 31, 8, Z_DEFAULT_STRATEGY) != Z_OK) {
    ::close(file_);
    throw Error(ErrorKind::io, "there is no memory to compress the trace " + path_, ENOMEM);
  }
  const int64_t mono = now_ns();
  const int64_t real = realtime_ns();
  const std::string pid = std::to_string(::getpid());
  const std::string rank = std::to_string(config.rank);
  text_ =
      "{\"schemaVersion\": 1, \"distributedInfo\": {\"backend\": \"nostall\", \"rank\": " + rank +
      ", \"world_size\": " + std::to_string(config.world) +
      "}, \"host_name\": " + quoted(host_name()) +
      ", \"displayTimeUnit\": \"ms\", \"baseTimeNanoseconds\": " + std::to_string(real - mono) +
      ", \"traceEvents\": [\n" + "{\"ph\": \"M\", \"name\": \"clock_offset\", \"pid\": " + pid +
      ", \"args\": {\"monotonic_ns\": " + std::to_string(mono) +
      ", \"realtime_ns\": " + std::to_string(real) + "}},\n" +
      "{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": " + pid +
      ", \"args\": {\"name\": \"rank " + rank + "\"}},\n" +
      "{\"ph\": \"M\", \"name\": \"process_sort_index\", \"pid\": " + pid +
      ", \"args\": {\"sort_index\": " + rank + "}}";
}

Writer::~Writer() {
  deflateEnd(&stream_);
  if (file_ >= 0) ::close(file_);
}

void Writer::thread(pid_t tid, std::string_view name) {
  text_ += ",\n{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": ";
  append(text_, ::getpid());
  text_ += ", \"tid\": ";
  append(text_, tid);
  text_ += ", \"args\": {\"name\": " + quoted(name) + "}}";
}

void Writer::event(const KindText& kind, pid_t tid, int64_t begin, int64_t end,
                   const Values& values) {
  text_ += kind.before;
  append(text_, tid);
  text_ += ", \"ts\": ";
  append_us(text_, begin);
  text_ += ", \"dur\": ";
  append_us(text_, end > begin ? end - begin : 0);
  if (!kind.arguments.empty()) {
    text_ += ", \"args\": {";
    for (size_t i = 0; i < kind.arguments.size(); ++i) {
      if (i > 0) text_ += ", ";
      text_ += kind.arguments[i];
      append(text_, values[i]);
    }
    text_ += '}';
  }
  text_ += '}';
}

void Writer::compress(int mode) {
  std::array<unsigned char, 1 << 16> out;
  stream_.next_in = reinterpret_cast<unsigned char*>(text_.data());
  stream_.avail_in = static_cast<unsigned>(text_.size());
  do {
    stream_.next_out = out.data();
    stream_.avail_out = static_cast<unsigned>(out.size());
    deflate(&stream_, mode);
    size_t left = out.size() - stream_.avail_out;
    const unsigned char* at = out.data();
    while (left > 0) {
      const ssize_t done = ::write(file_, at, left);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) throw io_error("cannot write the trace", path_, done < 0 ? errno : ENOSPC);
      at += done;
      left -= static_cast<size_t>(done);
      bytes_ += static_cast<uint64_t>(done);
    }
  } while (stream_.avail_out == 0);
  text_.clear();
}

void Writer::write(bool flush) {
  if (flush || !text_.empty()) compress(flush ? Z_SYNC_FLUSH : Z_NO_FLUSH);
}

uint64_t Writer::finish(uint64_t events, uint64_t dropped) {
  text_ += ",\n{\"ph\": \"M\", \"name\": \"recorded\", \"pid\": ";
  append(text_, ::getpid());
  text_ += ", \"args\": {\"events\": " + std::to_string(events) +
           ", \"dropped\": " + std::to_string(dropped) + "}}\n]}\n";
  compress(Z_FINISH);
  // Some file systems tell only here that there was no room.
  if (::close(std::exchange(file_, -1)) != 0 && errno != EINTR) {
    throw io_error("cannot write the trace", path_, errno);
  }
  return bytes_;
}

}  // namespace nostall::trace
