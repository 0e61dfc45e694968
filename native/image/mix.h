// image/mix.h - MixUp and CutMix of the images of a finished batch, in place.
//
// Image i is mixed with the one `shift` places before it, around the end of the batch: torch's
// roll(shift, 0). A block of one image is all that is ever held twice.
// Draws belong to (seed, epoch, global batch), so that all ranks mix alike; docs/formats/order.md
// has them, golden in tests/python/loader/test_mixing.py. Thread-safety: functions of their
// arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "image/draw.h"
#include "image/pipeline.h"

namespace nostall::image {

struct Mixer {
  enum class Kind : uint8_t { mixup, cutmix };
  Kind kind = Kind::mixup;
  double alpha = 1;   // both parameters of the Beta distribution of lam
  double weight = 1;  // how often it is chosen, beside the weights of the others
};

struct Mixing {
  std::vector<Mixer> mixers;  // of which each batch gets one
  double p = 1;               // that a batch is mixed at all
  uint32_t classes = 0;       // columns of the targets; 0: there are none
  uint32_t shift = 1;
};

// What one batch gets: lam of every image itself, 1 - lam of its partner.
struct Mixture {
  enum class Kind : uint8_t { none, mixup, cutmix };
  Kind kind = Kind::none;
  double lam = 1;  // of the labels; a number that float32 holds
  Box box;         // cutmix: what comes from the partner
};

// Throws Error(usage) if it cannot be.
void validate(const Mixing& mixing);

Mixture draw_mixture(const Mixing& mixing, int64_t width, int64_t height, uint64_t seed,
                     uint32_t epoch, uint64_t batch);

// Mixes `samples` images of `output`, one behind the other.
void mix_images(const Mixture& mixture, uint32_t shift, const Output& output, std::byte* images,
                uint64_t samples);

// The probability of each class for each image, (labels.size(), classes). Every label must be a
// class.
void mix_labels(const Mixture& mixture, uint32_t shift, std::span<const int64_t> labels,
                uint32_t classes, float* targets);

}  // namespace nostall::image
