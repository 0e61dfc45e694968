// Decoders of gathered records.
#include "fields/images.h"

#include <string>
#include <utility>

#include "source/gather.h"

namespace nostall::fields {
namespace {

class Images : public Decoder {
 public:
  explicit Images(std::shared_ptr<const image::Pipeline> pipeline)
      : pipeline_(std::move(pipeline)) {}

  Result<std::monostate> decode(std::span<const std::byte> stored, uint64_t draw,
                                image::Scratch& scratch, const Take& take) const override {
    auto view = source::GatheredView::of(stored);
    if (!view) return view.error();
    const image::Output& o = pipeline_->output();
    const size_t each = o.bytes();
    std::vector<std::byte> values(view.value().size() * each);
    for (uint32_t i = 0; i < view.value().size(); ++i) {
      const auto image = view.value().next();
      const auto good = pipeline_->apply(image.record, {draw, 0, i}, scratch,
                                         std::span(values).subspan(i * each, each));
      if (!good) {
        return Error(good.error().kind(),
                     "its image " + std::to_string(i) + ": " + good.error().what());
      }
    }
    const int64_t h = o.height, w = o.width, n = view.value().size();
    const std::array<int64_t, 4> shape = o.layout == image::Layout::chw
                                             ? std::array<int64_t, 4>{n, 3, h, w}
                                             : std::array<int64_t, 4>{n, h, w, 3};
    return take(shape, values);
  }

 private:
  std::shared_ptr<const image::Pipeline> pipeline_;
};

class Places : public Decoder {
 public:
  Result<std::monostate> decode(std::span<const std::byte> stored, uint64_t, image::Scratch&,
                                const Take& take) const override {
    auto view = source::GatheredView::of(stored);
    if (!view) return view.error();
    std::vector<int64_t> values;
    for (uint32_t i = 0; i < view.value().size(); ++i) {
      const auto image = view.value().next();
      values.push_back(image.first);
      values.push_back(image.second);
    }
    const std::array<int64_t, 2> shape{view.value().size(), 2};
    return take(shape, std::as_bytes(std::span(values)));
  }
};

}  // namespace

Custom images_of_units(std::shared_ptr<const image::Pipeline> pipeline) {
  const image::Output& o = pipeline->output();
  const int64_t h = o.height, w = o.width;
  Custom custom;
  custom.type = type_of(o.type);
  custom.shape = o.layout == image::Layout::chw ? std::vector<int64_t>{kRagged, 3, h, w}
                                                : std::vector<int64_t>{kRagged, h, w, 3};
  custom.decoder = std::make_shared<const Images>(std::move(pipeline));
  return custom;
}

Custom places_in_units() { return {Type::int64, {kRagged, 2}, std::make_shared<const Places>()}; }

}  // namespace nostall::fields
