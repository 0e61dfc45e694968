// The reader of timelines must take any bytes, cut anywhere: the same operations whichever way the
// stream is cut, or an error.
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "timeline/horovod.h"
#include "timeline/scanner.h"

namespace {

struct Outcome {
  uint64_t events = 0;
  uint64_t damaged_bytes = 0;
  int64_t cut_off = -1;
  nostall::timeline::Operations operations;
};

Outcome read(std::string_view text, size_t piece) {
  nostall::timeline::HorovodAssembler assembler;
  nostall::timeline::Scanner scanner([&](const nostall::timeline::Event& event, uint64_t offset) {
    assembler.add(event, offset);
  });
  for (size_t at = 0; at < text.size(); at += piece) scanner.feed(text.substr(at, piece));
  scanner.finish();
  assembler.finish();
  return {scanner.report().events, scanner.report().damaged_bytes, scanner.report().cut_off,
          assembler.take()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const Outcome whole = read(text, size + 1);
  const Outcome pieces = read(text, 1 + size % 61);
  const bool same = whole.events == pieces.events && whole.cut_off == pieces.cut_off &&
                    whole.damaged_bytes == pieces.damaged_bytes &&
                    whole.operations.rows.size() == pieces.operations.rows.size() &&
                    whole.operations.tick_time == pieces.operations.tick_time;
  if (!same) std::abort();
  size_t ticks = 0;
  for (const auto& row : whole.operations.rows) ticks += row.ticks;
  if (ticks != whole.operations.tick_rank.size()) std::abort();
  return 0;
}
