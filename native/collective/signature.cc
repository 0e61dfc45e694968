// Packs a call into 64 bits, and describes such bits in messages of errors.
#include "collective/signature.h"

#include "collective/types.h"

namespace nostall::collective {

const char* name_of(Call call) noexcept {
  switch (call) {
    case Call::barrier:
      return "barrier";
    case Call::allreduce:
      return "allreduce";
    case Call::reduce:
      return "reduce";
    case Call::broadcast:
      return "broadcast";
    case Call::reduce_scatter:
      return "reduce_scatter";
    case Call::allgather:
      return "allgather";
    case Call::allgatherv:
      return "allgatherv";
    case Call::reduce_scatterv:
      break;
  }
  return "reduce_scatterv";
}

std::string describe_signature(uint64_t packed) {
  const auto call = static_cast<Call>(packed >> 60);
  std::string text = name_of(call);
  if (call == Call::barrier) return text;
  const bool uneven = call == Call::allgatherv;
  const uint64_t count = packed & (uneven ? (uint64_t{1} << 46) - 1 : 0xffffffffu);
  const uint64_t elements = (packed >> (uneven ? 46 : 32)) & 0x3fffu;
  const uint64_t type = (elements >> 5) - 1, op = elements & 0x1fu;
  const bool known = type < kDataTypes && op < kOps;
  const std::string named = known ? std::string(name_of(static_cast<DataType>(type))) : "";
  if (uneven) {
    return text + (known ? " of " + named : "") + " in parts whose sizes have the hash " +
           std::to_string(count);
  }
  text += " of ";
  const bool in_blocks = call == Call::reduce_scatterv;
  const bool hashed = in_blocks || count >= kHashedCount;
  if (!hashed) text += std::to_string(count) + " ";
  if (call == Call::broadcast || call == Call::allgather) {
    text += known ? "bytes of " + named : "bytes";
  } else if (known) {
    text += named + " elements, " + std::string(name_of(static_cast<Op>(op)));
  } else {
    text +=
        "elements of " + std::to_string(elements & 0x1fffu) + " bytes, an operation of the user";
  }
  if (hashed) {
    text +=
        (in_blocks ? ", in blocks whose sizes have the hash " : ", whose number has the hash ") +
        std::to_string(count);
  }
  if (call == Call::reduce || call == Call::broadcast) {
    text += (call == Call::reduce ? ", to rank " : ", from rank ") +
            std::to_string((packed >> 50) & 0x3ffu);
  }
  if (((packed >> 49) & 1u) != 0) text += ", in fixed order";
  const auto algorithm = static_cast<Algorithm>((packed >> 46) & 7u);
  if (algorithm != Algorithm::cooperative) text += ", by " + std::string(name_of(algorithm));
  return text;
}

}  // namespace nostall::collective
