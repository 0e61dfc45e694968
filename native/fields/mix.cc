// The batch step of a program: images of the slab mixed in place, and the targets behind them.
#include <algorithm>
#include <cstring>

#include "fields/group.h"
#include "fields/program.h"

namespace nostall::fields {
namespace {

template <typename T>
void widen(const std::byte* from, std::span<int64_t> to) {
  for (size_t i = 0; i < to.size(); ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    to[i] = static_cast<int64_t>(value);
  }
}

// False if they are no integers.
bool labels_of(Type type, const std::byte* from, std::span<int64_t> to) {
  switch (type) {
    case Type::uint8:
      return widen<uint8_t>(from, to), true;
    case Type::uint16:
      return widen<uint16_t>(from, to), true;
    case Type::uint32:
      return widen<uint32_t>(from, to), true;
    case Type::uint64:  // what int64 cannot hold becomes negative: no class
      return widen<uint64_t>(from, to), true;
    case Type::int8:
      return widen<int8_t>(from, to), true;
    case Type::int16:
      return widen<int16_t>(from, to), true;
    case Type::int32:
      return widen<int32_t>(from, to), true;
    case Type::int64:
      return widen<int64_t>(from, to), true;
    default:
      return false;
  }
}

}  // namespace

void Program::check_mix() {
  if (!mix_) return;
  image::validate(mix_->mixing);
  for (const uint32_t i : mix_->images) {
    const auto* picture = i < fields_.size() ? std::get_if<Image>(&fields_[i].kind) : nullptr;
    if (picture == nullptr || picture->pipeline != pipeline_of(fields_[mix_->images[0]])) {
      throw Error(ErrorKind::usage, "only images that are transformed together are mixed");
    }
  }
  if (mix_->images.empty()) throw Error(ErrorKind::usage, "there is no image to mix");
  if (const auto labels = mix_->labels) {
    if (*labels >= fields_.size() || !std::holds_alternative<Scalar>(fields_[*labels].kind) ||
        !labels_of(outputs_[*labels].type, nullptr, {})) {
      throw Error(ErrorKind::usage, "the labels of what is mixed are a field of integers");
    }
  }
  const int64_t classes = mix_->mixing.classes;
  if (classes > 0) outputs_.push_back({"targets", Type::float32, {classes}, Form::dense});
}

Result<image::Mixture> Program::mix(std::byte* slab, std::span<const int64_t> labels, uint64_t seed,
                                    uint32_t epoch, uint64_t batch,
                                    const std::function<std::string(size_t)>& describe) const {
  const image::Mixing& mixing = mix_->mixing;
  const image::Output& images = pipeline_of(fields_[mix_->images[0]])->output();
  const auto mixture = image::draw_mixture(mixing, images.width, images.height, seed, epoch, batch);
  const size_t n = labels.size();
  if (n == 0) return mixture;
  if (mixing.classes > 0) {
    std::vector<int64_t> own(labels.begin(), labels.end());
    if (mix_->labels) {
      labels_of(outputs_[*mix_->labels].type, slab + region(*mix_->labels, n), own);
    }
    for (size_t i = 0; i < n; ++i) {
      if (own[i] >= 0 && own[i] < mixing.classes) continue;
      return Error(ErrorKind::usage,
                   describe(i) + " has the label " + std::to_string(own[i]) +
                       ", which is not below num_classes=" + std::to_string(mixing.classes));
    }
    auto* targets = reinterpret_cast<float*>(slab + region(fields_.size(), n));
    image::mix_labels(mixture, mixing.shift, own, mixing.classes, targets);
  }
  if (mix_->draws_only) return mixture;
  for (const uint32_t i : mix_->images) {
    image::mix_images(mixture, mixing.shift, images, slab + region(i, n), n);
  }
  return mixture;
}

}  // namespace nostall::fields
