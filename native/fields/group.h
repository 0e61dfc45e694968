// fields/group.h - private to the room: fields that are transformed as one.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "fields/program.h"

namespace nostall::fields {

// The bytes of a field, or what stands for them; an Error that names it if they are missing.
Result<std::span<const std::byte>> bytes_of(const Field& field,
                                            std::span<const source::FieldBytes> located);
Error failed(const Field& field, const std::string& what, ErrorKind kind = ErrorKind::corruption);
// A mask's type as the pipeline has it; absent if it has none such.
std::optional<image::MaskType> image_type_of(Type type) noexcept;
// The pipeline of the group that a field may belong to; null if it belongs to none.
std::shared_ptr<const image::Pipeline> pipeline_of(const Field& field);

}  // namespace nostall::fields
