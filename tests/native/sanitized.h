// NOSTALL_SANITIZED_HEAP is 1 where a sanitizer's allocator keeps what is freed, to find its later
// uses, and gives memory to all.
#pragma once

#if defined(__has_feature)
#define NOSTALL_HAS_FEATURE(x) __has_feature(x)
#else
#define NOSTALL_HAS_FEATURE(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    NOSTALL_HAS_FEATURE(address_sanitizer) || NOSTALL_HAS_FEATURE(thread_sanitizer)
#define NOSTALL_SANITIZED_HEAP 1
#else
#define NOSTALL_SANITIZED_HEAP 0
#endif
