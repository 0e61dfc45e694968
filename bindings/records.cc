// Record stores: storages, the scans that make tables, and sources on both.
#include "source/records.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <optional>

#include "arrays.h"
#include "module.h"
#include "source/build.h"
#include "source/index.h"
#include "source/lmdb.h"
#include "source/names.h"
#include "source/tar.h"
#include "source/tfrecord.h"

namespace nb = nanobind;
using namespace nostall;
using bindings::array_of;
using bindings::without_gil;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Called with the number of things done; raising ends the pass.
using Progress = std::optional<nb::callable>;
using StoragePtr = std::shared_ptr<source::Storage>;

template <typename T>
std::vector<T> vector_of(const Column<T>& column) {
  return {column.data(), column.data() + column.size()};
}

template <typename T>
std::span<const T> span_of(const Column<T>& column) {
  return {column.data(), column.size()};
}

std::function<void(uint64_t)> reporter(const Progress& progress) {
  return [&progress](uint64_t done) {
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (progress) (*progress)(done);
  };
}

// A Python object that is released with the GIL, from any thread.
class Held {
 public:
  explicit Held(nb::object object) : object_(std::move(object)) {}
  ~Held() {
    if (!nb::is_alive()) {
      object_.release();  // the interpreter has gone, and its objects with it
      return;
    }
    const nb::gil_scoped_acquire gil;
    object_.reset();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  const nb::object& get() const { return object_; }

 private:
  nb::object object_;
};

// What one item of a Python function's answer is: an OSError's errno and text, or bytes.
struct Answer {
  std::optional<nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>> array;
  int error = 0;
  std::string why;
};

Answer answer_of(nb::handle item) {
  Answer a;
  if (PyObject_IsInstance(item.ptr(), PyExc_BaseException) == 1) {
    a.error = EIO;
    a.why = nb::cast<std::string>(nb::str(item));
    return a;
  }
  a.array.emplace();
  if (!nb::try_cast(item, *a.array)) {
    a.array.reset();
    a.error = EIO;
    a.why = "a reader in Python gave neither bytes nor an exception";
  }
  return a;
}

std::string error_text(nb::python_error& error) {
  return nb::cast<std::string>(nb::str(error.value()));
}

// Ranges by a function: (list of (file, offset, size)) -> list of buffers or exceptions.
class PythonStorage : public source::Storage {
 public:
  PythonStorage(std::vector<source::StorageFile> files, nb::object read)
      : files_(std::move(files)), read_(std::make_shared<Held>(std::move(read))) {}

  std::span<const source::StorageFile> files() const override { return files_; }
  std::string changed(uint32_t) const override { return {}; }
  bool times_tell_content() const override { return true; }
  std::unique_ptr<source::RangeReader> make_reader(source::ReaderKind, unsigned) const override {
    return std::make_unique<Reader>(read_);
  }

 private:
  class Reader : public source::RangeReader {
   public:
    explicit Reader(std::shared_ptr<Held> read) : read_(std::move(read)) {}
    std::string_view name() const override { return "python"; }
    uint64_t bytes_read() const override { return bytes_; }

    void read(std::span<source::RangeRead> ranges) override {
      const nb::gil_scoped_acquire gil;
      try {
        nb::list asked;
        for (const source::RangeRead& r : ranges) {
          asked.append(nb::make_tuple(r.file, r.offset, r.size()));
          bytes_ += r.size();
        }
        const nb::list answers = nb::cast<nb::list>(read_->get()(asked));
        if (answers.size() != ranges.size()) throw std::runtime_error("wrong number of answers");
        for (size_t i = 0; i < ranges.size(); ++i) fill(ranges[i], answer_of(answers[i]));
      } catch (nb::python_error& error) {
        fail(ranges, error_text(error));
      } catch (const std::exception& error) {
        fail(ranges, error.what());
      }
    }

   private:
    static void fail(std::span<source::RangeRead> ranges, const std::string& why) {
      for (source::RangeRead& r : ranges) {
        r.error = EIO;
        r.why = why;
      }
    }
    static void fill(source::RangeRead& r, const Answer& a) {
      r.error = a.error;
      r.why = a.why;
      if (!a.array) return;
      if (a.array->nbytes() != r.size()) {
        r.error = source::kSizeChanged;
        return;
      }
      const auto* bytes = static_cast<const std::byte*>(static_cast<const void*>(a.array->data()));
      if (!r.head.empty()) std::memcpy(r.head.data(), bytes, r.head.size());
      if (!r.into.empty()) std::memcpy(r.into.data(), bytes + r.head.size(), r.into.size());
    }
    std::shared_ptr<Held> read_;
    uint64_t bytes_ = 0;
  };

  std::vector<source::StorageFile> files_;
  std::shared_ptr<Held> read_;
};

// Samples by a function: (list of ids) -> list of buffers or exceptions. For stores that only their
// own library can take apart.
class CallbackSource : public source::Source {
 public:
  CallbackSource(std::vector<uint64_t> sizes, std::vector<int64_t> labels,
                 std::vector<uint32_t> group, uint64_t fingerprint, nb::object read,
                 nb::object describe)
      : sizes_(std::move(sizes)),
        labels_(std::move(labels)),
        group_(std::move(group)),
        fingerprint_(fingerprint),
        read_(std::make_shared<Held>(std::move(read))),
        describe_(std::make_shared<Held>(std::move(describe))) {
    if (labels_.size() != sizes_.size() ||
        (!group_.empty() &&
         (group_.size() != sizes_.size() || !std::is_sorted(group_.begin(), group_.end())))) {
      throw Error(ErrorKind::usage,
                  "sizes, labels and groups need one entry per sample, and groups must be sorted");
    }
    for (const uint64_t s : sizes_) total_ += s;
  }

  uint64_t size() const override { return sizes_.size(); }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return total_; }
  uint64_t fingerprint() const override { return fingerprint_; }
  std::string describe(uint64_t sample) const override {
    const nb::gil_scoped_acquire gil;
    try {
      return nb::cast<std::string>(describe_->get()(sample));
    } catch (nb::python_error& error) {
      return "sample " + std::to_string(sample) + " (" + error_text(error) + ")";
    }
  }
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind, unsigned) const override {
    return std::make_unique<Reader>(read_);
  }
  void around(uint64_t sample, std::vector<uint64_t>& out) const override {
    if (group_.empty()) return;
    const auto [begin, end] = std::equal_range(group_.begin(), group_.end(), group_[sample]);
    for (auto it = begin; it != end; ++it) {
      const auto other = static_cast<uint64_t>(it - group_.begin());
      if (other != sample) out.push_back(other);
    }
  }

 private:
  class Reader : public source::Reader {
   public:
    explicit Reader(std::shared_ptr<Held> read) : read_(std::move(read)) {}
    std::string_view name() const override { return "python"; }
    void read(std::span<source::ReadRequest> requests) override {
      const nb::gil_scoped_acquire gil;
      std::string why;
      try {
        nb::list ids;
        for (const source::ReadRequest& r : requests) ids.append(r.sample);
        const nb::list answers = nb::cast<nb::list>(read_->get()(ids));
        if (answers.size() != requests.size()) throw std::runtime_error("wrong number of answers");
        for (size_t i = 0; i < requests.size(); ++i) fill(requests[i], answer_of(answers[i]));
        return;
      } catch (nb::python_error& error) {
        why = error_text(error);
      } catch (const std::exception& error) {
        why = error.what();
      }
      for (source::ReadRequest& r : requests) {
        r.error = EIO;
        r.why = why;
      }
    }

   private:
    static void fill(source::ReadRequest& r, const Answer& a) {
      r.error = a.error;
      r.why = a.why;
      if (!a.array) return;
      if (a.array->nbytes() != r.into.size()) {
        r.error = source::kWrongBytes;
        r.why = "it has " + std::to_string(a.array->nbytes()) + " bytes instead of " +
                std::to_string(r.into.size());
      } else if (!r.into.empty()) {
        std::memcpy(r.into.data(), a.array->data(), r.into.size());
      }
    }
    std::shared_ptr<Held> read_;
  };

  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
  std::vector<uint32_t> group_;
  uint64_t fingerprint_, total_ = 0;
  std::shared_ptr<Held> read_, describe_;
};

std::vector<source::StorageFile> storage_files(const std::vector<std::string>& paths,
                                               const Column<uint64_t>& sizes,
                                               const Column<int64_t>& versions) {
  if (paths.size() != sizes.size() || paths.size() != versions.size()) {
    throw Error(ErrorKind::usage, "a storage needs a size and a version for every path");
  }
  std::vector<source::StorageFile> files;
  for (size_t i = 0; i < paths.size(); ++i) {
    files.push_back({paths[i], sizes.data()[i], versions.data()[i]});
  }
  return files;
}

source::Direct direct_of(const std::string& name) {
  if (name == "auto") return source::Direct::automatic;
  if (name == "never") return source::Direct::never;
  if (name == "always") return source::Direct::always;
  throw Error(ErrorKind::usage,
              "direct must be \"auto\", \"never\" or \"always\", not \"" + name + "\"");
}

source::PayloadKind payload_of(const std::string& name) {
  if (name == "datum") return source::PayloadKind::datum;
  if (name == "pickled") return source::PayloadKind::pickled;
  if (name == "example") return source::PayloadKind::example;
  throw Error(ErrorKind::usage, "unknown kind of record \"" + name + "\"");
}

// Reads of the table's values begin with what a page that starts one must say.
source::CheckHead lmdb_check(uint32_t page_size) {
  return [page_size](const source::RecordTable& table, uint64_t sample,
                     std::span<const std::byte> head) {
    const uint64_t head_size = table.head_of(sample);
    const uint64_t begin = table.offset[sample] - head_size;
    const uint64_t bytes = head_size + table.length[sample];
    return source::lmdb::check_value_page(head, begin / page_size,
                                          (bytes + page_size - 1) / page_size);
  };
}

struct TarScan {
  std::vector<uint32_t> file;
  std::vector<uint64_t> offset, size;
  std::vector<std::string> names, contents;
};

TarScan scan_tars(const source::Storage& storage, const std::string& keep, unsigned threads,
                  const std::function<void(uint64_t)>& progress) {
  std::vector<std::vector<source::TarMember>> all(storage.files().size());
  source::each_in_parallel(
      storage, all.size(), threads,
      [&](source::RangeReader& reader, uint64_t i) {
        source::Window window(reader, storage, static_cast<uint32_t>(i));
        all[i] = source::scan_tar(window, keep).take();
      },
      progress);
  TarScan out;
  for (size_t f = 0; f < all.size(); ++f) {
    for (source::TarMember& m : all[f]) {
      out.file.push_back(static_cast<uint32_t>(f));
      out.offset.push_back(m.offset);
      out.size.push_back(m.size);
      out.names.push_back(std::move(m.name));
      out.contents.push_back(std::move(m.content));
    }
  }
  return out;
}

}  // namespace

void bind_records(nb::module_& m) {
  nb::class_<source::Storage>(m, "Storage", "Files or objects of which ranges are read.")
      .def_prop_ro("paths",
                   [](const source::Storage& s) {
                     std::vector<std::string> paths;
                     for (const auto& f : s.files()) paths.push_back(f.path);
                     return paths;
                   })
      .def_prop_ro(
          "sizes",
          [](const source::Storage& s) {
            std::vector<uint64_t> sizes;
            for (const auto& f : s.files()) sizes.push_back(f.size);
            return array_of(std::move(sizes));
          },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "times",
          [](const source::Storage& s) {
            std::vector<int64_t> times;
            for (const auto& f : s.files()) times.push_back(f.mtime_ns);
            return array_of(std::move(times));
          },
          "Nanoseconds since the epoch of each file's last change; 0 where unknown.",
          nb::rv_policy::automatic)
      .def(
          "read",
          [](const source::Storage& s, uint32_t file, uint64_t offset, uint64_t size) {
            if (file >= s.files().size()) throw nb::index_error();
            std::vector<std::byte> bytes(size);
            without_gil([&] {
              source::read_range(*s.make_reader(source::ReaderKind::pread, 1), s, file, offset,
                                 bytes);
            });
            return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
          },
          nb::arg("file"), nb::arg("offset"), nb::arg("size"));

  m.def(
      "open_storage",
      [](const std::vector<std::string>& paths, const std::string& direct) -> StoragePtr {
        return source::open_files(paths, direct_of(direct));
      },
      nb::arg("paths"), nb::arg("direct"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "python_storage",
      [](const std::vector<std::string>& paths, const Column<uint64_t>& sizes,
         const Column<int64_t>& versions, nb::callable read) -> StoragePtr {
        return std::make_shared<PythonStorage>(storage_files(paths, sizes, versions),
                                               std::move(read));
      },
      nb::arg("paths"), nb::arg("sizes"), nb::arg("versions"), nb::arg("read"),
      "read(list of (file, offset, size)) -> list of buffers or exceptions; `versions` change with "
      "the contents, like the times of files.");

  nb::class_<source::lmdb::Records>(m, "LmdbRecords", "What a scan of an LMDB tree found.")
      .def("__len__", &source::lmdb::Records::size)
      .def_prop_ro(
          "offset", [](const source::lmdb::Records& r) { return array_of(std::vector(r.offset)); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "length", [](const source::lmdb::Records& r) { return array_of(std::vector(r.length)); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "own_pages",
          [](const source::lmdb::Records& r) { return array_of(std::vector(r.own_pages)); },
          nb::rv_policy::automatic)
      .def("key",
           [](const source::lmdb::Records& r, uint64_t i) {
             if (i >= r.size()) throw nb::index_error();
             const std::string_view k = r.key(i);
             return nb::bytes(k.data(), k.size());
           })
      .def(
          "find",
          [](const source::lmdb::Records& r, const nb::bytes& wanted) -> std::optional<uint64_t> {
            const std::string_view key(wanted.c_str(), wanted.size());
            for (uint64_t i = 0; i < r.size(); ++i) {
              if (r.key(i) == key) return i;
            }
            return {};
          },
          "The record with that key, by looking at all of them; None if there is none.")
      .def(
          "decimal_keys",
          [](const source::lmdb::Records& r) { return array_of(source::lmdb::decimal_keys(r)); },
          "The keys as numbers, 2**64 - 1 for those that are not decimal.")
      .def_ro("databases", &source::lmdb::Records::databases)
      .def_ro("pages_read", &source::lmdb::Records::pages_read)
      .def_prop_ro("page_size", [](const source::lmdb::Records& r) { return r.snapshot.page_size; })
      .def_prop_ro("transaction",
                   [](const source::lmdb::Records& r) { return r.snapshot.transaction; })
      .def_prop_ro("other_meta_used",
                   [](const source::lmdb::Records& r) { return r.snapshot.other_meta_used; })
      .def("stamp", [](const source::lmdb::Records& r, const std::string& database) {
        return source::lmdb::stamp(r, database);
      });
  m.def(
      "scan_lmdb",
      [](const StoragePtr& storage, const std::string& database) {
        const auto reader = storage->make_reader(source::ReaderKind::automatic, 16);
        return source::lmdb::scan(*reader, *storage, database).take();
      },
      nb::arg("storage"), nb::arg("database"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "lmdb_stamp",
      [](const StoragePtr& storage, const std::string& database) {
        const auto reader = storage->make_reader(source::ReaderKind::pread, 1);
        return source::lmdb::current_stamp(*reader, *storage, database).take();
      },
      nb::arg("storage"), nb::arg("database"), nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "scan_tar",
      [](const StoragePtr& storage, const std::string& keep, unsigned threads,
         const Progress& progress) {
        TarScan scan =
            without_gil([&] { return scan_tars(*storage, keep, threads, reporter(progress)); });
        nb::list contents;
        for (const std::string& c : scan.contents) contents.append(nb::bytes(c.data(), c.size()));
        nb::list names;
        for (const std::string& n : scan.names) {
          names.append(nb::steal(PyUnicode_DecodeUTF8(n.data(), static_cast<Py_ssize_t>(n.size()),
                                                      "surrogateescape")));
        }
        return nb::make_tuple(array_of(std::move(scan.file)), array_of(std::move(scan.offset)),
                              array_of(std::move(scan.size)), names, contents);
      },
      nb::arg("storage"), nb::arg("keep"), nb::arg("threads"), nb::arg("progress").none(),
      "(file, offset, size, names, contents) of all regular members; contents of those whose name "
      "ends with `keep`.");
  m.def(
      "scan_tfrecord",
      [](const StoragePtr& storage, bool check, unsigned threads, const Progress& progress) {
        std::vector<uint32_t> file;
        std::vector<uint64_t> offset, length;
        std::vector<uint32_t> crc;
        without_gil([&] {
          std::vector<source::TfRecords> all(storage->files().size());
          source::each_in_parallel(
              *storage, all.size(), threads,
              [&](source::RangeReader& reader, uint64_t i) {
                source::Window window(reader, *storage, static_cast<uint32_t>(i));
                all[i] = source::scan_tfrecord(window, check).take();
              },
              reporter(progress));
          for (size_t f = 0; f < all.size(); ++f) {
            file.insert(file.end(), all[f].length.size(), static_cast<uint32_t>(f));
            offset.insert(offset.end(), all[f].offset.begin(), all[f].offset.end());
            length.insert(length.end(), all[f].length.begin(), all[f].length.end());
            crc.insert(crc.end(), all[f].crc.begin(), all[f].crc.end());
          }
        });
        return nb::make_tuple(array_of(std::move(file)), array_of(std::move(offset)),
                              array_of(std::move(length)), array_of(std::move(crc)));
      },
      nb::arg("storage"), nb::arg("check"), nb::arg("threads"), nb::arg("progress").none(),
      "(file, offset, length, CRC32C) of all records; `check` compares the latter too.");
  m.def(
      "find_payloads",
      [](const StoragePtr& storage, const Column<uint32_t>& file, const Column<uint64_t>& offset,
         const Column<uint64_t>& length, const std::string& kind, const std::string& image,
         const std::string& label, unsigned threads, const Progress& progress,
         const Column<uint32_t>& crc) {
        std::vector<uint64_t> at, bytes;
        std::vector<int64_t> labels;
        std::vector<uint32_t> shape, sums;
        without_gil([&] {
          for (const source::Payload& p : source::find_payloads(
                   *storage, span_of(file), span_of(offset), span_of(length), payload_of(kind),
                   image, label, threads, reporter(progress), span_of(crc))) {
            at.push_back(p.offset);
            bytes.push_back(p.length);
            labels.push_back(p.label);
            shape.insert(shape.end(), {p.channels, p.height, p.width});
            sums.push_back(p.sum);
          }
        });
        return nb::make_tuple(array_of(std::move(at)), array_of(std::move(bytes)),
                              array_of(std::move(labels)), array_of(std::move(shape)),
                              array_of(std::move(sums)));
      },
      nb::arg("storage"), nb::arg("file"), nb::arg("offset"), nb::arg("length"), nb::arg("kind"),
      nb::arg("image"), nb::arg("label"), nb::arg("threads"), nb::arg("progress").none(),
      nb::arg("crc"),
      "(offset, length, label, shape, sums) of the image in every record; shape is (n * 3,): "
      "channels, height, width of pixels that are not encoded, else zeros; sums are checksums "
      "where "
      "`crc`, the CRC32C of every record or empty, gives them, else zeros.");

  nb::class_<source::RecordTable>(m, "RecordTable")
      .def_ro("kind", &source::RecordTable::kind)
      .def_ro("stamp", &source::RecordTable::stamp)
      .def("__len__", &source::RecordTable::size)
      .def_prop_ro("paths",
                   [](const source::RecordTable& t) {
                     std::vector<std::string> paths;
                     for (const auto& f : t.files) paths.push_back(f.path);
                     return paths;
                   })
      .def_prop_ro(
          "file_sizes",
          [](const source::RecordTable& t) {
            std::vector<uint64_t> sizes;
            for (const auto& f : t.files) sizes.push_back(f.size);
            return array_of(std::move(sizes));
          },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "times",
          [](const source::RecordTable& t) {
            std::vector<int64_t> times;
            for (const auto& f : t.files) times.push_back(f.mtime_ns);
            return array_of(std::move(times));
          },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "file", [](const source::RecordTable& t) { return array_of(std::vector(t.file)); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "offset", [](const source::RecordTable& t) { return array_of(std::vector(t.offset)); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "length", [](const source::RecordTable& t) { return array_of(std::vector(t.length)); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "label", [](const source::RecordTable& t) { return array_of(std::vector(t.label)); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "head", [](const source::RecordTable& t) { return array_of(std::vector(t.head)); },
          nb::rv_policy::automatic)
      .def(
          "store",
          [](const source::RecordTable& t, const std::string& path) {
            const auto bytes = source::serialize_records(t);
            return std::pair{source::store_index(path, bytes), bytes.size()};
          },
          nb::arg("path"), nb::call_guard<nb::gil_scoped_release>(),
          "Writes the stored form; (0 or -errno, bytes).");
  m.def(
      "record_table",
      [](const std::string& kind, const std::string& stamp, const StoragePtr& storage,
         const Column<uint32_t>& file, const Column<uint64_t>& offset,
         const Column<uint64_t>& length, const Column<int64_t>& label,
         const Column<uint16_t>& head) {
        source::RecordTable t;
        t.kind = kind;
        t.stamp = stamp;
        for (const source::StorageFile& f : storage->files()) {
          t.files.push_back({f.path.substr(f.path.rfind('/') + 1), f.size, f.mtime_ns});
        }
        t.file = vector_of(file);
        t.offset = vector_of(offset);
        t.length = vector_of(length);
        t.label = vector_of(label);
        t.head = vector_of(head);
        return t;
      },
      nb::arg("kind"), nb::arg("stamp"), nb::arg("storage"), nb::arg("file"), nb::arg("offset"),
      nb::arg("length"), nb::arg("label"), nb::arg("head"));
  m.def(
      "load_records",
      [](const std::string& path) {
        auto bytes = source::load_bytes(path, source::kRecordsMagic).take();
        return source::parse_records(bytes).take();
      },
      nb::arg("path"), nb::call_guard<nb::gil_scoped_release>());

  nb::class_<source::RecordSource, source::Source>(m, "RecordSource")
      .def_prop_ro("table", &source::RecordSource::table, nb::rv_policy::reference_internal)
      .def_prop_ro(
          "cost",
          [](const source::RecordSource& s) {
            return std::pair{s.cost().seconds_per_operation(), s.cost().seconds_per_byte()};
          },
          "Seconds per operation and per byte, as measured so far.");
  m.def(
      "record_source",
      [](const StoragePtr& storage, const source::RecordTable& table, uint64_t max_read,
         bool coalesce, uint32_t page_size,
         const std::string& database) -> std::shared_ptr<source::RecordSource> {
        source::RecordOptions options;
        options.max_read = max_read;
        options.coalesce = coalesce;
        if (table.kind == "lmdb") options.name = source::lmdb_names(storage, database);
        if (table.kind == "tar") options.name = source::tar_names(storage);
        if (table.kind == "lmdb") {
          options.same = [storage, database](source::RangeReader& reader,
                                             const source::RecordTable& t, uint32_t) {
            const auto now = source::lmdb::current_stamp(reader, *storage, database);
            // Options and what the scan found follow the stamp of the database.
            return now && (t.stamp + " ").starts_with(now.value() + " ");
          };
        }
        if (page_size != 0) options.check = lmdb_check(page_size);
        return std::make_shared<source::RecordSource>(storage, table, std::move(options));
      },
      nb::arg("storage"), nb::arg("table"), nb::arg("max_read"), nb::arg("coalesce"),
      nb::arg("page_size"), nb::arg("database"), nb::call_guard<nb::gil_scoped_release>(),
      "A source on a table; `page_size` of an LMDB database whose value pages are checked, or 0.");
  m.def(
      "callback_source",
      [](const Column<uint64_t>& sizes, const Column<int64_t>& labels,
         const Column<uint32_t>& group, uint64_t fingerprint, nb::callable read,
         nb::callable describe) -> std::shared_ptr<source::Source> {
        return std::make_shared<CallbackSource>(vector_of(sizes), vector_of(labels),
                                                vector_of(group), fingerprint, std::move(read),
                                                std::move(describe));
      },
      nb::arg("sizes"), nb::arg("labels"), nb::arg("group"), nb::arg("fingerprint"),
      nb::arg("read"), nb::arg("describe"),
      "read(list of ids) -> list of buffers or exceptions; samples of a group (rising, or empty) "
      "are read together.");
}
