// fields/images.h - the images of a unit (source/gather.h): decoded to one size, or where they lie.
#pragma once

#include <memory>

#include "fields/program.h"

namespace nostall::fields {

// Each image by the pipeline, with draws of its own: (images, ...).
Custom images_of_units(std::shared_ptr<const image::Pipeline> pipeline);
// The two numbers that come with each image: int64, (images, 2).
Custom places_in_units();

}  // namespace nostall::fields
