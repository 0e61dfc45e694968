// Crops, resizes, flips and borders of a mask only choose rows and columns: they are collected in
// two tables, and the values are read once, before a warp and at the end.
#include "image/mask.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "image/decode.h"
#include "image/labels.h"
#include "image/stages.h"
#include "image/warp.h"

namespace nostall::image {
namespace {

// Of one side of a mask on its way: what a thread keeps for its tables stays small.
constexpr int64_t kLongest = int64_t{1} << 20;

class Mover {
 public:
  Mover(const MaskValues& values, uint64_t max_pixels, MaskBuffers& buffers)
      : now_(values), max_pixels_(max_pixels), b_(buffers) {
    start();
  }

  // Each says whether it could be done.
  bool operator()(const Crop& action) {
    if (action.box.width > kLongest || action.box.height > kLongest) return false;
    ++fills_;
    const int64_t filled = -(fills_ * 65536 + action.fill.mask);
    crop(b_.columns, action.box.x, action.box.width, filled);
    crop(b_.rows, action.box.y, action.box.height, filled);
    return true;
  }
  bool operator()(const Scale& action) {
    if (action.width > kLongest || action.height > kLongest) return false;
    const Interpolation how = action.interpolation == Interpolation::nearest_exact
                                  ? Interpolation::nearest_exact
                                  : Interpolation::nearest;
    const auto take = [&](std::vector<int64_t>& table, int64_t size) {
      pick(table, size, [&](int64_t i) { return nearest(how, i, length(table), size); });
    };
    take(b_.columns, action.width);
    take(b_.rows, action.height);
    return true;
  }
  bool operator()(const Mirror& action) {
    auto& table = action.vertical ? b_.rows : b_.columns;
    std::reverse(table.begin(), table.end());
    return true;
  }
  bool operator()(const Border& action) {
    if (width() + action.left + action.right > kLongest ||
        height() + action.top + action.bottom > kLongest) {
      return false;
    }
    const auto grow = [&](std::vector<int64_t>& table, int64_t before, int64_t after) {
      const int64_t size = length(table);
      pick(table, before + size + after,
           [&](int64_t i) { return inside(action.mode, i - before, size); });
    };
    grow(b_.columns, action.left, action.right);
    grow(b_.rows, action.top, action.bottom);
    return true;
  }
  bool operator()(const Warp& action) {
    const uint64_t size = static_cast<uint64_t>(length(b_.columns)) * b_.rows.size();
    if (size > max_pixels_) return false;
    // The values of an earlier warp are in moved[1]: all are read before it is written.
    uint16_t* from = reserve(b_.moved[0], size);
    read([&](int64_t i, uint16_t value) { from[i] = value; });
    uint16_t* to = reserve(b_.moved[1], size);
    warp_values(action, from, to, length(b_.columns), length(b_.rows));
    now_ = {to, length(b_.columns), length(b_.rows)};
    start();
    return true;
  }
  template <typename Other>
  bool operator()(const Other&) {
    return true;
  }

  // Calls put(index, value) for each value of the result.
  template <typename Put>
  void read(const Put& put) const {
    int64_t i = 0;
    for (const int64_t row : b_.rows) {
      for (const int64_t column : b_.columns) {
        // The later of two fills is the smaller number.
        const int64_t low = std::min(row, column);
        put(i++, low < 0 ? static_cast<uint16_t>(-low) : now_.values[row * now_.width + column]);
      }
    }
  }
  int64_t width() const { return length(b_.columns); }
  int64_t height() const { return length(b_.rows); }

 private:
  static int64_t length(const std::vector<int64_t>& table) {
    return static_cast<int64_t>(table.size());
  }
  static uint16_t* reserve(Buffer& buffer, uint64_t values) {
    return reinterpret_cast<uint16_t*>(buffer.reserve(values * 2));
  }

  void start() {
    b_.columns.resize(static_cast<size_t>(now_.width));
    b_.rows.resize(static_cast<size_t>(now_.height));
    std::iota(b_.columns.begin(), b_.columns.end(), 0);
    std::iota(b_.rows.begin(), b_.rows.end(), 0);
  }

  // Replaces the table by `size` of its entries.
  template <typename At>
  void pick(std::vector<int64_t>& table, int64_t size, const At& at) {
    b_.other.resize(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) {
      b_.other[static_cast<size_t>(i)] = table[static_cast<size_t>(at(i))];
    }
    table.swap(b_.other);
  }

  void crop(std::vector<int64_t>& table, int64_t begin, int64_t size, int64_t filled) {
    b_.other.assign(static_cast<size_t>(size), filled);
    const int64_t low = std::max<int64_t>(0, -begin);
    const int64_t high = std::min(size, length(table) - begin);
    for (int64_t i = low; i < high; ++i) {
      b_.other[static_cast<size_t>(i)] = table[static_cast<size_t>(begin + i)];
    }
    table.swap(b_.other);
  }

  MaskValues now_;
  uint64_t max_pixels_;
  MaskBuffers& b_;
  int64_t fills_ = 0;
};

template <typename T>
bool store(const Mover& mover, std::span<std::byte> out, uint16_t& refused) {
  bool holds = true;
  std::byte* to = out.data();
  mover.read([&](int64_t i, uint16_t value) {
    if (int64_t{value} > static_cast<int64_t>(std::numeric_limits<T>::max())) {
      refused = value;
      holds = false;
    }
    const T converted = static_cast<T>(value);
    std::memcpy(to + static_cast<size_t>(i) * sizeof(T), &converted, sizeof(T));
  });
  return holds;
}

bool store(const Mover& mover, MaskType type, std::span<std::byte> out, uint16_t& refused) {
  switch (type) {
    case MaskType::uint8:
      return store<uint8_t>(mover, out, refused);
    case MaskType::uint16:
      return store<uint16_t>(mover, out, refused);
    case MaskType::int16:
      return store<int16_t>(mover, out, refused);
    case MaskType::int32:
      return store<int32_t>(mover, out, refused);
    case MaskType::int64:
      return store<int64_t>(mover, out, refused);
    default:
      mover.read([&](int64_t i, uint16_t value) {
        const float converted = value;
        std::memcpy(out.data() + static_cast<size_t>(i) * 4, &converted, 4);
      });
      return true;
  }
}

}  // namespace

size_t size_of(MaskType type) noexcept {
  constexpr size_t kSizes[] = {1, 2, 2, 4, 8, 4};
  return kSizes[static_cast<size_t>(type)];
}

Result<MaskValues> decode_mask(const Mask& mask, uint64_t max_pixels, MaskBuffers& buffers) {
  Labels labels;
  if (mask.pixels) {
    const auto [height, width, bytes] = *mask.pixels;
    if (auto error = refuse_size("mask", width, height, max_pixels)) return *error;
    if ((bytes != 1 && bytes != 2) || mask.encoded.size() != size_t{height} * width * bytes) {
      return Error(ErrorKind::corruption, std::to_string(mask.encoded.size()) +
                                              " bytes are not a mask of " + std::to_string(height) +
                                              "x" + std::to_string(width) + " values of " +
                                              std::to_string(bytes) + " bytes (1 or 2)");
    }
    labels = {width, height, bytes == 2, mask.encoded.data()};
  } else {
    const auto decoded = decode_labels(mask.encoded, max_pixels, buffers.encoded);
    if (!decoded) return decoded.error();
    labels = decoded.value();
  }
  const size_t values = static_cast<size_t>(labels.width * labels.height);
  auto* to = reinterpret_cast<uint16_t*>(buffers.decoded.reserve(values * 2));
  if (labels.wide) {
    std::memcpy(to, labels.values, values * 2);
  } else {
    for (size_t i = 0; i < values; ++i) to[i] = static_cast<uint16_t>(labels.values[i]);
  }
  return MaskValues{to, labels.width, labels.height};
}

Result<std::monostate> move_mask(const MaskValues& values, const Drawing& drawing, const Mask& mask,
                                 uint64_t max_pixels, MaskBuffers& buffers) {
  Mover mover(values, max_pixels, buffers);
  for (const Action& action : drawing.actions) {
    if (!std::visit(mover, action)) {
      return Error(ErrorKind::corruption,
                   "a mask of so odd a shape (" + std::to_string(mover.width()) + "x" +
                       std::to_string(mover.height()) + ") that a step would make it too large");
    }
  }
  uint16_t refused = 0;
  if (!store(mover, mask.type, mask.out, refused)) {
    return Error(ErrorKind::corruption,
                 "a mask has the value " + std::to_string(refused) +
                     ", which its type cannot hold: ask for a wider type, such as int64");
  }
  return std::monostate{};
}

}  // namespace nostall::image
