// The codecs of fields: any bytes give values of the shape that is said, or an Error.
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "fields/program.h"

namespace {

using namespace nostall::fields;

class Heap : public Holder {
 public:
  std::byte* take(size_t bytes) override {
    taken_.push_back(std::make_unique<std::byte[]>(bytes));
    return taken_.back().get();
  }
  void clear() { taken_.clear(); }

 private:
  std::vector<std::unique_ptr<std::byte[]>> taken_;
};

template <typename Kind>
Field field(Kind kind, bool padded) {
  Field f;
  f.kind = std::move(kind);
  f.padded = padded;
  return f;
}

const Program& program_of(unsigned choice) {
  static const std::vector<Program> programs = [] {
    std::vector<Program> made;
    for (const bool padded : {false, true}) {
      Mask mask;
      mask.max_pixels = 1 << 20;
      Array boxes{Type::float32, {kRagged, 4}};
      boxes.meaning = Array::Meaning::xyxy;
      made.push_back(Program::compile({field(Text{}, padded)}));
      made.push_back(Program::compile({field(Text{true}, padded)}));
      made.push_back(Program::compile({field(Audio{}, padded)}));
      made.push_back(Program::compile({field(mask, padded)}));
      made.push_back(Program::compile({field(boxes, padded)}));
      made.push_back(Program::compile(
          {field(Array{Type::float32, {kRagged, kRagged}, Array::Codec::npy}, padded)}));
      made.push_back(
          Program::compile({field(Scalar{Type::float16, Scalar::Codec::decimal, {}}, padded)}));
      made.push_back(Program::compile(
          {field(Scalar{Type::int32, Scalar::Codec::raw, Type::float64}, padded)}));
      made.push_back(Program::compile(
          {field(Array{Type::float32, {kRagged, kRagged}, Array::Codec::msgpack}, padded)}));
      made.push_back(Program::compile(
          {field(Array{Type::int16, {kRagged, 2}, Array::Codec::varint}, padded)}));
      made.push_back(
          Program::compile({field(Scalar{Type::uint8, Scalar::Codec::msgpack, {}}, padded)}));
    }
    return made;
  }();
  return programs[choice % programs.size()];
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const Program& program = program_of(data[0]);
  static Scratch scratch;
  static Heap heap;
  heap.clear();
  // The same bytes twice, the second time cut in half: a batch of different sizes.
  const std::span<const std::byte> all(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  std::vector<std::byte> slab(program.slab_bytes(2));
  std::array<Ragged, 2> held{};
  for (uint64_t i = 0; i < 2; ++i) {
    const nostall::source::FieldBytes located{all.first(i == 0 ? all.size() : all.size() / 2),
                                              true};
    const Place place{slab.data(), 2, i, std::span(held).subspan(i, program.ragged()), &heap};
    if (!program.apply({&located, 1}, {}, scratch, place)) return 0;
  }
  if (program.ragged() == 0) return 0;
  uint64_t bytes = 0;
  const std::vector<Laid> laid = program.plan_tail(held, 2, bytes);
  if (bytes > uint64_t{1} << 28) return 0;
  std::vector<std::byte> tail(bytes);
  program.lay_tail(held, 2, laid, tail.data());
  return 0;
}
