// gil.h - the time that a thread is in functions of the device.
#pragma once

#include <cstdint>

namespace simdev {

// Counted from here to the end of the scope, once the watch has begun; scopes within others are part of
// them.
class Inside {
 public:
  Inside();
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  int64_t began_ = -1, processor_ = -1;
};

}  // namespace simdev
