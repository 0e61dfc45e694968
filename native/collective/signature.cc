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

std::string describe_signature(uint64_t signature) {
  const auto call = static_cast<Call>(signature >> 60);
  std::string text = name_of(call);
  if (call == Call::barrier) return text;
  if (call == Call::allgatherv) {
    return text + " in parts whose sizes have the hash " +
           std::to_string(signature & ~uint64_t{0} >> 4);
  }
  const uint64_t count = signature & ((uint64_t{1} << kCountBits) - 1);
  const uint64_t type = (signature >> 42) & 0xffu, op = (signature >> 34) & 0xffu;
  const bool reduces = call != Call::broadcast && call != Call::allgather;
  const bool known = reduces && type < kDataTypes && op < kOps;
  text += " of ";
  if (call != Call::reduce_scatterv) text += std::to_string(count) + " ";
  text += known ? std::string(name_of(static_cast<DataType>(type))) + " elements, " +
                      std::string(name_of(static_cast<Op>(op)))
          : reduces ? std::string("elements, an operation of the user")
                    : std::string("bytes");
  if (call == Call::reduce_scatterv) {
    text += ", in blocks whose sizes have the hash " + std::to_string(count);
  }
  if (call == Call::reduce || call == Call::broadcast) {
    text += (call == Call::reduce ? ", to rank " : ", from rank ") +
            std::to_string((signature >> 50) & 0x3ffu);
  }
  return text;
}

}  // namespace nostall::collective
