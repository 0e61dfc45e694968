// Gathers the images, masks, boxes and keypoints of a group, and applies its pipeline to them.
#include "fields/group.h"

#include <algorithm>
#include <cstring>

#include "fields/decode.h"

namespace nostall::fields {
namespace {

image::BoxFormat format_of(Array::Meaning meaning) {
  if (meaning == Array::Meaning::xywh) return image::BoxFormat::xywh;
  return meaning == Array::Meaning::cxcywh ? image::BoxFormat::cxcywh : image::BoxFormat::xyxy;
}

// Rows of floating-point numbers in memory that is aligned.
Result<ArrayValues> take_rows(const Array& array, std::span<const std::byte> bytes,
                              Scratch::Rows& rows) {
  auto read = read_array(array, bytes);
  if (!read) return read;
  const std::span<const std::byte> values = read.value().values;
  rows.values.resize(values.size() / sizeof(float));
  if (!values.empty()) std::memcpy(rows.values.data(), values.data(), values.size());
  rows.before = static_cast<uint64_t>(read.value().shape[0]);
  rows.kept.resize(rows.before);
  rows.moved = false;
  return read;
}

std::span<float> floats(std::byte* memory, size_t bytes) {
  return {reinterpret_cast<float*>(memory), bytes / sizeof(float)};
}

}  // namespace

Error failed(const Field& field, const std::string& what, ErrorKind kind) {
  return Error(kind, field.name.empty() ? what : "field " + field.name + ": " + what);
}

Result<std::span<const std::byte>> bytes_of(const Field& field,
                                            std::span<const source::FieldBytes> located) {
  if (field.index >= located.size()) {
    return Error(ErrorKind::bug, "field " + field.name + " is none of its source's");
  }
  const source::FieldBytes& bytes = located[field.index];
  if (bytes.present) return bytes.bytes;
  if (field.fill) return std::span<const std::byte>(*field.fill);
  return failed(field, "it is missing; give the schema's field a fill=, or drop it");
}

std::optional<image::MaskType> image_type_of(Type type) noexcept {
  switch (type) {
    case Type::uint8:
      return image::MaskType::uint8;
    case Type::uint16:
      return image::MaskType::uint16;
    case Type::int16:
      return image::MaskType::int16;
    case Type::int32:
      return image::MaskType::int32;
    case Type::int64:
      return image::MaskType::int64;
    case Type::float32:
      return image::MaskType::float32;
    default:
      return std::nullopt;
  }
}

std::shared_ptr<const image::Pipeline> pipeline_of(const Field& field) {
  if (const auto* image = std::get_if<Image>(&field.kind)) return image->pipeline;
  if (const auto* mask = std::get_if<Mask>(&field.kind)) return mask->pipeline;
  if (const auto* array = std::get_if<Array>(&field.kind)) return array->pipeline;
  return nullptr;
}

void Program::find_groups() {
  grouped_.assign(fields_.size(), 0);
  std::vector<Group> found;
  for (size_t i = 0; i < fields_.size(); ++i) {
    const auto pipeline = pipeline_of(fields_[i]);
    if (!pipeline) continue;
    auto group = std::find_if(found.begin(), found.end(),
                              [&](const Group& g) { return g.pipeline == pipeline; });
    if (group == found.end()) group = found.insert(found.end(), Group{pipeline, {}});
    group->fields.push_back(i);
  }
  for (Group& group : found) {
    const bool image = std::any_of(group.fields.begin(), group.fields.end(), [&](size_t i) {
      return std::holds_alternative<Image>(fields_[i].kind);
    });
    if (!image) {
      throw Error(ErrorKind::usage, "field " + fields_[group.fields[0]].name +
                                        ": there is no image that it is transformed with");
    }
    if (group.fields.size() < 2) continue;
    for (const size_t i : group.fields) grouped_[i] = 1;
    groups_.push_back(std::move(group));
  }
  for (const Field& field : fields_) {
    const auto* array = std::get_if<Array>(&field.kind);
    if (array == nullptr || !array->rows_of) continue;
    const size_t boxes = *array->rows_of;
    const auto* of = boxes < fields_.size() ? std::get_if<Array>(&fields_[boxes].kind) : nullptr;
    if (of == nullptr || of->rows_of || outputs_[boxes].form == Form::dense ||
        of->meaning == Array::Meaning::none || of->meaning == Array::Meaning::keypoints) {
      throw Error(ErrorKind::usage, "field " + field.name + ": its rows go with a field of boxes");
    }
  }
}

Result<std::monostate> Program::apply_group(const Group& group,
                                            std::span<const source::FieldBytes> located,
                                            const image::SampleKey& key, Scratch& scratch,
                                            const Place& place) const {
  Scratch::Gathered& parts = scratch.gathered;
  parts.pictures.clear();
  parts.masks.clear();
  parts.boxes.clear();
  parts.keypoints.clear();
  parts.field_of_boxes.clear();
  for (const size_t i : group.fields) {
    const Field& field = fields_[i];
    auto bytes = bytes_of(field, located);
    if (!bytes) return bytes.error();
    const Destination to = destination(i, place);
    if (std::holds_alternative<Image>(field.kind)) {
      parts.pictures.push_back({bytes.value(), to.dense, {}});
      continue;
    }
    if (const auto* mask = std::get_if<Mask>(&field.kind)) {
      parts.masks.push_back({bytes.value(), *image_type_of(mask->type), to.dense, {}});
      continue;
    }
    const Array& array = std::get<Array>(field.kind);
    Scratch::Rows& rows = scratch.rows[i];
    auto read = take_rows(array, bytes.value(), rows);
    if (!read) return failed(field, read.error().what());
    const size_t size = rows.values.size() * sizeof(float);
    std::byte* out = to.begin({read.value().shape.data(), array.shape.size()}, size);
    if (array.meaning == Array::Meaning::keypoints) {
      parts.keypoints.push_back({rows.values, static_cast<uint32_t>(array.shape.back()),
                                 array.normalised, floats(out, size)});
    } else {
      parts.boxes.push_back({rows.values, format_of(array.meaning), array.normalised,
                             floats(out, size), rows.kept, 0});
      parts.field_of_boxes.push_back(i);
    }
  }
  const auto result = group.pipeline->apply_record(
      {parts.pictures, parts.masks, parts.boxes, parts.keypoints}, key, scratch.image);
  if (!result) {
    std::string names;
    for (const size_t i : group.fields) names += (names.empty() ? "" : ", ") + fields_[i].name;
    return Error(result.error().kind(), "fields " + names + ": " + result.error().what());
  }
  for (size_t b = 0; b < parts.boxes.size(); ++b) {
    const size_t i = parts.field_of_boxes[b], count = parts.boxes[b].count;
    Ragged& held = place.ragged[ragged_before(i)];
    held.bytes = count * 4 * sizeof(float);
    held.shape[0] = static_cast<int64_t>(count);
    scratch.rows[i].kept.resize(count);
    scratch.rows[i].moved = true;
  }
  return std::monostate{};
}

}  // namespace nostall::fields
