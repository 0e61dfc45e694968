// Any bytes go through every kind of geometry without harm; the last byte picks the draws.
#include "image/pipeline.h"

namespace {

using namespace nostall::image;

std::vector<Pipeline> pipelines() {
  Options options;
  options.max_pixels = 1 << 18;
  std::vector<Pipeline> all;
  const Step training[] = {RandomResizedCrop{32, 24, {0.01, 1.0}}, RandomHorizontalFlip{},
                           ToTensor{}, Normalize{}};
  const Step validation[] = {Resize{40, 0}, CenterCrop{48, 30}, RandomVerticalFlip{}};
  const Step twice[] = {Resize{20, 0}, RandomResizedCrop{9, 33}, Resize{17, 13}};
  all.push_back(Pipeline::compile(training, options));
  all.push_back(Pipeline::compile(validation, options));
  all.push_back(Pipeline::compile(twice, options));
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<Pipeline> all = pipelines();
  static Scratch scratch;
  static std::vector<std::byte> out;
  if (size == 0) return 0;
  for (const Pipeline& pipeline : all) {
    out.resize(pipeline.output().bytes());
    const auto result =
        pipeline.apply(std::as_bytes(std::span(data, size)), {0, 0, data[size - 1]}, scratch, out);
    static_cast<void>(static_cast<bool>(result));
  }
  return 0;
}
