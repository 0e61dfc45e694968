// Lists a folder in parallel and in torchvision's order. Directories are listed by several threads;
// the results are put together by name afterwards, so the order does not depend on timing.
#include "source/scan.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <utility>

#include "base/crew.h"
#include "base/fnv.h"

namespace nostall::source {
namespace {

// What this library keeps beside a data set: indexes, checksums.
constexpr std::string_view kOwnNames = ".nostall-";

struct File {
  std::string path;  // relative to the root
  uint64_t size = 0;
  int64_t mtime_ns = 0;
};

// One directory and, by their place in it, what is below: torchvision walks a directory's own files
// first, then its sub-directories; but sorts by directory name over the whole walk.
struct Tree {
  std::vector<ListedDirectory> directories;
  std::vector<std::pair<std::string, std::vector<File>>> listings;  // (directory, its files)
};

int64_t mtime_ns(const struct stat& s) {
  return int64_t{s.st_mtim.tv_sec} * 1'000'000'000 + s.st_mtim.tv_nsec;
}

std::string join(const std::string& a, const std::string& b) { return a.empty() ? b : a + "/" + b; }

bool wanted(const std::string& name, const std::vector<std::string>& extensions) {
  if (extensions.empty()) return true;
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) {
    return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  });
  return std::any_of(extensions.begin(), extensions.end(),
                     [&](const std::string& e) { return lower.ends_with(e); });
}

// Sub-directories of one directory; its files are appended to `files`.
std::vector<std::string> list_one(const std::string& root, const std::string& directory,
                                  const std::vector<std::string>& extensions, Tree& tree) {
  const std::string path = join(root, directory);
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(path.c_str()), &::closedir);
  if (!dir) {
    const int number = errno;
    if (number != ENOENT && number != ENOTDIR) throw io_error("cannot list", path, number);
    throw Error(ErrorKind::io,
                io_error("cannot list", path, number).what() +
                    std::string("; give a directory that holds one directory for each class"),
                number);
  }
  const int fd = ::dirfd(dir.get());
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw io_error("cannot examine", path, errno);
  tree.directories.push_back({directory, mtime_ns(status)});
  std::vector<std::string> below;
  std::vector<File> files;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(dir.get());
    if (!entry) {
      if (errno != 0) throw io_error("cannot list", path, errno);
      break;
    }
    const std::string name = entry->d_name;
    if (name == "." || name == ".." || name.starts_with(kOwnNames)) continue;
    const bool candidate = wanted(name, extensions);
    if (entry->d_type == DT_REG && !candidate) continue;
    if (::fstatat(fd, name.c_str(), &status, 0) != 0) {
      // A dangling link that is not a sample is passed over.
      if (errno == ENOENT && !candidate) continue;
      if (errno == ENOENT && entry->d_type == DT_LNK) {
        throw Error(ErrorKind::io,
                    join(path, name) +
                        " is a link to a file that is not there: remove the link or mount what it "
                        "leads to",
                    ENOENT);
      }
      throw io_error("cannot examine", join(path, name), errno);
    }
    if (S_ISDIR(status.st_mode)) {
      below.push_back(name);
    } else if (candidate) {
      // Opening a pipe would wait for a writer for ever.
      if (!S_ISREG(status.st_mode)) {
        throw Error(ErrorKind::usage, join(path, name) + " is not a regular file: remove it");
      }
      files.push_back(
          {join(directory, name), static_cast<uint64_t>(status.st_size), mtime_ns(status)});
    }
  }
  std::sort(files.begin(), files.end(),
            [](const File& a, const File& b) { return a.path < b.path; });
  tree.listings.emplace_back(directory, std::move(files));
  return below;
}

void list_below(const std::string& root, const std::string& directory,
                const std::vector<std::string>& extensions, Tree& tree,
                std::set<std::pair<dev_t, ino_t>>& parents) {
  struct stat status {};
  const std::string path = join(root, directory);
  if (::stat(path.c_str(), &status) != 0) throw io_error("cannot examine", path, errno);
  const std::pair<dev_t, ino_t> self{status.st_dev, status.st_ino};
  if (!parents.insert(self).second) {
    throw Error(ErrorKind::usage, path + " is a link to a directory above it: remove the link");
  }
  for (const std::string& name : list_one(root, directory, extensions, tree)) {
    list_below(root, join(directory, name), extensions, tree, parents);
  }
  parents.erase(self);
}

Tree list_tree(const std::string& root, const std::string& directory,
               const std::vector<std::string>& extensions) {
  Tree tree;
  std::set<std::pair<dev_t, ino_t>> parents;
  list_below(root, directory, extensions, tree, parents);
  std::sort(tree.listings.begin(), tree.listings.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  return tree;
}

// Calls work(i) for i below count from several threads; throws the first error.
void in_parallel(size_t count, unsigned threads, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  share(static_cast<unsigned>(std::min<size_t>(threads, count)), [&](bool) {
    try {
      for (size_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      next = count;
      throw;
    }
  });
}

// Of the root only the directories count: no name contains a slash.
std::vector<std::string> class_folders(const std::string& root) {
  Tree top;
  std::vector<std::string> classes = list_one(root, "", {"/"}, top);
  std::sort(classes.begin(), classes.end());
  return classes;
}

}  // namespace

uint64_t ScanOptions::hash() const {
  Fnv hash(class_per_folder ? 1 : 2);
  for (const std::string& e : extensions) hash.bytes(e).bytes("\xff");
  return hash.value();
}

SampleIndex scan_folder(const std::string& root, const ScanOptions& options) {
  SampleIndex index;
  Fnv times;
  const auto add = [&](const Tree& tree, int64_t label) {
    for (const auto& [directory, files] : tree.listings) {
      for (const File& f : files) {
        index.add(f.path, f.size, label);
        times.number(static_cast<uint64_t>(f.mtime_ns));
      }
    }
  };
  std::vector<ListedDirectory> directories;
  if (!options.class_per_folder) {
    const Tree tree = list_tree(root, "", options.extensions);
    add(tree, 0);
    if (index.size() == 0) throw Error(ErrorKind::usage, root + " holds no samples");
    index.set_directories(tree.directories);
    index.set_times(times.value());
    return index;
  }
  std::vector<std::string> classes = class_folders(root);
  if (classes.empty()) {
    throw Error(ErrorKind::usage,
                root + " has no class folders: give one folder per class, or use FileList");
  }
  std::vector<Tree> trees(classes.size());
  in_parallel(classes.size(), options.threads,
              [&](size_t c) { trees[c] = list_tree(root, classes[c], options.extensions); });
  for (size_t c = 0; c < classes.size(); ++c) {
    const uint64_t before = index.size();
    add(trees[c], static_cast<int64_t>(c));
    if (index.size() == before && !options.allow_empty) {
      throw Error(ErrorKind::usage, "class folder " + join(root, classes[c]) +
                                        " holds no samples: remove it, or pass allow_empty=True");
    }
    directories.insert(directories.end(), trees[c].directories.begin(), trees[c].directories.end());
  }
  index.set_classes(std::move(classes));
  index.set_directories(std::move(directories));
  return index;  // its times are not known to processes that take a stored one: to none, then
}

bool has_empty_class(const SampleIndex& index) {
  std::vector<bool> full(index.classes().size());
  if (full.empty()) return false;
  for (const int64_t label : index.labels()) full[static_cast<size_t>(label)] = true;
  return std::find(full.begin(), full.end(), false) != full.end();
}

bool unchanged(const std::string& root, const SampleIndex& index) {
  try {
    if (!index.classes().empty() && class_folders(root) != index.classes()) return false;
  } catch (const Error&) {
    return false;
  }
  return std::all_of(
      index.directories().begin(), index.directories().end(), [&](const ListedDirectory& d) {
        struct stat status {};
        return ::stat(join(root, d.path).c_str(), &status) == 0 && mtime_ns(status) == d.mtime_ns;
      });
}

SampleIndex list_files(const std::string& root, const std::vector<std::string>& paths,
                       const std::vector<int64_t>& labels, unsigned threads) {
  if (!labels.empty() && labels.size() != paths.size()) {
    throw Error(ErrorKind::usage, "there are " + std::to_string(labels.size()) + " labels for " +
                                      std::to_string(paths.size()) + " paths");
  }
  if (paths.empty()) throw Error(ErrorKind::usage, "the list of files is empty");
  std::vector<uint64_t> sizes(paths.size());
  std::vector<int64_t> times(paths.size());
  in_parallel(paths.size(), threads, [&](size_t i) {
    const std::string path = paths[i].starts_with('/') ? paths[i] : join(root, paths[i]);
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) throw io_error("cannot examine", path, errno);
    if (!S_ISREG(status.st_mode)) throw Error(ErrorKind::usage, path + " is not a file");
    sizes[i] = static_cast<uint64_t>(status.st_size);
    times[i] = mtime_ns(status);
  });
  SampleIndex index;
  Fnv hash;
  for (size_t i = 0; i < paths.size(); ++i) {
    index.add(paths[i], sizes[i], labels.empty() ? 0 : labels[i]);
    hash.number(static_cast<uint64_t>(times[i]));
  }
  index.set_times(hash.value());
  return index;
}

}  // namespace nostall::source
