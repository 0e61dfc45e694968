// base/processor.h - the instructions that vector code may choose at run time.
#pragma once

namespace nostall {

// The processor has them, and the system keeps their registers. Nothing of another architecture.
struct Processor {
  bool crc32c = false;  // SSE4.2; on ARM the CRC32 extension
  bool avx2 = false;
  bool avx512 = false;      // F and DQ
  bool wide_clmul = false;  // products without carries of 512 bits
};

// Of this machine, found at the first call. Thread-safe.
const Processor& processor() noexcept;

}  // namespace nostall
