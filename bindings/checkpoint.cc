// Snapshots, their files, and the lock of a checkpoint directory; all work without the GIL.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "arrays.h"
#include "base/activity.h"
#include "base/crc32c.h"
#include "base/lock.h"
#include "checkpoint/transfer.h"
#include "checkpoint/write.h"
#include "module.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;
using namespace nostall::checkpoint;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

WriteOptions options_of(uint64_t rate, Priority priority, unsigned threads, bool direct,
                        double gate_patience, bool considerate) {
  return {rate, priority, threads, direct, gate_patience, considerate};
}

// An Activity for as long as a `with` lasts.
struct Working {
  std::optional<Activity> activity;
};

// Counts bytes that a long read has done, for a display of progress.
struct Progress {
  std::atomic<uint64_t> bytes{0};
};

// One job at a time changes a directory.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& path) : lock_(LockFile::open(path, true).take()) {}
  Locked acquire() { return lock_.try_lock(0, LockMode::exclusive); }
  int error_number() const { return lock_.error_number(); }
  void release() { lock_.unlock(0); }

 private:
  LockFile lock_;
};

// A file, and memory of its size, which is taken as it is filled.
struct FileInMemory {
  FileInMemory(const std::string& path, uint64_t length, std::vector<uint32_t> crcs)
      : file(path, length, std::move(crcs)),
        memory(std::make_shared<Memory>(length, 0)),
        size(length) {}

  CheckedFile file;
  std::shared_ptr<Memory> memory;
  uint64_t size;
};

void bind_snapshot(nb::module_& m) {
  nb::enum_<Copying>(m, "Copying")
      .value("at_once", Copying::at_once)
      .value("in_background", Copying::in_background)
      .value("lazily", Copying::lazily);

  nb::class_<Snapshot>(m, "Snapshot", "A snapshot in memory (native/checkpoint/snapshot.h).")
      .def(nb::init<unsigned>(), nb::arg("threads"))
      .def("reserve", &Snapshot::reserve, nb::arg("bytes"), Unlocked())
      .def(
          "begin",
          [](Snapshot& snapshot, const nb::bytes& header,
             const std::vector<std::pair<uint64_t, uint64_t>>& pieces, Copying copying) {
            std::vector<Piece> native;
            native.reserve(pieces.size());
            for (const auto& [address, size] : pieces) {
              native.push_back({reinterpret_cast<const std::byte*>(address), size});
            }
            const std::span<const std::byte> head{static_cast<const std::byte*>(header.data()),
                                                  header.size()};
            const nb::gil_scoped_release release;
            snapshot.begin(head, std::move(native), copying);
          },
          nb::arg("header"), nb::arg("pieces"), nb::arg("copying") = Copying::at_once,
          "Pieces are (address, bytes) of memory that must stay as it is until it is copied, and "
          "be "
          "readable until the snapshot is written.")
      .def(
          "copy",
          [](Snapshot& snapshot, const std::vector<uint32_t>& pieces) {
            const nb::gil_scoped_release release;
            snapshot.copy(pieces);
          },
          nb::arg("pieces"), "The blocks that these pieces lie in, now.")
      .def("finish", &Snapshot::finish, Unlocked())
      .def_prop_ro("is_lazy", &Snapshot::is_lazy)
      .def_prop_ro("copied_bytes", &Snapshot::copied_bytes)
      .def_prop_ro("size", &Snapshot::size)
      .def_prop_ro("capacity", &Snapshot::capacity);
}

void bind_write(nb::module_& m) {
  nb::class_<Gate>(m, "Gate", "Keeps background writing back while it is held.")
      .def(nb::init<>())
      .def("hold", &Gate::hold)
      .def("release", &Gate::release)
      .def_prop_ro("held", &Gate::is_held)
      .def_prop_ro("waited_seconds", [](const Gate& gate) {
        return std::chrono::duration<double>(gate.waited()).count();
      });
  nb::class_<Working>(m, "Activity",
                      "The process needs storage or network inside (native/base/activity.h).")
      .def(nb::init<>())
      .def("__enter__",
           [](Working& w) {
             w.activity.emplace();
             return &w;
           })
      .def(
          "__exit__", [](Working& w, const nb::args&) { w.activity.reset(); },
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def_static("quiet", [] { return Activity::quiet(); });

  nb::class_<Written>(m, "Written")
      .def_ro("size", &Written::size)
      .def_ro("crcs", &Written::crcs)
      .def_ro("direct", &Written::direct)
      .def_ro("seconds", &Written::seconds)
      .def_ro("cpu_seconds", &Written::cpu_seconds);

  nb::class_<Write>(m, "SnapshotWrite", "A snapshot into a file (native/checkpoint/write.h).")
      .def(
          "__init__",
          [](Write* self, std::shared_ptr<Snapshot> snapshot, const std::string& path,
             uint64_t rate, Priority priority, unsigned threads, bool direct,
             std::shared_ptr<Gate> gate, double gate_patience, bool considerate) {
            new (self)
                Write(std::move(snapshot), path,
                      options_of(rate, priority, threads, direct, gate_patience, considerate),
                      std::move(gate));
          },
          nb::arg("snapshot"), nb::arg("path"), nb::arg("rate") = 0,
          nb::arg("priority") = Priority::low, nb::arg("threads") = 1, nb::arg("direct") = true,
          nb::arg("gate").none() = nb::none(), nb::arg("gate_patience") = 1.0,
          nb::arg("considerate") = false)
      .def("run", &Write::run, Unlocked())
      .def("hurry", &Write::hurry, Unlocked())
      .def("stop", &Write::stop);
}

void bind_transfer(nb::module_& m) {
  nb::class_<FileCopy>(m, "FileCopy", "A checked copy (native/checkpoint/transfer.h).")
      .def(
          "__init__",
          [](FileCopy* self, const std::string& from, const std::string& to, uint64_t size,
             std::vector<uint32_t> crcs, uint64_t rate, Priority priority, bool direct,
             std::shared_ptr<Gate> gate, double gate_patience, bool considerate) {
            new (self) FileCopy(from, to, size, std::move(crcs),
                                options_of(rate, priority, 1, direct, gate_patience, considerate),
                                std::move(gate));
          },
          nb::arg("source"), nb::arg("target"), nb::arg("size"), nb::arg("crcs"),
          nb::arg("rate") = 0, nb::arg("priority") = Priority::low, nb::arg("direct") = true,
          nb::arg("gate").none() = nb::none(), nb::arg("gate_patience") = 1.0,
          nb::arg("considerate") = false)
      .def("run", &FileCopy::run, Unlocked())
      .def("hurry", &FileCopy::hurry)
      .def("stop", &FileCopy::stop);

  nb::class_<Progress>(m, "Progress")
      .def(nb::init<>())
      .def(
          "add", [](Progress& p, uint64_t bytes) { p.bytes += bytes; }, nb::arg("bytes"))
      .def_prop_ro("bytes", [](const Progress& p) { return p.bytes.load(); });
  nb::class_<FileInMemory>(m, "CheckedFile",
                           "A file that is read in blocks (native/checkpoint/transfer.h).")
      .def(nb::init<const std::string&, uint64_t, std::vector<uint32_t>>(), nb::arg("path"),
           nb::arg("size"), nb::arg("crcs"), Unlocked())
      .def_prop_ro(
          "data",
          [](const FileInMemory& f) {
            auto* data = reinterpret_cast<uint8_t*>(f.memory->data());
            auto owner = std::make_unique<std::shared_ptr<Memory>>(f.memory);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
                data, {f.size}, bindings::owner_of(std::move(owner)));
          },
          nb::rv_policy::automatic)
      .def(
          "read",
          [](const FileInMemory& f, uint64_t first, uint64_t count, unsigned threads,
             Progress* progress, uint64_t address) {
            std::byte* into = address != 0 ? reinterpret_cast<std::byte*>(address)
                                           : f.memory->data() + first * kBlock;
            return f.file
                .read(first, count, into, threads, progress != nullptr ? &progress->bytes : nullptr)
                .damaged;
          },
          nb::arg("first"), nb::arg("count"), nb::arg("threads"),
          nb::arg("progress").none() = nb::none(), nb::arg("address") = 0, Unlocked(),
          "Blocks to their place in `data`, or to aligned memory at an address; the numbers of the "
          "damaged ones.");
  m.def(
      "check_file",
      [](const std::string& path, uint64_t size, const std::vector<uint32_t>& crcs,
         unsigned threads, Progress* progress, Priority priority) {
        return read_checked(path, size, crcs, nullptr, threads,
                            progress != nullptr ? &progress->bytes : nullptr, priority)
            .damaged;
      },
      nb::arg("path"), nb::arg("size"), nb::arg("crcs"), nb::arg("threads"),
      nb::arg("progress").none() = nb::none(), nb::arg("priority") = Priority::normal, Unlocked(),
      "The numbers of its damaged blocks.");
}

void bind_locks(nb::module_& m) {
  nb::enum_<Locked>(m, "Locked")
      .value("yes", Locked::yes)
      .value("elsewhere", Locked::elsewhere)
      .value("unsupported", Locked::unsupported)
      .value("failed", Locked::failed);
  nb::class_<DirectoryLock>(m, "DirectoryLock", "A lock that ends with its process.")
      .def(nb::init<const std::string&>(), nb::arg("path"))
      .def("acquire", &DirectoryLock::acquire, Unlocked(),
           "At once: whether it was had, or the file system has no locks.")
      .def_prop_ro("error_number", &DirectoryLock::error_number, "Why acquire() failed, an errno.")
      .def("release", &DirectoryLock::release);
}

}  // namespace

void bind_checkpoint(nb::module_& m) {
  m.attr("CHECKPOINT_BLOCK") = kBlock;
  m.attr("CHECKPOINT_ALIGNMENT") = kAlignment;
  nb::enum_<Priority>(m, "Priority")
      .value("normal", Priority::normal)
      .value("low", Priority::low)
      .value("idle", Priority::idle);

  bind_snapshot(m);
  bind_write(m);
  bind_transfer(m);
  m.def(
      "crc32c",
      [](const nb::bytes& bytes) {
        return crc32c({static_cast<const std::byte*>(bytes.data()), bytes.size()});
      },
      nb::arg("bytes"));
  m.def(
      "crc32c_of",
      [](const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& bytes) {
        return crc32c({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
      },
      nb::arg("bytes"), Unlocked(), "Of an array, which nobody changes meanwhile.");

  bind_locks(m);
}
