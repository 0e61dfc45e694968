// The parallel passes that make record tables. Threads take blocks of consecutive records from one
// counter, so that the reads of a thread follow each other.
#include "records/build.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/crc32c.h"
#include "base/crew.h"
#include "base/mutex.h"
#include "base/sums.h"
#include "records/file_window.h"
#include "records/records.h"
#include "records/tar.h"
#include "records/tfrecord.h"

namespace nostall::records {
namespace {

constexpr std::chrono::milliseconds kReportEvery{100};
// Records that a thread takes at a time, so that its reads follow each other.
constexpr uint64_t kPayloadsAtOnce = 64;
constexpr size_t kPayloadAhead = 16 << 10;
// Most bytes of a record that are read before and after its image, to compute the image's checksum
// from the record's.
constexpr size_t kMostBeside = 4096;

std::vector<std::byte> head_of(FileWindow& window, uint64_t offset, uint64_t length) {
  const auto bytes = window.get(offset, std::min<uint64_t>(length, kMostBeside));
  return {bytes.begin(), bytes.end()};
}

uint32_t sum_of(FileWindow& window, uint32_t crc, std::span<const std::byte> head, uint64_t offset,
                uint64_t length, const Payload& payload) {
  const uint64_t before = payload.offset - offset, end = payload.offset + payload.length;
  const uint64_t after = offset + length - end;
  if (before > head.size() || after > kMostBeside) return 0;
  const auto tail = window.get(end, after);
  if (tail.size() != after) return 0;
  return sample_sum_of_crc(crc32c_between(crc, head.first(before), payload.length, tail));
}

}  // namespace

void each_in_parallel(const Storage& storage, uint64_t count, unsigned threads,
                      const std::function<void(RangeReader&, uint64_t)>& work,
                      const std::function<void(uint64_t)>& progress) {
  std::atomic<uint64_t> next{0}, done{0};
  Mutex mutex;
  Condition finished;
  std::exception_ptr error;
  unsigned ended = 0;
  const auto loop = [&] {
    try {
      const auto reader = storage.make_reader(source::ReaderKind::pread, 1);
      for (uint64_t i = next++; i < count; i = next++) {
        work(*reader, i);
        ++done;
      }
    } catch (...) {
      next = count;
      const MutexLock lock(mutex);
      if (!error) error = std::current_exception();
    }
    const MutexLock lock(mutex);
    ++ended;
    finished.notify_all();
  };
  Crew workers;
  unsigned running =
      workers.start(static_cast<unsigned>(std::min<uint64_t>(std::max(1u, threads), count)), loop);
  if (running == 0 && count > 0) {
    loop();
    running = 1;
  }
  {
    MutexLock lock(mutex);
    while (ended < running) {
      if (finished.wait_for(lock, kReportEvery) || !progress) continue;
      lock.unlock();
      try {
        progress(done);
      } catch (...) {
        next = count;  // the user stopped it
        lock.lock();
        if (!error) error = std::current_exception();
        while (ended < running) finished.wait(lock);
        break;
      }
      lock.lock();
    }
  }
  workers.join();
  if (error) std::rethrow_exception(error);
  if (progress) progress(count);
}

TarMembers scan_tars(const Storage& storage, const std::string& keep_content, unsigned threads,
                     const std::function<void(uint64_t)>& progress) {
  std::vector<std::vector<TarMember>> all(storage.files().size());
  each_in_parallel(
      storage, all.size(), threads,
      [&](RangeReader& reader, uint64_t i) {
        FileWindow window(reader, storage, static_cast<uint32_t>(i));
        all[i] = scan_tar(window, keep_content).take();
      },
      progress);
  TarMembers members;
  for (size_t f = 0; f < all.size(); ++f) {
    for (TarMember& m : all[f]) {
      members.file.push_back(static_cast<uint32_t>(f));
      members.offset.push_back(m.offset);
      members.size.push_back(m.size);
      members.names.push_back(std::move(m.name));
      members.contents.push_back(std::move(m.content));
      members.kinds.push_back(static_cast<uint8_t>(m.kind));
    }
  }
  return members;
}

TfRecordPlaces scan_tfrecords(const Storage& storage, bool check, unsigned threads,
                              const std::function<void(uint64_t)>& progress) {
  std::vector<TfRecords> all(storage.files().size());
  each_in_parallel(
      storage, all.size(), threads,
      [&](RangeReader& reader, uint64_t i) {
        FileWindow window(reader, storage, static_cast<uint32_t>(i));
        all[i] = scan_tfrecord(window, check).take();
      },
      progress);
  TfRecordPlaces places;
  for (size_t f = 0; f < all.size(); ++f) {
    places.file.insert(places.file.end(), all[f].length.size(), static_cast<uint32_t>(f));
    places.offset.insert(places.offset.end(), all[f].offset.begin(), all[f].offset.end());
    places.length.insert(places.length.end(), all[f].length.begin(), all[f].length.end());
    places.crc.insert(places.crc.end(), all[f].crc.begin(), all[f].crc.end());
  }
  return places;
}

std::vector<Payload> find_payloads(const Storage& storage, std::span<const uint32_t> file,
                                   std::span<const uint64_t> offset,
                                   std::span<const uint64_t> length, PayloadKind kind,
                                   const std::string& image, const std::string& label,
                                   unsigned threads, const std::function<void(uint64_t)>& progress,
                                   std::span<const uint32_t> crc) {
  const uint64_t n = length.size();
  std::vector<Payload> payloads(n);
  const auto find = [&](FileWindow& window, uint64_t i) {
    switch (kind) {
      case PayloadKind::datum:
        return find_datum(window, offset[i], length[i]);
      case PayloadKind::pickled:
        return find_pickled(window, offset[i], length[i]);
      case PayloadKind::example:
        break;
    }
    return find_example(window, offset[i], length[i], image, label);
  };
  const uint64_t chunks = (n + kPayloadsAtOnce - 1) / kPayloadsAtOnce;
  each_in_parallel(
      storage, chunks, threads,
      [&](RangeReader& reader, uint64_t chunk) {
        std::optional<FileWindow> window;
        const uint64_t end = std::min(n, (chunk + 1) * kPayloadsAtOnce);
        for (uint64_t i = chunk * kPayloadsAtOnce; i < end; ++i) {
          const uint32_t f = file.empty() ? 0 : file[i];
          if (!window || window->file() != f) window.emplace(reader, storage, f, kPayloadAhead);
          std::vector<std::byte> head;
          if (!crc.empty()) head = head_of(*window, offset[i], length[i]);
          payloads[i] = find(*window, i).take();
          if (!crc.empty()) {
            payloads[i].sum = sum_of(*window, crc[i], head, offset[i], length[i], payloads[i]);
          }
        }
      },
      progress ? [&](uint64_t done) { progress(std::min(n, done * kPayloadsAtOnce)); }
               : std::function<void(uint64_t)>());
  return payloads;
}

namespace {

[[noreturn]] void refuse(const Storage& storage, uint32_t file, uint64_t offset,
                         const std::string& what) {
  throw Error(ErrorKind::usage, "the record at offset " + std::to_string(offset) + " of " +
                                    storage.files()[file].path + " " + what);
}

bool is_number(MemberType type) { return type == MemberType::integer || type == MemberType::real; }

// Adds what one member is to what is known of its name.
void join(MembersFound& found, size_t place, const Member& member, const Storage& storage,
          uint32_t file, uint64_t offset) {
  const std::string& name = found.names[place];
  MemberType& type = found.types[place];
  if (member.type == MemberType::unread) {
    refuse(storage, file, offset,
           "has a value of \"" + name +
               "\" that is not read: several byte strings, numbers that are not packed, a "
               "compressed array, or a list that is not of numbers; name the other fields");
  }
  if (type == MemberType::none) {
    type = member.type;
    found.lists[place] = member.list ? 1 : 0;
  } else if ((type != member.type && !(is_number(type) && is_number(member.type))) ||
             (found.lists[place] != 0) != member.list) {
    const auto text = [](MemberType t, bool list) {
      return std::string(list ? "a list of " : "") + std::string(name_of(t));
    };
    refuse(storage, file, offset,
           "has " + text(member.type, member.list) + " in \"" + name +
               "\", records before it have " + text(type, found.lists[place] != 0));
  } else if (type != member.type) {
    type = MemberType::real;
  }
  found.least[place] = std::min(found.least[place], member.count);
  found.most[place] = std::max(found.most[place], member.count);
}

}  // namespace

MembersFound find_all_members(const Storage& storage, std::span<const uint32_t> file,
                              std::span<const uint64_t> offset, std::span<const uint64_t> length,
                              MembersKind kind, const std::vector<std::string>& names,
                              unsigned threads, const std::function<void(uint64_t)>& progress) {
  const uint64_t n = length.size();
  const uint64_t chunks = (n + kPayloadsAtOnce - 1) / kPayloadsAtOnce;
  const auto file_of = [&](uint64_t i) { return file.empty() ? 0 : file[i]; };
  MembersFound found;
  std::map<std::string, size_t, std::less<>> place_of;
  const auto place = [&](const std::string& name) {
    const auto [it, made] = place_of.try_emplace(name, found.names.size());
    if (made) {
      found.names.push_back(name);
      found.types.push_back(MemberType::none);
      found.lists.push_back(0);
      found.least.push_back(std::numeric_limits<uint32_t>::max());
      found.most.push_back(0);
    }
    return it->second;
  };
  for (const std::string& name : names) place(name);
  // Each name is kept once for all records: few bytes may repeat a long one.
  struct Found {
    uint64_t record = 0;
    const std::string* name = nullptr;
    Member member;
  };
  Mutex mutex;
  std::set<std::string> known(names.begin(), names.end());
  std::vector<std::vector<Found>> all(chunks);
  each_in_parallel(
      storage, chunks, threads,
      [&](RangeReader& reader, uint64_t chunk) {
        std::optional<FileWindow> window;
        const uint64_t end = std::min(n, (chunk + 1) * kPayloadsAtOnce);
        for (uint64_t i = chunk * kPayloadsAtOnce; i < end; ++i) {
          if (!window || window->file() != file_of(i)) {
            window.emplace(reader, storage, file_of(i), kPayloadAhead);
          }
          auto members = find_members(*window, offset[i], length[i], kind, names).take();
          const MutexLock lock(mutex);
          for (Member& member : members) {
            const std::string& name = *known.insert(std::exchange(member.name, {})).first;
            all[chunk].push_back({i, &name, std::move(member)});
          }
          if (known.size() > kMostParts) {
            refuse(storage, file_of(i), offset[i],
                   "has values of more than " + std::to_string(kMostParts) +
                       " names, with those of the records before it: name the fields");
          }
        }
      },
      progress ? [&](uint64_t done) { progress(std::min(n, done * kPayloadsAtOnce)); }
               : std::function<void(uint64_t)>());
  for (const std::vector<Found>& some : all) {
    for (const Found& f : some) {
      const size_t at = place(*f.name);
      if (f.member.type != MemberType::none) {
        join(found, at, f.member, storage, file_of(f.record), offset[f.record]);
      }
    }
  }
  const size_t fields = found.names.size();
  found.offset.assign(n * fields, kNoMember);
  found.length.assign(n * fields, 0);
  for (std::vector<Found>& some : all) {
    for (const Found& f : some) {
      const uint64_t at = f.record * fields + place(*f.name);
      const bool there = f.member.type != MemberType::none;
      found.offset[at] = there ? f.member.offset : kNoMember;
      found.length[at] = there ? f.member.length : 0;
    }
    some = {};
  }
  return found;
}

}  // namespace nostall::records
