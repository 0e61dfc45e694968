// One sample of a program, outside of a run: for what stands in, and to see what a sample is like.
#include "stage/run.h"

namespace nostall::stage {

std::unique_ptr<Batch> unpack_one(const source::Source& source, const fields::Program& program,
                                  std::span<const std::byte> record, const image::SampleKey& key,
                                  fields::Scratch& scratch) {
  const auto pool = std::make_shared<BufferPool>(0);
  auto batch = std::make_unique<Batch>();
  batch->position.epoch = key.epoch;
  batch->samples = {key.sample};
  batch->labels = {source.labels()[key.sample]};
  batch->bytes = program.slab_bytes(1);
  if (batch->bytes > 0) batch->buffer = pool->take(batch->bytes);
  scratch.located.resize(source.fields());
  source.locate(key.sample, record, scratch.located).take();
  std::vector<fields::Ragged> ragged(program.ragged());
  Holding holding(*pool);
  const fields::Place place{batch->buffer ? batch->buffer->data() : nullptr, 1, 0, ragged,
                            &holding};
  program.apply(scratch.located, key, scratch, place).take();
  if (!ragged.empty()) {
    uint64_t bytes = 0;
    batch->laid = program.plan_tail(ragged, 1, bytes);
    batch->tail = pool->take(bytes);
    program.lay_tail(ragged, 1, batch->laid, batch->tail->data());
  }
  return batch;
}

}  // namespace nostall::stage
