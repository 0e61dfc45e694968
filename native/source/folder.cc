// Samples that are files, and the adaptive reader. It starts with plain reads, one at a time. When
// a read takes longer than a copy from memory would (reader_choice.h), it goes over to io_uring. From
// then on one batch in kProbeEvery is read plainly, to notice when the files are in memory.
#include "source/folder.h"

#include <fcntl.h>

#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/clock.h"
#include "base/fnv.h"
#include "base/heap.h"
#include "source/reader_choice.h"

namespace nostall::source {
namespace {

// While io_uring is in use, one batch in this many is read one at a time, to see whether the
// storage has become fast.
constexpr unsigned kProbeEvery = 64;

class AdaptiveReader : public Reader {
 public:
  AdaptiveReader(const FolderSource& source, unsigned depth)
      : source_(source), depth_(depth), pread_(make_pread_reader(source)) {}

  void read(std::span<ReadRequest> requests) override {
    if (requests.empty()) return;
    if (asks_uring() && ++since_probe_ % kProbeEvery != 0) {
      uring_->read(requests);
      return;
    }
    // How long the first reads of a batch take decides whether the rest go side by side.
    const size_t trial = refused_ ? requests.size() : std::min<size_t>(2, requests.size());
    measured_read(requests.first(trial));
    const auto rest = requests.subspan(trial);
    if (rest.empty()) return;
    if (asks_uring()) {
      uring_->read(rest);
    } else {
      measured_read(rest);
    }
  }

  std::string_view name() const override {
    return uring_ && choose_reader(seconds_).many_in_flight ? uring_->name() : pread_->name();
  }

 private:
  // Whether many are to be in flight, and can be. A ring is made only then: it takes a descriptor, and
  // a data set of many parts has a reader of each in every thread.
  bool asks_uring() {
    if (!choose_reader(seconds_).many_in_flight) return false;
    if (!uring_ && !refused_) {
      std::string why;
      uring_ = make_uring_reader(source_, depth_, why);
      refused_ = !uring_;
    }
    return uring_ != nullptr;
  }

  void measured_read(std::span<ReadRequest> requests) {
    const int64_t begin = now_ns();
    pread_->read(requests);
    const double seen =
        static_cast<double>(now_ns() - begin) * 1e-9 / static_cast<double>(requests.size());
    seconds_ = seconds_ == 0.0 ? seen : seconds_ + (seen - seconds_) / 4.0;
  }

  const FolderSource& source_;
  const unsigned depth_;
  std::unique_ptr<Reader> pread_, uring_;
  bool refused_ = false;  // the ring
  double seconds_ = 0.0;
  unsigned since_probe_ = 0;
};

// The root counts where paths begin there: absolute ones are in the fingerprint.
uint64_t files_stamp_of(const std::string& root, const Listing& listing,
                        const std::optional<uint64_t>& times) {
  Fnv hash;
  uint64_t i = 0;
  while (i < listing.size() && listing.path(i).starts_with('/')) ++i;
  if (i < listing.size()) {
    std::error_code error;
    const std::string where = std::filesystem::canonical(root, error).string();
    hash.text(error ? root : where);
  }
  if (times) hash.number(*times);
  return hash.value();
}

// Beside names, which are in the fingerprint, and the times of all files, directories tell nothing.
uint64_t stamp_of(uint64_t files_stamp, const Listing& listing, bool times) {
  if (times) return files_stamp;
  Fnv hash;
  hash.number(files_stamp);
  for (const ListedDirectory& d : listing.directories()) {
    hash.text(d.path).number(static_cast<uint64_t>(d.mtime_ns));
  }
  return hash.value();
}

}  // namespace

std::string read_error_text(int error) {
  if (error == kSizeChanged) {
    return "its size is not the one that was listed (if it was changed on purpose: start again, "
           "and where the listing is stored run `nostall index ROOT` before, with its --index and "
           "options)";
  }
  if (error == kWrongBytes) return "its bytes are not what the index says";
  return std::generic_category().message(error);
}

std::string read_error_text(const ReadRequest& request) {
  return request.why.empty() ? read_error_text(request.error) : request.why;
}

FolderSource::FolderSource(std::string root, SampleIndex index, FileSystem& files)
    : root_(std::move(root)),
      times_(index.times()),
      listing_(std::move(index)),
      files_stamp_(files_stamp_of(root_, listing_, times_)),
      stamp_(stamp_of(files_stamp_, listing_, times_.has_value())),
      files_(files) {
  const int fd = files_.open(root_, O_RDONLY | O_DIRECTORY);
  if (fd < 0) throw io_error("cannot open folder", root_, -fd);
  root_fd_ = Descriptor(fd);
  give_back_free_memory(listing_.size());
}

std::string FolderSource::describe(uint64_t sample) const {
  const std::string path(listing_.path(sample));
  return path.starts_with('/') ? path : root_ + "/" + path;
}

std::unique_ptr<Reader> FolderSource::make_reader(ReaderKind kind, unsigned depth) const {
  if (kind == ReaderKind::pread) return make_pread_reader(*this);
  if (kind == ReaderKind::automatic) return make_adaptive_reader(*this, depth);
  std::string why;
  auto reader = make_uring_reader(*this, depth, why);
  if (!reader) {
    throw Error(ErrorKind::usage, "io_uring cannot be used here: " + why +
                                      "; pass reader=\"pread\" or reader=\"auto\"");
  }
  return reader;
}

std::unique_ptr<Reader> make_adaptive_reader(const FolderSource& source, unsigned depth) {
  return std::make_unique<AdaptiveReader>(source, depth);
}

}  // namespace nostall::source
