// Ragged values of a batch, put together when all of them are there.
#include <algorithm>
#include <cstring>
#include <new>

#include "fields/program.h"

namespace nostall::fields {
namespace {

// Sizes that no memory can have are refused before they wrap around.
uint64_t product(uint64_t a, uint64_t b) {
  uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result) || result > uint64_t{1} << 62) throw std::bad_alloc();
  return result;
}

uint64_t reserve(uint64_t& bytes, uint64_t more) {
  const uint64_t begin =
      (bytes + Program::kAlignment - 1) / Program::kAlignment * Program::kAlignment;
  bytes = begin + more;
  return begin;
}

uint64_t count_of(std::span<const int64_t> shape) {
  uint64_t count = 1;
  for (const int64_t side : shape) count = product(count, static_cast<uint64_t>(side));
  return count;
}

Laid plan(const Output& output, std::span<const Ragged> held, size_t step, uint64_t samples,
          uint64_t& bytes) {
  const size_t dims = output.shape.size();
  const auto n = static_cast<int64_t>(samples);
  Laid laid;
  if (output.form == Form::padded) {
    laid.shape.assign(dims + 1, 0);
    laid.shape[0] = n;
    for (size_t d = 0; d < dims; ++d) {
      // A fixed side is what it is in an empty batch too.
      if (output.shape[d] != kRagged) laid.shape[d + 1] = output.shape[d];
      for (uint64_t i = 0; i < samples; ++i) {
        laid.shape[d + 1] = std::max(laid.shape[d + 1], held[i * step].shape[d]);
      }
    }
    laid.counts_shape = {n};
    if (!output.by_rows()) laid.counts_shape.push_back(static_cast<int64_t>(dims));
  } else {
    int64_t total = 0;
    for (uint64_t i = 0; i < samples; ++i) {
      const Ragged& value = held[i * step];
      total += output.by_rows() ? value.shape[0]
                                : static_cast<int64_t>(value.bytes / size_of(output.type));
    }
    laid.shape = {total};
    if (output.by_rows()) {
      laid.shape.insert(laid.shape.end(), output.shape.begin() + 1, output.shape.end());
    }
    laid.counts_shape = {n + 1};
  }
  laid.values = reserve(bytes, product(count_of(laid.shape), size_of(output.type)));
  laid.counts = reserve(bytes, product(count_of(laid.counts_shape), sizeof(int64_t)));
  if (output.form == Form::ragged && !output.by_rows()) {
    laid.shapes = reserve(bytes, product(samples * dims, sizeof(int64_t)));
  }
  return laid;
}

// Copies a value of shape `from` into the corner of a box of shape `to`, row by row, and zeros
// around it.
void pad(const std::byte* values, std::span<const int64_t> from, std::span<const int64_t> to,
         size_t size, std::byte* out) {
  uint64_t inner = size;  // bytes of one element of the first dimension of the box
  for (size_t d = 1; d < to.size(); ++d) inner *= static_cast<uint64_t>(to[d]);
  const auto rows = static_cast<uint64_t>(from[0]), all = static_cast<uint64_t>(to[0]);
  if (std::equal(from.begin() + 1, from.end(), to.begin() + 1)) {
    if (rows * inner != 0) std::memcpy(out, values, rows * inner);
  } else {
    uint64_t row = size;
    for (size_t d = 1; d < from.size(); ++d) row *= static_cast<uint64_t>(from[d]);
    for (uint64_t r = 0; r < rows; ++r) {
      pad(values + r * row, from.subspan(1), to.subspan(1), size, out + r * inner);
    }
  }
  if (all > rows) std::memset(out + rows * inner, 0, (all - rows) * inner);
}

}  // namespace

std::vector<Laid> Program::plan_tail(std::span<const Ragged> held, uint64_t samples,
                                     uint64_t& bytes) const {
  std::vector<Laid> laid;
  bytes = 0;
  for (const Output& output : outputs_) {
    if (output.form == Form::dense) continue;
    laid.push_back(
        plan(output, held.subspan(samples == 0 ? 0 : laid.size()), ragged_, samples, bytes));
  }
  return laid;
}

Program::Padding Program::padding(std::span<const Ragged> held, uint64_t samples,
                                  std::span<const Laid> laid) const {
  Padding all;
  uint64_t most = 0;
  size_t number = 0;
  for (const Output& output : outputs_) {
    if (output.form == Form::dense) continue;
    const size_t at = number++;
    if (output.form != Form::padded || samples == 0) continue;
    uint64_t zeros = count_of(laid[at].shape) * size_of(output.type);
    int64_t longest = 0;
    uint64_t widest = 0;
    for (uint64_t i = 0; i < samples; ++i) {
      const Ragged& value = held[i * ragged_ + at];
      zeros -= value.bytes;
      for (size_t d = 0; d < output.shape.size(); ++d) {
        if (output.shape[d] != kRagged || value.shape[d] <= longest) continue;
        longest = value.shape[d];
        widest = i;
      }
    }
    all.bytes += zeros;
    if (zeros <= most) continue;
    most = zeros;
    all.sample = widest;
    all.field = output.name;
    all.shape.clear();
    for (size_t d = 0; d < output.shape.size(); ++d) {
      all.shape += (d == 0 ? "" : " x ") + std::to_string(held[widest * ragged_ + at].shape[d]);
    }
  }
  return all;
}

void Program::lay_tail(std::span<const Ragged> held, uint64_t samples, std::span<const Laid> laid,
                       std::byte* tail) const {
  size_t number = 0;
  for (const Output& output : outputs_) {
    if (output.form == Form::dense) continue;
    const Laid& at = laid[number];
    const size_t dims = output.shape.size();
    std::byte* values = tail + at.values;
    auto* counts = reinterpret_cast<int64_t*>(tail + at.counts);
    auto* shapes = reinterpret_cast<int64_t*>(tail + at.shapes);
    const std::span<const int64_t> box = std::span(at.shape).subspan(1);
    int64_t offset = 0;
    if (output.form == Form::ragged) *counts++ = 0;
    for (uint64_t i = 0; i < samples; ++i) {
      const Ragged& value = held[i * ragged_ + number];
      if (output.form == Form::padded) {
        pad(value.values, {value.shape.data(), dims}, box, size_of(output.type), values);
        values += count_of(box) * size_of(output.type);
        if (output.by_rows()) {
          *counts++ = value.shape[0];
        } else {
          counts = std::copy_n(value.shape.data(), dims, counts);
        }
        continue;
      }
      if (value.bytes != 0) std::memcpy(values, value.values, value.bytes);
      values += value.bytes;
      offset += output.by_rows() ? value.shape[0]
                                 : static_cast<int64_t>(value.bytes / size_of(output.type));
      *counts++ = offset;
      if (!output.by_rows()) shapes = std::copy_n(value.shape.data(), dims, shapes);
    }
    ++number;
  }
}

}  // namespace nostall::fields
