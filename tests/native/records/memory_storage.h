// Files in memory as a Storage, with faults at will: for tests and fuzz targets.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "records/ranges.h"

namespace nostall::records {

class MemoryStorage : public Storage {
 public:
  explicit MemoryStorage(std::vector<std::string> contents) : contents_(std::move(contents)) {
    for (size_t i = 0; i < contents_.size(); ++i) {
      files_.push_back({"memory/" + std::to_string(i), contents_[i].size(), 0});
    }
  }

  std::span<const StorageFile> files() const override { return files_; }
  std::unique_ptr<RangeReader> make_reader(source::ReaderKind, unsigned) const override {
    return std::make_unique<MemoryReader>(*this);
  }
  std::string changed(uint32_t) const override { return change; }

  std::optional<Touched> touched(uint32_t file) const override {
    if (!time) return {};
    return Touched{*time, files_[file].size + grown};
  }

  std::string& content(uint32_t file = 0) { return contents_[file]; }

  std::string change;             // what changed() says
  std::optional<int64_t> time{};  // and touched()
  uint64_t grown = 0;             // bytes
  // Looked at before every range: 0, or the error that the range gets.
  std::function<int(const RangeRead&)> before;
  mutable std::atomic<uint64_t> ranges{0}, bytes{0};  // that were asked for
  mutable std::atomic<uint64_t> most_at_once{0};      // bytes of one call

 private:
  class MemoryReader : public RangeReader {
   public:
    explicit MemoryReader(const MemoryStorage& storage) : storage_(storage) {}
    void read(std::span<RangeRead> wanted) override {
      uint64_t all = 0;
      for (RangeRead& r : wanted) {
        r.error = read_one(r);
        all += r.size();
      }
      storage_.most_at_once = std::max(storage_.most_at_once.load(), all);
    }
    std::string_view name() const override { return "memory"; }
    uint64_t bytes_read() const override { return storage_.bytes; }

   private:
    int read_one(const RangeRead& r) {
      ++storage_.ranges;
      storage_.bytes += r.size();
      if (storage_.before) {
        if (const int error = storage_.before(r)) return error;
      }
      const std::string& content = storage_.contents_.at(r.file);
      if (r.offset > content.size() || r.size() > content.size() - r.offset)
        return source::kSizeChanged;
      const char* from = content.data() + r.offset;
      if (!r.head.empty()) std::memcpy(r.head.data(), from, r.head.size());
      if (!r.into.empty()) std::memcpy(r.into.data(), from + r.head.size(), r.into.size());
      return 0;
    }
    const MemoryStorage& storage_;
  };

  std::vector<std::string> contents_;
  std::vector<StorageFile> files_;
};

}  // namespace nostall::records
