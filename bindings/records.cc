// Record stores: storages, the scans that make tables, and sources on both.
#include "records/records.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.h"
#include "module.h"
#include "python_source.h"
#include "records/build.h"
#include "records/formats.h"
#include "records/lmdb.h"
#include "source/index.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;
using bindings::array_of;
using bindings::without_gil;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Called with the number of things done; raising ends the pass.
using Progress = std::optional<nb::callable>;
using StoragePtr = std::shared_ptr<records::Storage>;

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

std::vector<records::StorageFile> storage_files(const std::vector<std::string>& paths,
                                                const Column<uint64_t>& sizes,
                                                const Column<int64_t>& versions) {
  if (paths.size() != sizes.size() || paths.size() != versions.size()) {
    throw Error(ErrorKind::usage, "a storage needs a size and a version for every path");
  }
  std::vector<records::StorageFile> files;
  for (size_t i = 0; i < paths.size(); ++i) {
    files.push_back({paths[i], sizes.data()[i], versions.data()[i]});
  }
  return files;
}

records::Direct direct_of(const std::string& name) {
  if (name == "auto") return records::Direct::automatic;
  if (name == "never") return records::Direct::never;
  if (name == "always") return records::Direct::always;
  throw Error(ErrorKind::usage,
              "direct must be \"auto\", \"never\" or \"always\", not \"" + name + "\"");
}

records::PayloadKind payload_of(const std::string& name) {
  if (name == "datum") return records::PayloadKind::datum;
  if (name == "pickled") return records::PayloadKind::pickled;
  if (name == "example") return records::PayloadKind::example;
  throw Error(ErrorKind::usage, "unknown kind of record \"" + name + "\"");
}

void bind_storage(nb::module_& m) {
  nb::class_<records::Storage>(m, "Storage", "Files or objects of which ranges are read.")
      .def_prop_ro("paths",
                   [](const records::Storage& s) {
                     std::vector<std::string> paths;
                     for (const auto& f : s.files()) paths.push_back(f.path);
                     return paths;
                   })
      .def_prop_ro(
          "sizes",
          [](const records::Storage& s) {
            std::vector<uint64_t> sizes;
            for (const auto& f : s.files()) sizes.push_back(f.size);
            return array_of(std::move(sizes));
          },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "times",
          [](const records::Storage& s) {
            std::vector<int64_t> times;
            for (const auto& f : s.files()) times.push_back(f.mtime_ns);
            return array_of(std::move(times));
          },
          "Nanoseconds since the epoch of each file's last change; 0 where unknown.",
          nb::rv_policy::automatic)
      .def_prop_ro("is_local", &records::Storage::is_local,
                   "Whether its files are of this machine, and no objects.")
      .def(
          "read",
          [](const records::Storage& s, uint32_t file, uint64_t offset, uint64_t size) {
            if (file >= s.files().size()) throw nb::index_error();
            std::vector<std::byte> bytes(size);
            without_gil([&] {
              records::read_range(*s.make_reader(source::ReaderKind::pread, 1), s, file, offset,
                                  bytes);
            });
            return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
          },
          nb::arg("file"), nb::arg("offset"), nb::arg("size"));

  m.def(
      "open_storage",
      [](const std::vector<std::string>& paths, const std::string& direct) -> StoragePtr {
        return records::open_files(paths, direct_of(direct));
      },
      nb::arg("paths"), nb::arg("direct"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "python_storage",
      [](const std::vector<std::string>& paths, const Column<uint64_t>& sizes,
         const Column<int64_t>& versions, nb::callable read) -> StoragePtr {
        return bindings::python_storage(storage_files(paths, sizes, versions), std::move(read));
      },
      nb::arg("paths"), nb::arg("sizes"), nb::arg("versions"), nb::arg("read"),
      "read(list of (file, offset, size), stopped) -> list of buffers or exceptions; `stopped()` "
      "says that they are of no use any more; `versions` change with the contents, like the times "
      "of files.");
}

void bind_lmdb(nb::module_& m) {
  nb::class_<records::lmdb::Records>(m, "LmdbRecords", "What a scan of an LMDB tree found.")
      .def("__len__", &records::lmdb::Records::size)
      .def_prop_ro(
          "offset", [](const records::lmdb::Records& r) { return array_of(std::vector(r.offset)); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "length", [](const records::lmdb::Records& r) { return array_of(std::vector(r.length)); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "own_pages",
          [](const records::lmdb::Records& r) { return array_of(std::vector(r.own_pages)); },
          nb::rv_policy::automatic)
      .def("key",
           [](const records::lmdb::Records& r, uint64_t i) {
             if (i >= r.size()) throw nb::index_error();
             const std::string_view k = r.key(i);
             return nb::bytes(k.data(), k.size());
           })
      .def(
          "find",
          [](const records::lmdb::Records& r, const nb::bytes& wanted) -> std::optional<uint64_t> {
            const std::string_view key(wanted.c_str(), wanted.size());
            for (uint64_t i = 0; i < r.size(); ++i) {
              if (r.key(i) == key) return i;
            }
            return {};
          },
          "The record with that key, by looking at all of them; None if there is none.")
      .def(
          "decimal_keys",
          [](const records::lmdb::Records& r) { return array_of(records::lmdb::decimal_keys(r)); },
          "The keys as numbers, 2**64 - 1 for those that are not decimal.")
      .def_ro("databases", &records::lmdb::Records::databases)
      .def_ro("pages_read", &records::lmdb::Records::pages_read)
      .def_prop_ro("page_size",
                   [](const records::lmdb::Records& r) { return r.snapshot.page_size; })
      .def_prop_ro("transaction",
                   [](const records::lmdb::Records& r) { return r.snapshot.transaction; })
      .def("stamp", [](const records::lmdb::Records& r, const std::string& database) {
        return records::lmdb::stamp(r, database);
      });
  m.def(
      "scan_lmdb",
      [](const StoragePtr& storage, const std::string& database) {
        const auto reader = storage->make_reader(source::ReaderKind::automatic, 16);
        return records::lmdb::scan(*reader, *storage, database).take();
      },
      nb::arg("storage"), nb::arg("database"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "lmdb_stamp",
      [](const StoragePtr& storage, const std::string& database) {
        const auto reader = storage->make_reader(source::ReaderKind::pread, 1);
        return records::lmdb::current_stamp(*reader, *storage, database).take();
      },
      nb::arg("storage"), nb::arg("database"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_scans(nb::module_& m) {
  m.def(
      "scan_tar",
      [](const StoragePtr& storage, const std::string& keep, unsigned threads,
         const Progress& progress) {
        records::TarMembers scan = without_gil(
            [&] { return records::scan_tars(*storage, keep, threads, reporter(progress)); });
        nb::list contents;
        for (const std::string& c : scan.contents) contents.append(nb::bytes(c.data(), c.size()));
        return nb::make_tuple(array_of(std::move(scan.file)), array_of(std::move(scan.offset)),
                              array_of(std::move(scan.size)), scan.names, contents,
                              array_of(std::move(scan.kinds)));
      },
      nb::arg("storage"), nb::arg("keep"), nb::arg("threads"), nb::arg("progress").none(),
      "(file, offset, size, names, contents, kinds) of all files and links; contents of those "
      "whose name ends with `keep`; kinds are 0 of files, 1 of hard links to one before, 2 of "
      "other links.");
  m.def(
      "scan_tfrecord",
      [](const StoragePtr& storage, bool check, unsigned threads, const Progress& progress) {
        records::TfRecordPlaces places = without_gil(
            [&] { return records::scan_tfrecords(*storage, check, threads, reporter(progress)); });
        return nb::make_tuple(array_of(std::move(places.file)), array_of(std::move(places.offset)),
                              array_of(std::move(places.length)), array_of(std::move(places.crc)));
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
          for (const records::Payload& p : records::find_payloads(
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
}

void bind_members(nb::module_& m) {
  nb::enum_<records::MembersKind>(m, "MembersKind")
      .value("example", records::MembersKind::example)
      .value("npz", records::MembersKind::npz)
      .value("msgpack", records::MembersKind::msgpack);
  m.def(
      "find_members",
      [](const StoragePtr& storage, const Column<uint32_t>& file, const Column<uint64_t>& offset,
         const Column<uint64_t>& length, records::MembersKind kind,
         const std::vector<std::string>& names, unsigned threads, const Progress& progress) {
        records::MembersFound found;
        without_gil([&] {
          found =
              records::find_all_members(*storage, span_of(file), span_of(offset), span_of(length),
                                        kind, names, threads, reporter(progress));
        });
        nb::list told;
        for (size_t i = 0; i < found.names.size(); ++i) {
          const std::string& bytes = found.names[i];
          const std::string type(records::name_of(found.types[i]));
          // A name that is no UTF-8 cannot be that of a field.
          const nb::object name = nb::steal(
              PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), nullptr));
          if (!name.is_valid()) throw nb::python_error();
          told.append(
              nb::make_tuple(name, type, found.lists[i] != 0, found.least[i], found.most[i]));
        }
        return nb::make_tuple(told, array_of(std::move(found.offset)),
                              array_of(std::move(found.length)));
      },
      nb::arg("storage"), nb::arg("file"), nb::arg("offset"), nb::arg("length"), nb::arg("kind"),
      nb::arg("names"), nb::arg("threads"), nb::arg("progress").none(),
      "(members, offset, length): for every member (name, type, whether a list, fewest and most "
      "numbers); and where each lies in the file, of record 0, of record 1, ..., 2**64 - 1 for "
      "none. Without `names` all that there are.");
}

// What both forms of a table have.
template <typename Table>
nb::class_<Table> bind_table(nb::module_& m, const char* name) {
  nb::class_<Table> bound(m, name);
  const auto column = [&bound](const char* of, auto Table::*values) {
    bound.def_prop_ro(
        of,
        [values](const Table& t) {
          return array_of(std::vector((t.*values).begin(), (t.*values).end()));
        },
        nb::rv_policy::automatic);
  };
  bound.def_ro("kind", &Table::kind).def_ro("stamp", &Table::stamp).def_ro("parts", &Table::parts);
  bound.def("__len__", &Table::size);
  column("file", &Table::file);
  column("offset", &Table::offset);
  column("length", &Table::length);
  column("label", &Table::label);
  column("head", &Table::head);
  column("part_offset", &Table::part_offset);
  column("part_length", &Table::part_length);
  return bound;
}

void bind_tables(nb::module_& m) {
  bind_table<records::KeptTable>(m, "KeptTable");
  bind_table<records::RecordTable>(m, "RecordTable")
      .def_prop_ro("paths",
                   [](const records::RecordTable& t) {
                     std::vector<std::string> paths;
                     for (const auto& f : t.files) paths.push_back(f.path);
                     return paths;
                   })
      .def_prop_ro(
          "file_sizes",
          [](const records::RecordTable& t) {
            std::vector<uint64_t> sizes;
            for (const auto& f : t.files) sizes.push_back(f.size);
            return array_of(std::move(sizes));
          },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "times",
          [](const records::RecordTable& t) {
            std::vector<int64_t> times;
            for (const auto& f : t.files) times.push_back(f.mtime_ns);
            return array_of(std::move(times));
          },
          nb::rv_policy::automatic)
      .def(
          "store",
          [](const records::RecordTable& t, const std::string& path) {
            const auto bytes = records::serialize_records(t);
            return std::pair{source::store_index(path, bytes), bytes.size()};
          },
          nb::arg("path"), nb::call_guard<nb::gil_scoped_release>(),
          "Writes the stored form; (0 or -errno, bytes).");
  m.def(
      "record_table",
      [](const std::string& kind, const std::string& stamp, const StoragePtr& storage,
         const Column<uint32_t>& file, const Column<uint64_t>& offset,
         const Column<uint64_t>& length, const Column<int64_t>& label, const Column<uint16_t>& head,
         uint32_t parts, const Column<uint32_t>& part_offset, const Column<uint32_t>& part_length) {
        records::RecordTable t;
        t.kind = kind;
        t.stamp = stamp;
        for (const records::StorageFile& f : storage->files()) {
          t.files.push_back({f.path.substr(f.path.rfind('/') + 1), f.size, f.mtime_ns});
        }
        t.file = vector_of(file);
        t.offset = vector_of(offset);
        t.length = vector_of(length);
        t.label = vector_of(label);
        t.head = vector_of(head);
        t.parts = parts;
        t.part_offset = vector_of(part_offset);
        t.part_length = vector_of(part_length);
        return t;
      },
      nb::arg("kind"), nb::arg("stamp"), nb::arg("storage"), nb::arg("file"), nb::arg("offset"),
      nb::arg("length"), nb::arg("label"), nb::arg("head"), nb::arg("parts"),
      nb::arg("part_offset"), nb::arg("part_length"),
      "Of samples with `parts` fields, where each field begins in its record (2**32 - 1: the "
      "sample "
      "lacks it) and its length; 0 for images and labels.");
  m.def(
      "load_records",
      [](const std::string& path) {
        auto bytes = source::load_bytes(path, records::kRecordsMagic).take();
        return records::parse_records(bytes).take();
      },
      nb::arg("path"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_sources(nb::module_& m) {
  nb::class_<records::RecordSource, source::Source>(m, "RecordSource")
      .def_prop_ro("table", &records::RecordSource::table, nb::rv_policy::reference_internal)
      .def_prop_ro(
          "cost",
          [](const records::RecordSource& s) {
            return std::pair{s.cost().seconds_per_operation(), s.cost().seconds_per_byte()};
          },
          "Seconds per operation and per byte, as measured so far.");
  m.def(
      "record_source",
      [](const StoragePtr& storage, const records::RecordTable& table, uint64_t max_read,
         bool coalesce, uint32_t page_size,
         const std::string& database) -> std::shared_ptr<records::RecordSource> {
        records::RecordOptions options = records::options_for(table, storage, database, page_size);
        options.max_read = max_read;
        options.coalesce = coalesce;
        return std::make_shared<records::RecordSource>(storage, table, std::move(options));
      },
      nb::arg("storage"), nb::arg("table"), nb::arg("max_read"), nb::arg("coalesce"),
      nb::arg("page_size"), nb::arg("database"), nb::call_guard<nb::gil_scoped_release>(),
      "A source on a table; `page_size` of an LMDB database whose value pages are checked, or 0.");
  m.def(
      "callback_source",
      [](const Column<uint64_t>& sizes, const Column<int64_t>& labels,
         const Column<uint32_t>& group, uint64_t fingerprint, nb::callable read,
         nb::callable describe, bool bounded, uint32_t made_at_once,
         uint64_t stamp) -> std::shared_ptr<source::Source> {
        return bindings::python_source(vector_of(sizes), vector_of(labels), vector_of(group),
                                       fingerprint, std::move(read), std::move(describe), bounded,
                                       made_at_once, stamp);
      },
      nb::arg("sizes"), nb::arg("labels"), nb::arg("group"), nb::arg("fingerprint"),
      nb::arg("read"), nb::arg("describe"), nb::arg("bounded"), nb::arg("made_at_once"),
      nb::arg("stamp"),
      "read(list of ids) -> list of buffers or exceptions; samples of a group (rising, or empty) "
      "are read together. If `bounded`, zeros follow a sample shorter than its size. "
      "`made_at_once`: how many are made side by side, each in its own time; 0 if not one by one. "
      "`stamp`: a hash of where the data lies and when it was changed last.");
}

}  // namespace

void bind_records(nb::module_& m) {
  bind_storage(m);
  bind_lmdb(m);
  bind_scans(m);
  bind_members(m);
  bind_tables(m);
  bind_sources(m);
}
