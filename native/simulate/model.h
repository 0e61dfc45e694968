// simulate/model.h - the machine of the performance model [Böhringer 2020, table 3.1], in its
// symbols and equations.
//
// Units: MB (10^6 bytes or any other, used throughout), MB/s, seconds.
// Thread-safety: values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace nostall::simulate {

// A throughput as a function of threads or clients: (key, MB/s), keys ascending.
using Curve = std::vector<std::pair<double, double>>;

// Equation 4.1: linear between the points, constant outside them.
double interpolate(const Curve& curve, double at);

// One storage class; class 0 is the staging buffer.
struct StorageClass {
  double capacity = 0;   // d_j, MB
  uint32_t threads = 1;  // p_j
  Curve read;            // r_j(p)
  Curve write;           // w_j(p); empty: not known
};

struct Model {
  uint32_t nodes = 1;                 // N
  double compute = 0;                 // c
  double preprocess = 0;              // beta
  double network = 0;                 // b_c
  double source_link = 0;             // b_fs
  Curve source;                       // t(gamma)
  std::vector<StorageClass> classes;  // staging buffer, then the fastest class first
  double step_seconds = 0;  // added to every batch: collectives, the gradient engine, checkpoints

  // r_j(p_j) / p_j: what one thread reads.
  double thread_read(size_t j) const;
  // w_j(p_j) / p_j, or 0 where it is not known.
  double thread_write(size_t j) const;
  // min(b_fs, t(gamma) / gamma): equation 3.5's denominator.
  double source_share(uint32_t gamma) const;
  // write_i(k) of equation 3.4, seconds per MB.
  double stage_seconds() const;
};

// Throws Error(usage), naming the variable, if a value is missing, negative or not a number.
void validate(const Model& model);

}  // namespace nostall::simulate
