// What libraries that are preloaded under a job share: which file a call is about.
#pragma once

#include <stdio.h>
#include <string.h>
#include <unistd.h>

// Whether `path` is `root` or below it.
static inline int below(const char* path, const char* root) {
  if (root == NULL || path == NULL) return 0;
  const size_t length = strlen(root);
  return strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

// The name of an open file, in 4096 bytes; 0 if it has none.
static inline int path_of(int fd, char* path) {
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, 4095);
  path[n < 0 ? 0 : n] = 0;
  return n >= 0;
}
