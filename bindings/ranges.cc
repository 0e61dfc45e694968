// Ranges read straight into memory that Python shares, for measurements: nothing of Python runs
// while the storage works.
#include "records/ranges.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>

#include <memory>
#include <string>
#include <vector>

#include "arrays.h"
#include "base/clock.h"
#include "module.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;
using bindings::Ids;

namespace {

using Room = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

source::ReaderKind reader_of(const std::string& name) {
  if (name == "auto") return source::ReaderKind::automatic;
  if (name == "pread") return source::ReaderKind::pread;
  if (name == "io_uring") return source::ReaderKind::uring;
  throw Error(ErrorKind::usage,
              "reader must be \"auto\", \"io_uring\" or \"pread\", not \"" + name + "\"");
}

class TimedReader {
 public:
  TimedReader(std::shared_ptr<records::Storage> storage, const std::string& reader, unsigned depth)
      : storage_(std::move(storage)), reader_(storage_->make_reader(reader_of(reader), depth)) {}

  // Seconds that it took.
  double read(const Ids& offset, const Ids& length, const Ids& place, const Room& into) {
    if (length.size() != offset.size() || place.size() != offset.size()) {
      throw Error(ErrorKind::usage, "a range needs an offset, a length and a place");
    }
    std::vector<records::RangeRead> ranges(offset.size());
    for (size_t i = 0; i < ranges.size(); ++i) {
      const uint64_t at = place.data()[i], bytes = length.data()[i];
      if (at > into.size() || bytes > into.size() - at) {
        throw Error(ErrorKind::usage, "range " + std::to_string(i) + " does not fit its place");
      }
      ranges[i].offset = offset.data()[i];
      ranges[i].into = std::as_writable_bytes(std::span(into.data() + at, bytes));
    }
    const nb::gil_scoped_release release;
    const int64_t begin = now_ns();
    reader_->read(ranges);
    const double seconds = static_cast<double>(now_ns() - begin) * 1e-9;
    for (const records::RangeRead& r : ranges) {
      if (r.error == 0) continue;
      throw Error(ErrorKind::io, "cannot read " + std::to_string(r.size()) + " bytes of " +
                                     storage_->files()[0].path + " at offset " +
                                     std::to_string(r.offset) + ": " +
                                     (r.why.empty() ? source::read_error_text(r.error) : r.why));
    }
    return seconds;
  }
  std::string_view name() const { return reader_->name(); }

 private:
  std::shared_ptr<records::Storage> storage_;
  std::unique_ptr<records::RangeReader> reader_;
};

}  // namespace

void bind_ranges(nb::module_& m) {
  nb::class_<TimedReader>(m, "RangeReader",
                          "Reads ranges of a storage's first file; for one thread.")
      .def(nb::init<std::shared_ptr<records::Storage>, const std::string&, unsigned>(),
           nb::arg("storage"), nb::arg("reader"), nb::arg("depth"))
      .def("read", &TimedReader::read, nb::arg("offset"), nb::arg("length"), nb::arg("place"),
           nb::arg("into"),
           "Reads range i into into[place[i] : place[i] + length[i]]; seconds it took.")
      .def_prop_ro("name", &TimedReader::name);
}
