// simulate/share.h - max-min fair rates of flows that draw on several resources at once.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace nostall::simulate {

// MB of a resource that one MB of the flow takes.
using Demand = std::pair<uint32_t, double>;

struct Flow {
  double cap = 0;              // MB/s that it can do at most; 0: it does nothing now
  std::vector<Demand> demand;  // by resource, amounts above 0
  double rate = 0;             // out: MB/s
};

// Raises all rates together; a flow stops where its cap or one of its resources is reached. So no
// resource gives more than its capacity, and no flow could be faster without making a slower one
// slower. Thread-safety: none, scratch memory is kept. Cost: O(flows * demands) per resource that
// fills up.
class Sharing {
 public:
  void share(std::span<Flow> flows, std::span<const double> capacity);

 private:
  std::vector<double> left_, weight_;
  std::vector<uint32_t> open_;
};

}  // namespace nostall::simulate
