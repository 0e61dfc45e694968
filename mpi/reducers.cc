// MPI's types and operations in terms of ours. What we have no kernel for (a user's operation,
// MINLOC, Fortran's logicals) is computed by the MPI itself, MPI_Reduce_local. A predefined operation
// on a type for which the standard has none is left to the MPI, which refuses it or has more.
#include "reducers.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"

namespace nostall::mpi {
namespace {

using collective::DataType;
using collective::Op;

// Handles are not constant expressions in every MPI. The tables of them have no destructors, behind which
// the program's exit handlers may call MPI.

template <typename T>
constexpr DataType integer() {
  constexpr bool is_signed = static_cast<T>(-1) < T{};
  switch (sizeof(T)) {
    case 1:
      return is_signed ? DataType::int8 : DataType::uint8;
    case 2:
      return is_signed ? DataType::int16 : DataType::uint16;
    case 4:
      return is_signed ? DataType::int32 : DataType::uint32;
    default:
      return is_signed ? DataType::int64 : DataType::uint64;
  }
}

// Fortran's compiler decides how large its types are.
std::optional<DataType> fortran_type_of(MPI_Datatype type) {
  enum class Kind : uint8_t { integer, real, complex };
  static const auto& known =
      *new std::vector<std::pair<MPI_Datatype, Kind>>{{MPI_INTEGER, Kind::integer},
                                                      {MPI_INTEGER1, Kind::integer},
                                                      {MPI_INTEGER2, Kind::integer},
                                                      {MPI_INTEGER4, Kind::integer},
                                                      {MPI_INTEGER8, Kind::integer},
                                                      {MPI_REAL, Kind::real},
                                                      {MPI_REAL4, Kind::real},
                                                      {MPI_REAL8, Kind::real},
                                                      {MPI_DOUBLE_PRECISION, Kind::real},
                                                      {MPI_COMPLEX, Kind::complex},
                                                      {MPI_COMPLEX8, Kind::complex},
                                                      {MPI_COMPLEX16, Kind::complex},
                                                      {MPI_DOUBLE_COMPLEX, Kind::complex}};
  if (type == MPI_DATATYPE_NULL) return std::nullopt;
  for (const auto& [theirs, kind] : known) {
    int bytes = 0;
    if (theirs != type || PMPI_Type_size(type, &bytes) != MPI_SUCCESS) continue;
    switch (kind) {
      case Kind::integer:
        if (bytes == 1) return DataType::int8;
        if (bytes == 2) return DataType::int16;
        if (bytes == 4) return DataType::int32;
        if (bytes == 8) return DataType::int64;
        break;
      case Kind::real:
        if (bytes == 4) return DataType::float32;
        if (bytes == 8) return DataType::float64;
        break;
      case Kind::complex:
        if (bytes == 8) return DataType::complex64;
        if (bytes == 16) return DataType::complex128;
        break;
    }
  }
  return std::nullopt;
}

std::optional<DataType> type_of(MPI_Datatype type) {
  static const auto& known = *new std::vector<std::pair<MPI_Datatype, DataType>>{
      {MPI_FLOAT, DataType::float32},
      {MPI_DOUBLE, DataType::float64},
      {MPI_INT, integer<int>()},
      {MPI_LONG, integer<long>()},
      {MPI_UNSIGNED, integer<unsigned>()},
      {MPI_UNSIGNED_LONG, integer<unsigned long>()},
      {MPI_LONG_LONG, integer<long long>()},
      {MPI_UNSIGNED_LONG_LONG, integer<unsigned long long>()},
      {MPI_SHORT, integer<short>()},
      {MPI_UNSIGNED_SHORT, integer<unsigned short>()},
      {MPI_SIGNED_CHAR, DataType::int8},
      {MPI_UNSIGNED_CHAR, DataType::uint8},
      {MPI_INT8_T, DataType::int8},
      {MPI_INT16_T, DataType::int16},
      {MPI_INT32_T, DataType::int32},
      {MPI_INT64_T, DataType::int64},
      {MPI_UINT8_T, DataType::uint8},
      {MPI_UINT16_T, DataType::uint16},
      {MPI_UINT32_T, DataType::uint32},
      {MPI_UINT64_T, DataType::uint64},
      {MPI_AINT, integer<MPI_Aint>()},
      {MPI_OFFSET, integer<MPI_Offset>()},
      {MPI_COUNT, integer<MPI_Count>()},
      {MPI_C_FLOAT_COMPLEX, DataType::complex64},
      {MPI_C_DOUBLE_COMPLEX, DataType::complex128}};
  for (const auto& [theirs, ours] : known) {
    if (theirs == type) return ours;
  }
  return fortran_type_of(type);
}

std::optional<Op> op_of(MPI_Op op) {
  static const auto& known = *new std::vector<std::pair<MPI_Op, Op>>{
      {MPI_SUM, Op::sum},   {MPI_PROD, Op::prod}, {MPI_MIN, Op::min},   {MPI_MAX, Op::max},
      {MPI_LAND, Op::land}, {MPI_LOR, Op::lor},   {MPI_LXOR, Op::lxor}, {MPI_BAND, Op::band},
      {MPI_BOR, Op::bor},   {MPI_BXOR, Op::bxor}};
  for (const auto& [theirs, ours] : known) {
    if (theirs == op) return ours;
  }
  return std::nullopt;
}

// Of the types that we have, those of C's integers: logical operations have no others but logicals.
bool is_logical_operand(MPI_Datatype type, DataType ours) {
  static const auto& others = *new std::vector<MPI_Datatype>{MPI_AINT, MPI_OFFSET, MPI_COUNT};
  const bool integer = ours >= DataType::int8 && ours <= DataType::uint64;
  return integer && !fortran_type_of(type) &&
         std::find(others.begin(), others.end(), type) == others.end();
}

bool is_predefined_operation(MPI_Op op) {
  return op_of(op) || op == MPI_MINLOC || op == MPI_MAXLOC || op == MPI_REPLACE ||
         op == MPI_NO_OP || op == MPI_OP_NULL;
}

// Whether the standard has a predefined operation for a type of which we have no kernel.
bool is_in_standard(MPI_Op op, MPI_Datatype type) {
  struct Defined {
    std::vector<MPI_Op> operations;
    std::vector<MPI_Datatype> types;
  };
  static const auto& all = *new std::vector<Defined>{
      {{MPI_MINLOC, MPI_MAXLOC},
       {MPI_2INT, MPI_FLOAT_INT, MPI_2INTEGER, MPI_2REAL, MPI_2DOUBLE_PRECISION}},
      {{MPI_LAND, MPI_LOR, MPI_LXOR}, {MPI_C_BOOL, MPI_CXX_BOOL, MPI_LOGICAL}},
      {{MPI_BAND, MPI_BOR, MPI_BXOR}, {MPI_BYTE}},
      {{MPI_SUM, MPI_PROD}, {MPI_LONG_DOUBLE, MPI_C_LONG_DOUBLE_COMPLEX}},
      {{MPI_MIN, MPI_MAX}, {MPI_LONG_DOUBLE}}};
  const auto has = [](const auto& list, auto handle) {
    return std::find(list.begin(), list.end(), handle) != list.end();
  };
  return std::any_of(all.begin(), all.end(), [&](const Defined& each) {
    return has(each.operations, op) && has(each.types, type);
  });
}

bool is_predefined(int constructor) {
  return constructor == MPI_COMBINER_NAMED || constructor == MPI_COMBINER_F90_REAL ||
         constructor == MPI_COMBINER_F90_COMPLEX || constructor == MPI_COMBINER_F90_INTEGER;
}

bool keeps_order(int constructor) {
  return constructor == MPI_COMBINER_CONTIGUOUS || constructor == MPI_COMBINER_DUP;
}

// How a type was made; from `inner`, which is to be freed unless predefined, if that keeps its order.
int constructor_of(MPI_Datatype type, MPI_Datatype* inner) {
  int made = MPI_UNDEFINED, integer = 0;
  MPI_Aint address = 0;
#if MPI_VERSION >= 4
  MPI_Count integers = 0, addresses = 0, counts = 0, types = 0, count = 0;
  PMPI_Type_get_envelope_c(type, &integers, &addresses, &counts, &types, &made);
  if (!keeps_order(made)) return made;
  PMPI_Type_get_contents_c(type, integers, addresses, counts, types, &integer, &address, &count,
                           inner);
#else
  int integers = 0, addresses = 0, types = 0;
  PMPI_Type_get_envelope(type, &integers, &addresses, &types, &made);
  if (!keeps_order(made)) return made;
  PMPI_Type_get_contents(type, integers, addresses, types, &integer, &address, inner);
#endif
  return made;
}

}  // namespace

bool has_no_gaps(MPI_Datatype type, uint64_t* element_bytes) {
  int size = 0;
  MPI_Aint low = 0, extent = 0, true_low = 0, true_extent = 0;
  if (type == MPI_DATATYPE_NULL || PMPI_Type_size(type, &size) != MPI_SUCCESS || size <= 0 ||
      PMPI_Type_get_extent(type, &low, &extent) != MPI_SUCCESS ||
      PMPI_Type_get_true_extent(type, &true_low, &true_extent) != MPI_SUCCESS) {
    return false;
  }
  *element_bytes = static_cast<uint64_t>(size);
  return low == 0 && true_low == 0 && extent == size && true_extent == size;
}

bool is_contiguous(MPI_Datatype type) {
  uint64_t element = 0;
  if (!has_no_gaps(type, &element)) return false;
  for (bool owned = false;; owned = true) {
    MPI_Datatype inner = MPI_DATATYPE_NULL;
    const int made = constructor_of(type, &inner);
    if (owned && !is_predefined(made)) PMPI_Type_free(&type);
    if (!keeps_order(made)) return is_predefined(made);
    type = inner;
  }
}

const MpiReducer* MpiReducer::find(MPI_Datatype type, MPI_Op op) {
  // What is predefined stays what it is; other handles may be freed and used again.
  thread_local MPI_Datatype last_type = MPI_DATATYPE_NULL;
  thread_local MPI_Op last_op = MPI_OP_NULL;
  thread_local std::optional<MpiReducer> found;
  if (found && !found->operation_ && type == last_type && op == last_op) return &*found;
  found = make(type, op);
  last_type = type;
  last_op = op;
  return found ? &*found : nullptr;
}

std::optional<MpiReducer> MpiReducer::make(MPI_Datatype type, MPI_Op op) {
  MpiReducer result;
  const auto ours = type_of(type);
  const auto operation = op_of(op);
  const bool is_logical = operation == Op::land || operation == Op::lor || operation == Op::lxor;
  if (ours && operation && collective::is_defined(*operation, *ours) &&
      (!is_logical || is_logical_operand(type, *ours))) {
    result.reducer_.emplace(*operation, *ours);
    return result;
  }
  uint64_t element = 0;
  int commutes = 0;
  if ((is_predefined_operation(op) && !is_in_standard(op, type)) || !has_no_gaps(type, &element) ||
      element > 4096 || PMPI_Op_commutative(op, &commutes) != MPI_SUCCESS) {
    return std::nullopt;
  }
  result.operation_ = std::make_shared<Operation>(Operation{type, op});
  const auto combine = [](const void* in, void* inout, uint64_t count, void* context) {
    const auto* self = static_cast<const Operation*>(context);
    const int code = PMPI_Reduce_local(in, inout, static_cast<int>(count), self->type, self->op);
    if (code == MPI_SUCCESS) return;
    int error_class = MPI_ERR_OP;
    PMPI_Error_class(code, &error_class);
    throw Error(ErrorKind::peer, "the MPI's MPI_Reduce_local refused an operation", error_class);
  };
  result.reducer_.emplace(combine, result.operation_.get(), element, commutes != 0);
  return result;
}

}  // namespace nostall::mpi
