// Gathers the ranks' ticks of each reduction, and writes events in Horovod's format.
#include "sync/timeline_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "trace/writer.h"

namespace nostall::sync {
namespace {

constexpr uint8_t kNone = 0, kWanted = 1, kFailed = 2;

// Ranks that share it share a clock.
uint64_t boot_of_this_host() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return std::hash<std::string>{}(id);
}

bool is_sign(const TensorSpec& tensor) { return !tensor.name.empty() && tensor.name[0] == '('; }

}  // namespace

TimelineWriter::TimelineWriter(Collectives& collectives, std::span<const TensorSpec> tensors,
                               std::vector<std::string> shapes)
    : collectives_(collectives),
      tensors_(tensors),
      shapes_(std::move(shapes)),
      owner_(::getpid()),
      clock_(boot_of_this_host()) {
  for (size_t i = shapes_.size(); i < tensors_.size(); ++i) {
    shapes_.push_back("[" + std::to_string(tensors_[i].count) + "]");
  }
}

std::unique_ptr<TimelineWriter> TimelineWriter::open(const std::string& path,
                                                     Collectives& collectives,
                                                     std::span<const TensorSpec> tensors,
                                                     std::vector<std::string> shapes) {
  std::unique_ptr<TimelineWriter> made(new TimelineWriter(collectives, tensors, std::move(shapes)));
  uint8_t state = kNone;
  int error = 0;
  if (collectives.rank() == 0 && !path.empty()) {
    made->path_ = path;
    made->file_ = Descriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    error = made->file_ ? 0 : errno;
    state = made->file_ ? kWanted : kFailed;
  }
  const auto all = collectives.all_gather(std::as_bytes(std::span(&state, 1)));
  const auto chosen = all[0].empty() ? kNone : std::to_integer<uint8_t>(all[0][0]);
  if (error != 0) throw io_error("cannot write the timeline", path, error);
  if (chosen == kFailed) throw Error(ErrorKind::peer, "rank 0 cannot write its timeline");
  if (chosen == kNone) return nullptr;
  if (collectives.rank() == 0) made->begin_file();
  return made;
}

void TimelineWriter::begin_file() {
  start_ = now_ns();
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  const int64_t epoch = int64_t{t.tv_sec} * 1'000'000 + t.tv_nsec / 1000;
  text_ =
      "[\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": 0, \"args\": {\"name\": "
      "\"metadata\"}},\n{\"name\": \"start_time_since_epoch_in_micros\", \"ph\": \"M\", \"pid\": "
      "0, \"args\": {\"start_time_since_epoch_in_micros\": " +
      std::to_string(epoch) + "}}";
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (is_sign(tensors_[i])) continue;
    const std::string pid = std::to_string(i + 1);
    text_ += ",\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": " + pid +
             ", \"args\": {\"name\": " + trace::quoted(tensors_[i].name) +
             "}}, {\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": " + pid +
             ", \"args\": {\"sort_index\": " + pid + "}}";
  }
  flush();
}

TimelineWriter::~TimelineWriter() {
  if (!file_ || ::getpid() != owner_) return;
  text_ = "\n]\n";
  flush();
}

void TimelineWriter::add(std::span<const uint32_t> tensors, std::span<const int64_t> ready,
                         const Moments& at) {
  std::vector<int64_t> mine = {static_cast<int64_t>(clock_), at.summed};
  mine.insert(mine.end(), ready.begin(), ready.end());
  auto all = collectives_.all_gather(std::as_bytes(std::span(mine)));
  if (!file_) return;
  std::vector<std::vector<int64_t>> ticks;  // by rank, this rank's clock
  for (const auto& bytes : all) {
    std::vector<int64_t> theirs(mine.size());
    std::memcpy(theirs.data(), bytes.data(), std::min(bytes.size(), mine.size() * sizeof mine[0]));
    const int64_t shift = theirs[0] == mine[0] ? 0 : at.summed - theirs[1];
    for (size_t i = 2; i < theirs.size(); ++i) theirs[i] += shift;
    ticks.push_back(std::move(theirs));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint32_t tensor = tensors[i];
    if (is_sign(tensors_[tensor])) continue;
    std::vector<std::pair<int64_t, uint32_t>> order;
    for (uint32_t r = 0; r < ticks.size(); ++r) order.emplace_back(ticks[r][i + 2], r);
    std::sort(order.begin(), order.end());
    const int64_t last = std::min(std::max(order.back().first, at.agreed), at.end);
    events_.push_back({order.front().first, tensor, 'B', "NEGOTIATE_ALLREDUCE", 0});
    for (const auto& [time, rank] : order) {
      events_.push_back({std::min(time, last), tensor, 'X', nullptr, rank});
    }
    events_.push_back({last, tensor, 'E', nullptr, 0});
    events_.push_back({last, tensor, 'B', "ALLREDUCE", 0});
    int64_t now = last;
    const auto phase = [&](const char* name, int64_t end) {
      if (end <= now) return;
      events_.push_back({now, tensor, 'B', name, 0});
      events_.push_back({end, tensor, 'E', nullptr, 0});
      now = end;
    };
    phase("QUEUE", at.begin);
    phase("MEMCPY_IN_FUSION_BUFFER", at.copied);
    phase("NOSTALL_ALLREDUCE", at.summed);
    phase("MEMCPY_OUT_FUSION_BUFFER", at.end);
    events_.push_back({at.end, tensor, 'Z', nullptr, 0});
  }
}

void TimelineWriter::write() {
  if (!file_) return;
  std::stable_sort(events_.begin(), events_.end(),
                   [](const Event& a, const Event& b) { return a.time < b.time; });
  for (const Event& event : events_) append(event);
  events_.clear();
  flush();
}

void TimelineWriter::append(const Event& event) {
  const int64_t us = std::max<int64_t>(0, event.time - start_) / 1000;
  text_ += ",\n{\"ph\": \"";
  text_ += event.phase == 'Z' ? 'E' : event.phase;
  text_ += "\", ";
  if (event.phase == 'B') text_ += "\"name\": \"" + std::string(event.name) + "\", ";
  if (event.phase == 'X') text_ += "\"name\": \"" + std::to_string(event.rank) + "\", ";
  text_ += "\"ts\": " + std::to_string(us) + ", \"pid\": " + std::to_string(event.tensor + 1);
  if (event.phase == 'X') text_ += ", \"dur\": 0";
  if (event.phase == 'Z') {
    text_ += ", \"args\": {\"dtype\": \"" +
             std::string(collective::name_of(tensors_[event.tensor].type)) +
             "\", \"shape\": " + trace::quoted(shapes_[event.tensor]) + "}";
  }
  text_ += '}';
}

void TimelineWriter::flush() {
  for (size_t at = 0; at < text_.size();) {
    const ssize_t done = ::write(file_.get(), text_.data() + at, text_.size() - at);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      log(LogLevel::warning,
          std::string(
              io_error("cannot write the timeline", path_, done < 0 ? errno : ENOSPC).what()) +
              "; it ends here");
      file_.reset();
      break;
    }
    at += static_cast<size_t>(done);
  }
  text_.clear();
}

}  // namespace nostall::sync
