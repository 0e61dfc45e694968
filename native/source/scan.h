// source/scan.h - lists a folder of files with torchvision's rules, in parallel.
#pragma once

#include <string>
#include <vector>

#include "source/index.h"

namespace nostall::source {

struct ScanOptions {
  // Lower case, with the dot; files of other names are passed over. Empty: every file.
  std::vector<std::string> extensions;
  bool class_per_folder = true;  // false: one flat list of the whole tree, label 0
  bool allow_empty = false;      // classes without files are allowed
  unsigned threads = 8;

  uint64_t hash() const;  // of what the result depends on
};

// Class-per-folder as torchvision.datasets.ImageFolder: classes are the directories of the root by
// name; the files of a class are found recursively, links followed, directories and the files in
// each by name. Names are compared as Unicode code points. Throws Error(io) with the path of a
// directory or file that cannot be examined, Error(usage) if there is no class, or an empty one.
SampleIndex scan_folder(const std::string& root, const ScanOptions& options);

// Whether the root still has the classes of the index, and every directory below it the time that
// was recorded. (The root's own time says nothing: the index itself may be kept there.) A file
// rewritten in place does not change its directory: that is found when it is read (kSizeChanged).
bool unchanged(const std::string& root, const SampleIndex& index);

// Whether a class of the index has no samples: with ScanOptions::allow_empty alone.
bool has_empty_class(const SampleIndex& index);

// Sizes of a list of files, in order. Throws Error(io) with the path that cannot be examined.
SampleIndex list_files(const std::string& root, const std::vector<std::string>& paths,
                       const std::vector<int64_t>& labels, unsigned threads);

}  // namespace nostall::source
