// nostall-smpi: allreduce on a simulated cluster, one line of JSON a call. `nostall simulate
// collectives` writes the platform and runs it under smpirun, once for every engine.
//   --engine mpi|hierarchical|ours   the MPI's own (smpi/allreduce chooses which), or one of ours
//   --per-node N --bytes B...        message sizes
//   --pattern balanced|random|steps|node|rank   who is late: nobody; all ranks by random delays, in
//       whole steps of a message's time as Listing 4.2 prints it, or by any; one node; one rank
//   --imbalance X     the longest delay (one node or rank: the delay) over a message's time alpha
//   --together F      random: share of the delay that a node's ranks have in common
//   --redraw          new delays in every call, else the same in all
//   --calls N --seed S --late L --chunk BYTES --chunks N --small BYTES --direct BYTES
//   --add RATE --check
#include <smpi/mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "simulated.h"

namespace nostall::simulated {
namespace {

struct Options {
  std::string engine = "ours", pattern = "balanced";
  std::vector<uint64_t> bytes;
  int per_node = 4, calls = 3;
  double imbalance = 0, together = 0;
  bool redraw = false;
  uint64_t seed = 1;
  Tuning tuning;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (key == "--check" || key == "--redraw") {
      (key == "--check" ? costs().real : options.redraw) = true;
      continue;
    }
    if (i + 1 == argc) throw std::invalid_argument(key + " needs a value");
    const std::string value = argv[++i];
    if (key == "--engine")
      options.engine = value;
    else if (key == "--pattern")
      options.pattern = value;
    else if (key == "--bytes")
      options.bytes.push_back(std::stoull(value));
    else if (key == "--per-node")
      options.per_node = std::stoi(value);
    else if (key == "--calls")
      options.calls = std::stoi(value);
    else if (key == "--imbalance")
      options.imbalance = std::stod(value);
    else if (key == "--together")
      options.together = std::stod(value);
    else if (key == "--seed")
      options.seed = std::stoull(value);
    else if (key == "--late")
      options.tuning.late = static_cast<uint32_t>(std::stoul(value));
    else if (key == "--chunk")
      options.tuning.chunk = std::stoull(value);
    else if (key == "--chunks")
      options.tuning.chunks = static_cast<uint32_t>(std::stoul(value));
    else if (key == "--small")
      options.tuning.small = std::stoull(value);
    else if (key == "--direct")
      options.tuning.direct = std::stoull(value);
    else if (key == "--add")
      costs().add = costs().copy = std::stod(value);
    else
      throw std::invalid_argument("there is no option " + key);
  }
  return options;
}

// What all ranks write down; they share one process, and only rank 0 reads it, after a barrier.
struct Times {
  std::vector<double> arrived, left;
  double begin = 0;
};
Times& times() {
  static Times all;
  return all;
}

// The MPI's collectives add by this, so that the time they take is charged.
void charged_sum(void* from, void* into, int* count, MPI_Datatype*) {
  add_up(static_cast<float*>(into), static_cast<float*>(into), static_cast<float*>(from),
         static_cast<uint64_t>(*count));
}

// The time of one message between two nodes, or in the only one, measured: Listing 4.2's unit of
// delay.
double alpha_of(const Place& place, uint64_t bytes, std::byte* buffer) {
  double alpha = 0;
  const auto n = static_cast<int>(bytes);
  const int there = place.nodes() > 1 ? place.per_node : 1;
  MPI_Barrier(MPI_COMM_WORLD);
  if (place.ranks > there && place.rank == 0) {
    const double begin = MPI_Wtime();
    MPI_Send(buffer, n, MPI_BYTE, there, 0, MPI_COMM_WORLD);
    MPI_Recv(buffer, n, MPI_BYTE, there, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    alpha = (MPI_Wtime() - begin) / 2;
  } else if (place.rank == there) {
    MPI_Recv(buffer, n, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Send(buffer, n, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
  }
  MPI_Bcast(&alpha, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  return alpha;
}

double drawn(uint64_t seed, uint64_t call, uint64_t what) {
  std::seed_seq words{seed, call, what};
  std::mt19937_64 generator(words);
  return std::uniform_real_distribution<double>(0, 1)(generator);
}

// In alphas. The late node and rank are the last but one, so that it is no special one.
double delay_of(const Options& options, const Place& place, uint64_t call) {
  const uint64_t draw = options.redraw ? call : 0;
  const auto rank = static_cast<uint64_t>(place.rank);
  const auto node = static_cast<uint64_t>(place.node_index());
  const double x = options.imbalance;
  const int late = std::max(place.nodes() - 2, 0);
  if (options.pattern == "random") {
    return x * (options.together * drawn(options.seed, draw, 1'000'000 + node) +
                (1 - options.together) * drawn(options.seed, draw, rank));
  }
  if (options.pattern == "steps") return std::ceil(x * drawn(options.seed, draw, rank));
  if (options.pattern == "node") return place.node_index() == late ? x : 0;
  if (options.pattern == "rank") return place.rank == late * place.per_node ? x : 0;
  if (options.pattern == "balanced") return 0;
  throw std::invalid_argument("there is no pattern " + options.pattern);
}

void print(const Options& options, const Place& place, uint64_t bytes, int call, double alpha,
           bool right) {
  const Times& t = times();
  double in_call = 0, first = t.arrived[0], last = t.arrived[0], end = t.left[0], mean = 0;
  for (size_t r = 0; r < t.arrived.size(); ++r) {
    in_call += t.left[r] - t.arrived[r];
    mean += t.arrived[r];
    first = std::min(first, t.arrived[r]);
    last = std::max(last, t.arrived[r]);
    end = std::max(end, t.left[r]);
  }
  const auto n = static_cast<double>(t.arrived.size());
  mean /= n;
  double average = 0;
  for (const double a : t.arrived) average += std::abs(a - mean) / n;
  std::printf(
      "{\"engine\": \"%s\", \"ranks\": %d, \"per_node\": %d, \"bytes\": %llu, "
      "\"call\": %d, \"alpha\": %.9g, \"in_call\": %.9g, \"after_last\": %.9g, "
      "\"worst\": %.6g, \"average\": %.6g, \"right\": %s}\n",
      options.engine.c_str(), place.ranks, place.per_node, static_cast<unsigned long long>(bytes),
      call, alpha, in_call / n, end - last, (last - first) / alpha, average / alpha,
      right ? "true" : "false");
  std::fflush(stdout);
}

float value_of(int rank, uint64_t i) { return static_cast<float>((rank + 1) * ((i % 5) + 1)); }

void fill(const Place& place, float* data, uint64_t count) {
  for (uint64_t i = 0; costs().real && i < count; ++i) data[i] = value_of(place.rank, i);
}

bool is_right(const Place& place, const float* data, uint64_t count) {
  const int sum = place.ranks * (place.ranks + 1) / 2;
  bool right = true;
  for (uint64_t i = 0; costs().real && i < count; ++i) {
    right = right && data[i] == static_cast<float>(static_cast<uint64_t>(sum) * ((i % 5) + 1));
  }
  return right;
}

void measure(const Options& options, const Place& place, MPI_Op op, uint64_t bytes) {
  const uint64_t count = bytes / sizeof(float);
  const Memory in_memory(bytes), out_memory(bytes);
  auto* const in = reinterpret_cast<float*>(in_memory.get());
  auto* const out = reinterpret_cast<float*>(out_memory.get());
  const double alpha = alpha_of(place, bytes, out_memory.get());
  for (int call = 0; call < options.calls; ++call) {
    fill(place, in, count);
    MPI_Barrier(MPI_COMM_WORLD);
    // All begin at the same moment, later than anybody leaves the barrier.
    double begin = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, &begin, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    begin += 1e-3;
    charge(begin + alpha * delay_of(options, place, static_cast<uint64_t>(call)) - MPI_Wtime());
    const auto me = static_cast<size_t>(place.rank);
    times().arrived[me] = MPI_Wtime();
    if (options.engine == "ours") {
      ours_allreduce(place, in, out, count, options.tuning);
    } else if (options.engine == "hierarchical") {
      hierarchical_allreduce(place, in, out, count, op);
    } else {
      MPI_Allreduce(in, out, static_cast<int>(count), MPI_FLOAT, op, MPI_COMM_WORLD);
    }
    times().left[me] = MPI_Wtime();
    int right = is_right(place, out, count) ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &right, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (place.rank == 0) print(options, place, bytes, call, alpha, right == 1);
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  Place place;
  MPI_Comm_rank(MPI_COMM_WORLD, &place.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &place.ranks);
  place.per_node = options.per_node;
  MPI_Comm_split(MPI_COMM_WORLD, place.node_index(), place.rank, &place.node);
  MPI_Comm_split(MPI_COMM_WORLD, place.local(), place.rank, &place.lane);
  for (const uint64_t bytes : options.bytes) costs().largest = std::max(costs().largest, bytes);
  times().arrived.resize(static_cast<size_t>(place.ranks));
  times().left.resize(static_cast<size_t>(place.ranks));
  MPI_Op op = MPI_OP_NULL;
  MPI_Op_create(charged_sum, 1, &op);
  for (const uint64_t bytes : options.bytes) measure(options, place, op, bytes);
  MPI_Op_free(&op);
  MPI_Comm_free(&place.node);
  MPI_Comm_free(&place.lane);
  return 0;
}

}  // namespace
}  // namespace nostall::simulated

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    status = nostall::simulated::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "nostall-smpi: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 2);
    status = 2;
  }
  MPI_Finalize();
  return status;
}
