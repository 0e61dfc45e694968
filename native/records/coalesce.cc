// Which pieces to read together, and the cost model that sets the limits.
//
// coalesce() sorts the pieces by place and extends the current range while the next piece is in the
// same file, at most `gap` bytes behind the range's end, and the range stays within `bytes`.
//
// StorageCost fits time = operations * o + bytes * b by weighted least squares over the calls so
// far: record() adds a call to the five sums of the normal equations, fit() solves them for o and
// b, and limits() turns o / b, the bytes that take as long as one operation, into a gap and a read
// size.
#include "records/coalesce.h"

#include <algorithm>
#include <tuple>

namespace nostall::records {
namespace {

// A local flash disk, until something was measured.
constexpr double kFirstOperation = 60e-6, kFirstByte = 1 / 1.5e9;
// The sums are multiplied by this at every measurement: about the last 30 count.
constexpr double kForget = 0.97;
// Values outside of these are no measurements.
constexpr double kLeastSeconds = 1e-9, kMostMeasured = 1e15;
constexpr uint64_t kLeastBytes = 64 << 10, kMostGap = 1 << 20, kPage = 4096;
// Calls are alike while the standard deviation of the operations' share of a call's time (by the
// first guess) is below this.
constexpr double kLeastSpread = 0.1;
constexpr double kBytesShare = 9.0;  // seconds spent on bytes per second spent on operations

}  // namespace

std::vector<Together> coalesce(std::vector<Piece>& pieces, CoalesceLimits limits) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::tie(a.file, a.offset, a.index) < std::tie(b.file, b.offset, b.index);
  });
  std::vector<Together> ranges;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& p = pieces[i];
    if (!ranges.empty() && ranges.back().file == p.file) {
      Together& last = ranges.back();
      const uint64_t end = last.offset + last.length;
      const uint64_t new_end = std::max(end, p.offset + p.length);
      const bool near = p.offset <= end || p.offset - end <= limits.gap;
      if (near && new_end - last.offset <= limits.bytes) {
        last.length = new_end - last.offset;
        ++last.count;
        continue;
      }
    }
    ranges.push_back({p.file, p.offset, p.length, i, 1});
  }
  return ranges;
}

void StorageCost::record(double operations, double bytes, double seconds) {
  const auto inside = [](double v, double least) { return v >= least && v <= kMostMeasured; };
  if (!inside(operations, 1.0) || !inside(bytes, 1.0) || !inside(seconds, kLeastSeconds)) return;
  // A call's weight does not depend on its size. It must not depend on its time either, or reads
  // from memory would outweigh a slow device for hundreds of calls.
  const double weight = 1.0 / (operations * kFirstOperation + bytes * kFirstByte);
  const double o = operations * weight, b = bytes * weight, t = seconds * weight;
  const MutexLock lock(mutex_);
  sums_.oo = kForget * sums_.oo + o * o;
  sums_.ob = kForget * sums_.ob + o * b;
  sums_.bb = kForget * sums_.bb + b * b;
  sums_.ot = kForget * sums_.ot + o * t;
  sums_.bt = kForget * sums_.bt + b * t;
}

StorageCost::Fit StorageCost::fit() const {
  const MutexLock lock(mutex_);
  if (sums_.bb == 0.0) return {kFirstOperation, kFirstByte};
  // If all calls were alike the equations are singular: a little of the first guess is mixed in.
  const double ro = 0.01 * sums_.oo, rb = 0.01 * sums_.bb;
  const double scale = (sums_.ot + sums_.bt) / (sums_.oo * kFirstOperation + sums_.ob * kFirstByte +
                                                sums_.ob * kFirstOperation + sums_.bb * kFirstByte);
  const double go = kFirstOperation * scale, gb = kFirstByte * scale;
  const double a = sums_.oo + ro, c = sums_.bb + rb, d = sums_.ob;
  const double x = sums_.ot + ro * go, y = sums_.bt + rb * gb;
  const double determinant = a * c - d * d;
  double operation = (x * c - y * d) / determinant;
  double byte = (a * y - d * x) / determinant;
  if (operation < 0.0) {
    operation = 0.0;
    byte = y / c;
  } else if (byte <= 0.0) {
    byte = 1e-12;
    operation = x / a;
  }
  return {operation, byte};
}

double StorageCost::seconds_per_operation() const { return fit().operation; }
double StorageCost::seconds_per_byte() const { return fit().byte; }

bool StorageCost::alike() const {
  const MutexLock lock(mutex_);
  // A call's weight makes its shares of operations (u) and of bytes add up to one.
  const double uu = sums_.oo * kFirstOperation * kFirstOperation;
  const double uv = sums_.ob * kFirstOperation * kFirstByte;
  const double all = uu + 2.0 * uv + sums_.bb * kFirstByte * kFirstByte;
  if (all <= 0.0) return true;
  const double mean = (uu + uv) / all;
  return uu / all - mean * mean < kLeastSpread * kLeastSpread;
}

CoalesceLimits StorageCost::limits(uint64_t max_bytes, uint64_t piece) const {
  const Fit f = fit();
  const double even = f.operation / f.byte;
  const auto clipped = [](double value, uint64_t least, uint64_t most) {
    return value >= static_cast<double>(most) ? most
                                              : std::max(least, static_cast<uint64_t>(value));
  };
  return {clipped(even, 0, alike() ? std::clamp(piece, kPage, kMostGap) : kMostGap),
          clipped(kBytesShare * even, std::min(kLeastBytes, max_bytes), max_bytes)};
}

}  // namespace nostall::records
