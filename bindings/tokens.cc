// nostall._native: indexes of token files, streams over them, and their units as sources.
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.h"
#include "base/node_once.h"
#include "module.h"
#include "source/index.h"
#include "text.h"
#include "tokens/units.h"

namespace nb = nanobind;
using namespace nostall;
using bindings::array_of;
using bindings::look_at_signals;
using bindings::without_gil;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const uint32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using StoragePtr = std::shared_ptr<records::Storage>;
using StreamPtr = std::shared_ptr<tokens::Stream>;

template <typename T>
std::vector<T> vector_of(const Column<T>& column) {
  return {column.data(), column.data() + column.size()};
}

tokens::Index described(const StoragePtr& storage, std::string stamp, uint32_t width,
                        const Column<uint32_t>& file, const Column<uint64_t>& offset,
                        const Column<uint64_t>& count) {
  if (file.size() != offset.size() || file.size() != count.size()) {
    throw Error(ErrorKind::usage, "an extent has a file, an offset and a number of tokens");
  }
  if (width != 1 && width != 2 && width != 4 && width != 8) {
    throw Error(ErrorKind::usage, "ids have 1, 2, 4 or 8 bytes");
  }
  tokens::Index index;
  index.stamp = std::move(stamp);
  index.width = width;
  const auto files = storage->files();
  index.files.assign(files.begin(), files.end());
  for (records::StorageFile& f : index.files) f.path = f.path.substr(f.path.rfind('/') + 1);
  for (size_t i = 0; i < file.size(); ++i) {
    if (file.data()[i] >= files.size()) throw nb::index_error();
    index.extents.push_back({file.data()[i], offset.data()[i], count.data()[i]});
  }
  return index;
}

tokens::Long long_named(const std::string& name) {
  if (name == "cut") return tokens::Long::cut;
  if (name == "split") return tokens::Long::split;
  if (name == "refuse") return tokens::Long::refuse;
  throw Error(ErrorKind::usage,
              "longer must be \"cut\", \"split\" or \"refuse\", not \"" + name + "\"");
}

plan::Packing packing_named(const std::string& name) {
  if (name == "best-fit") return plan::Packing::best_fit;
  if (name == "concatenate") return plan::Packing::concatenate;
  throw Error(ErrorKind::usage,
              "packing must be \"best-fit\" or \"concatenate\", not \"" + name + "\"");
}

plan::LongDocuments packed_long(const std::string& name) {
  switch (long_named(name)) {
    case tokens::Long::cut:
      return plan::LongDocuments::cut;
    case tokens::Long::split:
      return plan::LongDocuments::split;
    case tokens::Long::refuse:
      break;
  }
  return plan::LongDocuments::refuse;
}

// (the index, what gives it to other processes of the node for as long as it lives).
std::pair<tokens::Index, std::shared_ptr<NodeOnce>> index_once(const std::string& key,
                                                               const nb::callable& make,
                                                               double patience) {
  auto once = std::make_shared<NodeOnce>(key + " " + std::to_string(tokens::kTokensVersion));
  std::optional<tokens::Index> made;
  const auto found = [&] {
    {
      const nb::gil_scoped_acquire gil;
      made = nb::cast<tokens::Index>(make());
    }
    try {
      return tokens::share_index(*made);
    } catch (const Error&) {
      return std::vector<Descriptor>();  // each process keeps its own
    }
  };
  const auto use = [&](const NodeOnce::Files& files) { made = tokens::shared_index(files).take(); };
  without_gil([&] {
    once->get(found, use, std::chrono::nanoseconds(static_cast<int64_t>(patience * 1e9)),
              look_at_signals);
  });
  return {*std::move(made), std::move(once)};
}

void bind_scans(nb::module_& m) {
  m.def(
      "load_tokens",
      [](const std::string& path) {
        const auto bytes = source::load_bytes(path, tokens::kTokensMagic).take();
        return tokens::parse_index(bytes).take();
      },
      nb::arg("path"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "token_index",
      [](const StoragePtr& storage, std::string stamp, uint32_t width, const Column<uint32_t>& file,
         const Column<uint64_t>& offset, const Column<uint64_t>& count,
         const Column<uint64_t>& begins) {
        tokens::Index index = described(storage, std::move(stamp), width, file, offset, count);
        uint64_t all = 0;
        for (const tokens::Extent& e : index.extents) all += e.tokens;
        index.documents = std::make_shared<const tokens::Documents>(
            tokens::Documents::of({begins.data(), begins.size()}, all));
        return index;
      },
      nb::arg("storage"), nb::arg("stamp"), nb::arg("width"), nb::arg("file"), nb::arg("offset"),
      nb::arg("tokens"), nb::arg("begins"), "Documents that begin at these tokens.");
  nb::class_<NodeOnce>(m, "NodeOnce", "What a node makes once (native/base/node_once.h).")
      .def_prop_ro("made", &NodeOnce::made, "Whether this process made it.");
  m.def("token_index_once", index_once, nb::arg("key"), nb::arg("make"), nb::arg("patience"),
        "What `make` returns, called in one process of the node, and what keeps it for the others; "
        "`patience` in seconds.");
  m.def(
      "scan_tokens",
      [](const StoragePtr& storage, std::string stamp, uint32_t width, const Column<uint32_t>& file,
         const Column<uint64_t>& offset, const Column<uint64_t>& count, std::optional<uint64_t> end,
         uint64_t vocabulary, unsigned threads, const std::optional<nb::callable>& progress) {
        tokens::Index index = described(storage, std::move(stamp), width, file, offset, count);
        const auto report = [&progress](uint64_t done) {
          const nb::gil_scoped_acquire gil;
          if (PyErr_CheckSignals() != 0) throw nb::python_error();
          if (progress) (*progress)(done);
        };
        return without_gil([&] {
          index.documents = std::make_shared<const tokens::Documents>(tokens::scan_documents(
              *storage, width, index.extents, {end, vocabulary}, threads, report));
          return index;
        });
      },
      nb::arg("storage"), nb::arg("stamp"), nb::arg("width"), nb::arg("file"), nb::arg("offset"),
      nb::arg("tokens"), nb::arg("end").none(), nb::arg("vocabulary"), nb::arg("threads"),
      nb::arg("progress").none(),
      "Documents end with the id `end`, if any, and with their extent; reads all ids once.");
}

void bind_index(nb::module_& m) {
  nb::class_<tokens::Index>(m, "TokenIndex", "Extents and documents (native/tokens/stream.h).")
      .def_ro("stamp", &tokens::Index::stamp)
      .def_prop_ro("paths",
                   [](const tokens::Index& index) {
                     std::vector<std::string> paths;
                     for (const auto& f : index.files) paths.push_back(f.path);
                     return paths;
                   })
      .def_prop_ro(
          "sizes",
          [](const tokens::Index& index) {
            std::vector<uint64_t> sizes;
            for (const auto& f : index.files) sizes.push_back(f.size);
            return array_of(std::move(sizes));
          },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "times",
          [](const tokens::Index& index) {
            std::vector<int64_t> times;
            for (const auto& f : index.files) times.push_back(f.mtime_ns);
            return array_of(std::move(times));
          },
          nb::rv_policy::automatic)
      .def(
          "divided_as",
          [](const tokens::Index& index, const StreamPtr& other) {
            tokens::Index made = index;
            made.documents = other->index().documents;
            return made;
          },
          nb::arg("other"), "The same extents with the documents of another stream.")
      .def(
          "store",
          [](const tokens::Index& index, const std::string& path) {
            return tokens::store_index(path, index);
          },
          nb::arg("path"), nb::call_guard<nb::gil_scoped_release>(),
          "Writes the stored form; (0 or -errno, bytes).");
  bind_scans(m);
}

void bind_stream(nb::module_& m) {
  using tokens::Stream;
  nb::class_<Stream>(m, "TokenStream", "Ids of files as one stream (native/tokens/stream.h).")
      .def(
          "__init__",
          [](Stream* self, const StoragePtr& storage, const tokens::Index& index) {
            new (self) Stream(storage, index);
          },
          nb::arg("storage"), nb::arg("index"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("tokens", &Stream::tokens)
      .def_prop_ro("width", &Stream::width)
      .def_prop_ro("documents", [](const Stream& s) { return s.documents().size(); })
      .def_prop_ro("fingerprint", &Stream::fingerprint)
      .def_prop_ro(
          "lengths",
          [](const Stream& s) {
            return array_of(without_gil([&] {
              std::vector<uint32_t> lengths(s.documents().size());
              for (uint64_t i = 0; i < lengths.size(); ++i) lengths[i] = s.documents().length(i);
              return lengths;
            }));
          },
          "Tokens of each document.", nb::rv_policy::automatic)
      .def("begin",
           [](const Stream& s, uint64_t i) {
             if (i >= s.documents().size()) throw nb::index_error();
             return s.documents().begin(i);
           })
      .def(
          "read",
          [](const Stream& s, uint64_t begin, uint64_t count) {
            if (begin > s.tokens() || count > s.tokens() - begin) throw nb::index_error();
            std::vector<uint8_t> bytes(count * s.width());
            without_gil([&] {
              std::vector<records::RangeRead> ranges;
              s.ranges(begin, count, reinterpret_cast<std::byte*>(bytes.data()), ranges);
              const auto reader = s.storage().make_reader(source::ReaderKind::pread, 1);
              for (const records::RangeRead& r : ranges) {
                records::read_range(*reader, s.storage(), r.file, r.offset, r.into);
              }
            });
            return array_of(std::move(bytes));
          },
          nb::arg("begin"), nb::arg("count"), "The bytes of these ids.", nb::rv_policy::automatic);
}

void bind_units(nb::module_& m) {
  using tokens::UnitSource;
  auto units = nb::class_<UnitSource, source::Source>(m, "UnitSource");
  units.def(
      "segments",
      [](const UnitSource& s, uint64_t unit) {
        if (unit >= s.size()) throw nb::index_error();
        std::vector<tokens::Segment> found;
        s.segments(unit, found);
        std::vector<std::pair<uint64_t, uint32_t>> out;
        for (const auto& segment : found) out.emplace_back(segment.begin, segment.length);
        return out;
      },
      nb::arg("unit"), "(first token in the stream, tokens) of each segment.");
  units.def(
      "pieces",
      [](const UnitSource& s) {
        const auto* packed = std::get_if<plan::Units>(&s.rule());
        if (packed == nullptr) throw nb::type_error("these units are not packed");
        std::vector<uint32_t> documents;
        for (const plan::Piece& piece : packed->pieces) documents.push_back(piece.document);
        return std::pair{
            array_of(std::vector<uint64_t>(packed->begins.begin(), packed->begins.end())),
            array_of(std::move(documents))};
      },
      "Of packed units where the pieces of each begin, and the document of each piece.");
  units.def_prop_ro("tokens", &UnitSource::tokens, "Of all units together.");
  units.def_prop_ro(
      "waste",
      [](const UnitSource& s) {
        const auto* packed = std::get_if<plan::Units>(&s.rule());
        return packed ? packed->waste() : 0.0;
      },
      "The share of positions of packed units that no token takes.");
}

void bind_makers(nb::module_& m) {
  using tokens::UnitSource;
  m.def(
      "token_units_like",
      [](const std::shared_ptr<UnitSource>& like, const StreamPtr& stream, int64_t id, bool mask) {
        const tokens::WithImages& images = like->images();
        return std::make_shared<UnitSource>(
            stream, like->rule(), like->overlap(), 1,
            tokens::WithImages{images.stretched, images.pieces, id, mask});
      },
      nb::arg("units"), nb::arg("stream"), nb::arg("id") = 0, nb::arg("mask") = false,
      nb::call_guard<nb::gil_scoped_release>(),
      "The same units of another stream with the same documents, `id` in the places of images; or "
      "only where there are images, as 0 among 1.");
  m.def(
      "token_windows",
      [](const StreamPtr& stream, uint64_t length, uint64_t stride, bool by_document, bool partial,
         bool overlap, uint32_t fields) {
        return std::make_shared<UnitSource>(
            stream, tokens::Windows{length, stride, by_document, partial}, overlap, fields);
      },
      nb::arg("stream"), nb::arg("length"), nb::arg("stride"), nb::arg("by_document"),
      nb::arg("partial"), nb::arg("overlap"), nb::arg("fields"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "token_documents",
      [](const StreamPtr& stream, uint64_t length, const std::string& longer, bool overlap,
         uint32_t fields) {
        return std::make_shared<UnitSource>(
            stream, tokens::whole_documents(stream->documents(), length, long_named(longer)),
            overlap, fields);
      },
      nb::arg("stream"), nb::arg("length"), nb::arg("longer"), nb::arg("overlap"),
      nb::arg("fields"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "token_pieces",
      [](const StreamPtr& stream, const Column<uint64_t>& offsets, const Table& pieces,
         bool overlap, uint32_t fields) {
        tokens::Pieces table{vector_of(offsets), {}};
        for (size_t i = 0; i < pieces.shape(0); ++i) {
          table.pieces.push_back({pieces(i, 0), pieces(i, 1), pieces(i, 2)});
        }
        return without_gil([&] {
          return std::make_shared<UnitSource>(stream, std::move(table), overlap, fields);
        });
      },
      nb::arg("stream"), nb::arg("offsets"), nb::arg("pieces"), nb::arg("overlap"),
      nb::arg("fields"),
      "`pieces`: document, first token in it and tokens of each; `offsets`: where the pieces of "
      "each unit begin, and their number.");
  m.def(
      "token_packed",
      [](const StreamPtr& stream, uint32_t capacity, const std::string& packing,
         const std::string& longer, uint64_t seed, bool overlap, uint32_t fields) {
        const plan::PackSpec spec{capacity, packing_named(packing), packed_long(longer), seed};
        return std::make_shared<UnitSource>(
            stream, tokens::packed(stream->documents(), spec, look_at_signals), overlap, fields);
      },
      nb::arg("stream"), nb::arg("capacity"), nb::arg("packing"), nb::arg("longer"),
      nb::arg("seed"), nb::arg("overlap"), nb::arg("fields"),
      nb::call_guard<nb::gil_scoped_release>());
}

void bind_interleaved(nb::module_& m) {
  using tokens::UnitSource;
  m.def(
      "token_places",
      [](const StreamPtr& stream, const tokens::Index& ended, uint64_t id, unsigned threads) {
        return array_of(
            without_gil([&] { return tokens::places_of(*stream, *ended.documents, id, threads); }));
      },
      nb::arg("stream"), nb::arg("ended"), nb::arg("id"), nb::arg("threads"),
      "Where the id stands in the stream, by the documents that it ends in `ended`.",
      nb::rv_policy::automatic);
  m.def(
      "token_cuts",
      [](const StreamPtr& stream, const Column<uint64_t>& places, const Column<uint32_t>& costs,
         uint64_t most) {
        auto at = vector_of(places);
        return array_of(without_gil([&] {
          const tokens::Stretched stretched(std::move(at),
                                            std::span<const uint32_t>(costs.data(), costs.size()));
          return tokens::cut_documents(stream->documents(), stretched, most);
        }));
      },
      nb::arg("stream"), nb::arg("places"), nb::arg("costs"), nb::arg("most"),
      "Where pieces of documents begin that are at most so many ids, and the end of the stream.",
      nb::rv_policy::automatic);
  m.def(
      "token_interleaved",
      [](const StreamPtr& stream, const Column<uint64_t>& begins, const Column<uint32_t>& lengths,
         const Column<uint64_t>& places, const Column<uint32_t>& costs, int64_t id,
         uint32_t capacity, uint64_t seed) {
        const std::span<const uint32_t> all(lengths.data(), lengths.size());
        auto at = vector_of(places), pieces = vector_of(begins);
        if (!pieces.empty() && pieces.size() != all.size() + 1) {
          throw Error(ErrorKind::usage, "each piece of a document has a beginning and a length");
        }
        return without_gil([&] {
          const plan::PackSpec spec{capacity, plan::Packing::best_fit, plan::LongDocuments::refuse,
                                    seed};
          tokens::WithImages images{
              std::make_shared<const tokens::Stretched>(
                  std::move(at), std::span<const uint32_t>(costs.data(), costs.size())),
              nullptr, id};
          if (!pieces.empty()) {
            images.pieces = std::make_shared<const std::vector<uint64_t>>(std::move(pieces));
          }
          return std::make_shared<UnitSource>(stream, tokens::packed(all, spec, look_at_signals),
                                              true, 1, std::move(images));
        });
      },
      nb::arg("stream"), nb::arg("begins"), nb::arg("lengths"), nb::arg("places"), nb::arg("costs"),
      nb::arg("id"), nb::arg("capacity"), nb::arg("seed"),
      "Whole documents packed by `lengths`, those of length 0 left out, or if there are `begins` "
      "their pieces; each place is so many ids.");
}

}  // namespace

void bind_tokens(nb::module_& m) {
  bind_index(m);
  bind_stream(m);
  bind_units(m);
  bind_makers(m);
  bind_interleaved(m);
}
