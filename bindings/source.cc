// Sources, and what Python reads of them. Factories release the GIL while they list files.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.h"
#include "base/log.h"
#include "module.h"
#include "source/folder.h"
#include "source/scan.h"
#include "source/sums.h"
#include "source/view.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

namespace {

using Sums = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
nb::ndarray<nb::numpy, const T, nb::ndim<1>> view_of(std::span<const T> values, nb::handle owner) {
  return nb::ndarray<nb::numpy, const T, nb::ndim<1>>(values.data(), {values.size()}, owner);
}

source::ScanOptions options_of(const std::vector<std::string>& extensions, bool class_per_folder,
                               bool allow_empty, unsigned threads) {
  source::ScanOptions options;
  options.extensions = extensions;
  options.class_per_folder = class_per_folder;
  options.allow_empty = allow_empty;
  options.threads = threads;
  return options;
}

// The stored index if it is sound and the folder is unchanged; nothing otherwise, with the reason.
std::optional<source::SampleIndex> reuse(const std::string& root, const std::string& path,
                                         const source::ScanOptions& options, std::string& why) {
  auto bytes = source::load_bytes(path, source::kIndexMagic);
  if (!bytes) {
    why = bytes.error().what();
    return std::nullopt;
  }
  auto index = source::parse_index(bytes.value(), options.hash());
  if (!index) {
    why = index.error().what();
    if (index.error().kind() == ErrorKind::corruption) {
      log(LogLevel::info, path + ": " + why + "; listing the folder again");
    }
    return std::nullopt;
  }
  if (!source::unchanged(root, index.value())) {
    why = "the folder has changed";
    return std::nullopt;
  }
  if (!options.allow_empty && source::has_empty_class(index.value())) {
    why = "it was made with allow_empty=True";
    return std::nullopt;
  }
  return std::move(index).take();
}

void bind_any(nb::module_& m) {
  nb::class_<source::Source>(m, "Source", "A fixed list of samples (native/source/source.h).")
      .def("__len__", &source::Source::size)
      .def_prop_ro("sizes",
                   [](nb::handle self) {
                     return view_of(nb::cast<const source::Source&>(self).sizes(), self);
                   })
      .def_prop_ro("labels",
                   [](nb::handle self) {
                     return view_of(nb::cast<const source::Source&>(self).labels(), self);
                   })
      .def_prop_ro("total_bytes", &source::Source::total_bytes)
      .def_prop_ro("fingerprint", &source::Source::fingerprint)
      .def_prop_ro("stamp", &source::Source::stamp)
      .def_prop_ro("files_stamp", &source::Source::files_stamp)
      .def(
          "describe",
          [](const source::Source& s, uint64_t sample) {
            if (sample >= s.size()) throw nb::index_error();
            return s.describe(sample);
          },
          nb::arg("sample"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "read",
          [](const source::Source& s, uint64_t sample) {
            if (sample >= s.size()) throw nb::index_error();
            std::vector<std::byte> bytes(s.sizes()[sample]);
            {
              const nb::gil_scoped_release release;
              source::ReadRequest request{sample, bytes, 0};
              s.make_reader(source::ReaderKind::pread, 1)->read({&request, 1});
              if (request.error != 0) {
                throw Error(
                    ErrorKind::io,
                    "cannot read " + s.describe(sample) + ": " + source::read_error_text(request),
                    request.error < source::kSizeChanged ? request.error : 0);
              }
              const uint32_t now = sample_sum(bytes);
              if (!s.sums().agrees(sample, now)) {
                throw Error(ErrorKind::corruption,
                            s.describe(sample) + ": " +
                                source::changed_text(s, sample, s.sums().of(sample), now));
              }
            }
            return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
          },
          nb::arg("sample"),
          "The bytes of one sample. Raises IoError with its path, CorruptionError if they are not "
          "those that were read first.")
      .def("open_sums", &source::open_sums, nb::arg("path"),
           nb::call_guard<nb::gil_scoped_release>(),
           "Takes the checksums kept there, if they hold; else why they, and the index they lie "
           "beside, are of another content.")
      .def(
          "keep_sums", [](const source::Source& s) { return source::keep_sums(s); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Keeps what was learned in that file; 0 or -errno.")
      .def_prop_ro(
          "sums",
          [](const source::Source& s) {
            std::vector<uint32_t> sums(s.size());
            for (uint64_t i = 0; i < s.size(); ++i) sums[i] = s.sums().of(i);
            return bindings::array_of(std::move(sums));
          },
          nb::rv_policy::automatic, "The checksum of every sample, 0 where it is not known yet.")
      .def(
          "learn_sums",
          [](const source::Source& s, const Sums& sums) {
            if (sums.size() != s.size()) {
              throw Error(ErrorKind::usage, "there must be a checksum a sample");
            }
            for (uint64_t i = 0; i < s.size(); ++i) {
              if (sums.data()[i] != 0) s.sums().agrees(i, sums.data()[i]);
            }
          },
          nb::arg("sums"), "Takes checksums over where none is known; 0: not known.");
}

void bind_folders(nb::module_& m) {
  m.def(
      "open_folder",
      [](const std::string& root, const std::string& index_path,
         const std::vector<std::string>& extensions, bool class_per_folder, bool allow_empty,
         unsigned threads, bool must_store) {
        const nb::gil_scoped_release release;
        const source::ScanOptions options =
            options_of(extensions, class_per_folder, allow_empty, threads);
        std::string why;
        if (!index_path.empty()) {
          if (auto index = reuse(root, index_path, options, why)) {
            return std::make_shared<source::FolderSource>(root, std::move(*index));
          }
        }
        source::SampleIndex index = source::scan_folder(root, options);
        if (!index_path.empty()) {
          const int error =
              source::store_index(index_path, source::serialize_index(index, options.hash()));
          const std::string problem =
              error == 0 ? "" : io_error("cannot store the index", index_path, -error).what();
          if (error != 0 && must_store) {
            throw Error(ErrorKind::io, problem + "; give another file, that can be written",
                        -error);
          }
          // A data set that cannot be written to is the usual case, not a fault.
          if (error != 0 && error != -EROFS && error != -EACCES && error != -EPERM) {
            log(LogLevel::warning, problem);
          }
        }
        return std::make_shared<source::FolderSource>(root, std::move(index));
      },
      nb::arg("root"), nb::arg("index_path"), nb::arg("extensions"), nb::arg("class_per_folder"),
      nb::arg("allow_empty"), nb::arg("threads"), nb::arg("must_store") = false,
      "Lists a folder, or takes its stored index where that still holds. An empty index_path: "
      "none. Raises IoError if the listing is to be stored (must_store) and cannot be.");
  m.def(
      "check_index",
      [](const std::string& root, const std::string& index_path,
         const std::vector<std::string>& extensions, bool class_per_folder) {
        std::string why;
        const auto index =
            reuse(root, index_path, options_of(extensions, class_per_folder, true, 1), why);
        return index ? std::string() : why;
      },
      nb::arg("root"), nb::arg("index_path"), nb::arg("extensions"), nb::arg("class_per_folder"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Empty if the stored index holds, else why it does not.");
  m.def(
      "open_files",
      [](const std::string& root, const std::vector<std::string>& paths,
         const std::vector<int64_t>& labels, unsigned threads) {
        const nb::gil_scoped_release release;
        return std::make_shared<source::FolderSource>(
            root, source::list_files(root, paths, labels, threads));
      },
      nb::arg("root"), nb::arg("paths"), nb::arg("labels"), nb::arg("threads"));
}

void bind_views(nb::module_& m) {
  nb::class_<source::ViewSource, source::Source>(m, "ViewSource")
      .def_prop_ro(
          "numbers",
          [](const source::ViewSource& s) {
            std::vector<uint64_t> numbers(s.size());
            for (uint64_t i = 0; i < s.size(); ++i) numbers[i] = s.number(i);
            return bindings::array_of(std::move(numbers));
          },
          nb::rv_policy::automatic,
          "The place of every sample among those of all parts, laid end to end.")
      .def(
          "origin",
          [](const source::ViewSource& s, uint64_t sample) {
            if (sample >= s.size()) throw nb::index_error();
            return s.origin(sample);
          },
          nb::arg("sample"), "The part of a sample, and its number there.");

  m.def(
      "open_view",
      [](const std::vector<std::shared_ptr<source::Source>>& sources,
         const std::vector<int64_t>& label_offsets, const std::optional<bindings::Ids>& numbers) {
        if (label_offsets.size() != sources.size()) {
          throw Error(ErrorKind::usage, "there must be an offset of labels a part");
        }
        std::vector<source::ViewSource::Part> parts;
        for (size_t i = 0; i < sources.size(); ++i) parts.push_back({sources[i], label_offsets[i]});
        std::optional<std::span<const uint64_t>> chosen;
        if (numbers) chosen = std::span(numbers->data(), numbers->size());
        const nb::gil_scoped_release release;
        return std::make_shared<source::ViewSource>(std::move(parts), chosen);
      },
      nb::arg("sources"), nb::arg("label_offsets"), nb::arg("numbers").none(),
      "Samples of other sources, by their numbers when these are laid end to end; all if None.");
}

}  // namespace

void bind_source(nb::module_& m) {
  m.def("uring_problem", &source::uring_problem,
        "Why this process cannot have an io_uring; empty if it can.");
  bind_any(m);
  nb::class_<source::FolderSource, source::Source>(m, "FolderSource")
      .def_prop_ro("root", &source::FolderSource::root)
      .def_prop_ro("classes", [](const source::FolderSource& s) { return s.listing().classes(); });

  bind_views(m);
  bind_folders(m);
}
