// Storages and sources that read by functions in Python. A reader takes the GIL for each call of its
// function; the function's OSErrors become errors of the ranges or samples concerned.
#include "python_source.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "held.h"
#include "source/stopping.h"
#include "text.h"

namespace nb = nanobind;

namespace nostall::bindings {
namespace {

// What one item of a Python function's answer is: an OSError's errno and text, or bytes.
struct Answer {
  std::optional<nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>> array;
  int error = 0;
  std::string why;
};

// What the process lacks is no fault of the bytes that were to be read.
int error_of(nb::handle exception) {
  if (PyObject_IsInstance(exception.ptr(), PyExc_MemoryError) == 1) return ENOMEM;
  if (PyObject_IsInstance(exception.ptr(), PyExc_OSError) != 1) return EIO;
  int number = 0;
  const bool known = nb::try_cast(nb::getattr(exception, "errno", nb::none()), number);
  return known && (number == ENOMEM || number == EMFILE || number == ENFILE) ? number : EIO;
}

Answer answer_of(nb::handle item) {
  Answer a;
  if (PyObject_IsInstance(item.ptr(), PyExc_BaseException) == 1) {
    a.error = error_of(item);
    a.why = text_of(item);
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

// Ranges by a function: (list of (file, offset, size), stopped) -> list of buffers or exceptions.
class PythonStorage : public records::Storage {
 public:
  PythonStorage(std::vector<records::StorageFile> files, nb::object read)
      : files_(std::move(files)), read_(std::make_shared<Held>(std::move(read))) {}

  std::span<const records::StorageFile> files() const override { return files_; }
  std::string changed(uint32_t) const override { return {}; }
  bool times_tell_content() const override { return true; }
  std::unique_ptr<records::RangeReader> make_reader(source::ReaderKind, unsigned) const override {
    return std::make_unique<Reader>(read_);
  }

 private:
  class Reader : public records::RangeReader {
   public:
    explicit Reader(std::shared_ptr<Held> read) : read_(std::move(read)) {}
    std::string_view name() const override { return "python"; }
    uint64_t bytes_read() const override { return bytes_; }

    void read(std::span<records::RangeRead> ranges) override {
      const nb::gil_scoped_acquire gil;
      try {
        nb::list asked;
        for (const records::RangeRead& r : ranges) {
          asked.append(nb::make_tuple(r.file, r.offset, r.size()));
          bytes_ += r.size();
        }
        const nb::object stopped =
            nb::cpp_function([stop = source::stop_of_reads()] { return stop.stop_requested(); });
        const nb::list answers = nb::cast<nb::list>(read_->get()(asked, stopped));
        if (answers.size() != ranges.size()) throw std::runtime_error("wrong number of answers");
        for (size_t i = 0; i < ranges.size(); ++i) fill(ranges[i], answer_of(answers[i]));
      } catch (nb::python_error& error) {
        fail(ranges, error_of(error.value()), text_of(error.value()));
        pass_on_interrupt(error);
      } catch (const std::exception& error) {
        fail(ranges, EIO, error.what());
      }
    }

   private:
    static void fail(std::span<records::RangeRead> ranges, int number, const std::string& why) {
      for (records::RangeRead& r : ranges) {
        r.error = number;
        r.why = why;
      }
    }
    static void fill(records::RangeRead& r, const Answer& a) {
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

  std::vector<records::StorageFile> files_;
  std::shared_ptr<Held> read_;
};

// Samples by a function: (list of ids) -> list of buffers or exceptions. For stores that only their
// own library can take apart.
class CallbackSource : public source::Source {
 public:
  CallbackSource(std::vector<uint64_t> sizes, std::vector<int64_t> labels,
                 std::vector<uint32_t> group, uint64_t fingerprint, nb::object read,
                 nb::object describe, bool bounded, uint32_t made_at_once, uint64_t stamp)
      : sizes_(std::move(sizes)),
        labels_(std::move(labels)),
        group_(std::move(group)),
        fingerprint_(fingerprint),
        stamp_(stamp),
        bounded_(bounded),
        made_at_once_(made_at_once),
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
  uint64_t stamp() const override { return stamp_; }
  bool stamp_covers_samples() const override { return stamp_ != 0; }
  std::string describe(uint64_t sample) const override {
    const nb::gil_scoped_acquire gil;
    try {
      const nb::object name = describe_->get()(sample);
      std::string text;
      return nb::try_cast(name, text) ? text : text_of(name);
    } catch (nb::python_error& error) {
      const std::string why = text_of(error.value());
      pass_on_interrupt(error);
      return "sample " + std::to_string(sample) + " (" + why + ")";
    }
  }
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind, unsigned) const override {
    return std::make_unique<Reader>(read_, bounded_);
  }
  uint32_t made_at_once() const override { return made_at_once_; }
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
    Reader(std::shared_ptr<Held> read, bool bounded) : read_(std::move(read)), bounded_(bounded) {}
    std::string_view name() const override { return "python"; }
    void read(std::span<source::ReadRequest> requests) override {
      const nb::gil_scoped_acquire gil;
      std::string why;
      int number = EIO;
      try {
        nb::list ids;
        for (const source::ReadRequest& r : requests) ids.append(r.sample);
        const nb::list answers = nb::cast<nb::list>(read_->get()(ids));
        if (answers.size() != requests.size()) throw std::runtime_error("wrong number of answers");
        for (size_t i = 0; i < requests.size(); ++i) fill(requests[i], answer_of(answers[i]));
        return;
      } catch (nb::python_error& error) {
        number = error_of(error.value());
        why = text_of(error.value());
        pass_on_interrupt(error);
      } catch (const std::exception& error) {
        why = error.what();
      }
      for (source::ReadRequest& r : requests) {
        r.error = number;
        r.why = why;
      }
    }

   private:
    void fill(source::ReadRequest& r, const Answer& a) const {
      r.error = a.error;
      r.why = a.why;
      if (!a.array) return;
      const size_t bytes = a.array->nbytes();
      if (bounded_ ? bytes > r.into.size() : bytes != r.into.size()) {
        r.error = source::kWrongBytes;
        r.why = "it has " + std::to_string(bytes) + " bytes instead of " +
                std::to_string(r.into.size());
        return;
      }
      if (bytes > 0) std::memcpy(r.into.data(), a.array->data(), bytes);
      if (bytes < r.into.size()) std::memset(r.into.data() + bytes, 0, r.into.size() - bytes);
    }
    std::shared_ptr<Held> read_;
    const bool bounded_;
  };

  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
  std::vector<uint32_t> group_;
  uint64_t fingerprint_, total_ = 0;
  const uint64_t stamp_;
  const bool bounded_;
  const uint32_t made_at_once_;
  std::shared_ptr<Held> read_, describe_;
};

}  // namespace

stage::TakeMemory python_memory(nb::object take) {
  return [take = std::make_shared<Held>(std::move(take))](size_t bytes) {
    const nb::gil_scoped_acquire gil;
    nb::object given;
    try {
      given = take->get()(bytes);
    } catch (nb::python_error& error) {
      throw Error(ErrorKind::usage, "memory for a batch: " + text_of(error.value()));
    }
    const auto array = nb::cast<nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>>(given);
    if (array.nbytes() < bytes) throw std::bad_alloc();
    auto* data = static_cast<std::byte*>(static_cast<void*>(array.data()));
    return std::shared_ptr<std::byte>(data, [kept = std::make_shared<Held>(given)](std::byte*) {});
  };
}

std::shared_ptr<records::Storage> python_storage(std::vector<records::StorageFile> files,
                                                 nb::object read) {
  return std::make_shared<PythonStorage>(std::move(files), std::move(read));
}

std::shared_ptr<source::Source> python_source(std::vector<uint64_t> sizes,
                                              std::vector<int64_t> labels,
                                              std::vector<uint32_t> group, uint64_t fingerprint,
                                              nb::object read, nb::object describe, bool bounded,
                                              uint32_t made_at_once, uint64_t stamp) {
  return std::make_shared<CallbackSource>(std::move(sizes), std::move(labels), std::move(group),
                                          fingerprint, std::move(read), std::move(describe),
                                          bounded, made_at_once, stamp);
}

}  // namespace nostall::bindings
