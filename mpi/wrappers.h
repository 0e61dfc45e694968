// mpi/wrappers.h - what the functions that stand for the MPI's have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "mpi_state.h"
#include "reducers.h"

#define NOSTALL_EXPORT extern "C" __attribute__((visibility("default")))

namespace nostall::mpi {

// A buffer whose address our kernels accept, and its way back. One that overlaps `other`, of as
// many bytes unless it has others, is copied as well: an error in MPI that no MPI reports, and that
// has an obvious meaning.
class Aligned {
 public:
  Aligned(const void* data, uint64_t bytes, size_t alignment, bool fill,
          const void* other = nullptr, std::optional<uint64_t> its_bytes = {})
      : data_(data) {
    const auto at = reinterpret_cast<uintptr_t>(data), its = reinterpret_cast<uintptr_t>(other);
    const bool overlaps =
        other != nullptr && at != its && at < its + its_bytes.value_or(bytes) && its < at + bytes;
    if (at % alignment == 0 && !overlaps) return;
    copy_.resize(bytes);
    if (fill && bytes > 0) std::memcpy(copy_.data(), data, bytes);
  }
  void* get() { return copy_.empty() ? const_cast<void*>(data_) : copy_.data(); }
  void write_back() {
    if (!copy_.empty()) std::memcpy(const_cast<void*>(data_), copy_.data(), copy_.size());
  }
  std::vector<std::byte>& memory() { return copy_; }  // empty if none was needed

 private:
  const void* data_;
  std::vector<std::byte> copy_;
};

// More than a call of ours takes where it is more than 64 bits hold. 0 without a type: to ask the MPI
// for its size would be an error on MPI_COMM_WORLD, whatever the call's communicator does with errors.
inline uint64_t bytes_of(uint64_t count, MPI_Datatype type) {
  MPI_Count size = 0;
  if (type != MPI_DATATYPE_NULL) PMPI_Type_size_x(type, &size);
  const auto each = static_cast<uint64_t>(size > 0 ? size : 0);
  return each > 0 && count > UINT64_MAX / each ? UINT64_MAX : count * each;
}

// The bytes of a message that may have gaps or another order in memory, as all ranks see them; the
// type may be freed meanwhile.
class Packed {
 public:
  Packed(void* buffer, uint64_t count, MPI_Datatype type, MPI_Comm comm, bool fill)
      : buffer_(buffer), count_(static_cast<int>(count)), bytes_(bytes_of(count, type)) {
    if (bytes_ == 0 || is_contiguous(type)) return;
    PMPI_Type_dup(type, &type_);
    packed_.resize(bytes_);
    int position = 0;
    if (fill) {
      PMPI_Pack(buffer_, count_, type_, packed_.data(), static_cast<int>(bytes_), &position, comm);
    }
  }
  ~Packed() {
    if (type_ != MPI_DATATYPE_NULL) PMPI_Type_free(&type_);
  }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  void* get() { return packed_.empty() ? buffer_ : packed_.data(); }
  uint64_t bytes() const { return bytes_; }
  std::vector<std::byte>& memory() { return packed_; }  // empty if none was needed
  void unpack() {
    int position = 0;
    if (packed_.empty()) return;
    PMPI_Unpack(packed_.data(), static_cast<int>(bytes_), &position, buffer_, count_, type_,
                MPI_COMM_SELF);
  }

 private:
  void* buffer_;
  const int count_;
  const uint64_t bytes_;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  std::vector<std::byte> packed_;
};

}  // namespace nostall::mpi
