// Operations and rounds of Horovod's timelines, whole, torn and cut into pieces.
#include "timeline/horovod.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "timeline/scanner.h"

namespace nostall::timeline {
namespace {

struct Read {
  Operations ops;
  ScanReport scan;
  HorovodReport report;
  std::vector<std::string> tensors;
};

Read read(const std::string& text, size_t piece = 1 << 20) {
  HorovodAssembler assembler;
  Scanner scanner([&](const Event& event, uint64_t offset) { assembler.add(event, offset); });
  const std::string_view all = text;
  for (size_t at = 0; at < all.size(); at += piece) scanner.feed(all.substr(at, piece));
  scanner.finish();
  assembler.finish();
  return {assembler.take(), scanner.report(), assembler.report(), assembler.tensors()};
}

std::string line(const char* phase, const std::string& name, int64_t us, int pid,
                 const std::string& more = "") {
  return std::string("{\"ph\": \"") + phase + "\", \"name\": \"" + name +
         "\", \"ts\": " + std::to_string(us) + ", \"pid\": " + std::to_string(pid) + more + "},\n";
}

// One allreduce of 24 bytes: two ranks ready at +1 and +5, reduced from +6 to +9.
std::string allreduce(int pid, int64_t us) {
  return line("B", "NEGOTIATE_ALLREDUCE", us, pid) + line("X", "0", us + 1, pid) +
         line("X", "1", us + 5, pid) + line("E", "", us + 5, pid) +
         line("B", "ALLREDUCE", us + 6, pid) + line("B", "MPI_ALLREDUCE", us + 7, pid) +
         line("E", "", us + 8, pid) +
         line("E", "", us + 9, pid, R"(, "args": {"dtype": "float32", "shape": "[2, 3]"})");
}

std::vector<uint32_t> rounds(const Read& read) {
  std::vector<uint32_t> out;
  for (const Operation& row : read.ops.rows) out.push_back(row.round);
  return out;
}

TEST(Horovod, OneOperationHasItsTimesTicksAndSize) {
  const Read got = read("[\n" + allreduce(3, 100));
  ASSERT_EQ(got.ops.rows.size(), 1u);
  const Operation& row = got.ops.rows[0];
  EXPECT_EQ(row.negotiate_begin, 100'000);
  EXPECT_EQ(row.negotiate_end, 105'000);
  EXPECT_EQ(row.reduce_begin, 106'000);
  EXPECT_EQ(row.reduce_end, 109'000);
  EXPECT_EQ(row.bytes, 24);
  EXPECT_EQ(row.offset, 2);
  EXPECT_EQ(got.ops.tick_rank, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(got.ops.tick_time, (std::vector<int64_t>{101'000, 105'000}));
  EXPECT_FALSE(got.scan.closed);
}

TEST(Horovod, ARepeatedTensorBeginsARound) {
  const Read got = read("[" + allreduce(1, 0) + allreduce(2, 10) + allreduce(2, 100) +
                        allreduce(1, 110) + allreduce(1, 200) + "]");
  EXPECT_EQ(rounds(got), (std::vector<uint32_t>{0, 0, 1, 1, 2}));
  EXPECT_TRUE(got.scan.closed);
}

TEST(Horovod, WhatIsInFlightWithTheRepeatedTensorIsOfTheNewRound) {
  // Tensor 9 is new, and negotiated from 100 on; tensor 1 comes again while it is in flight.
  const Read got =
      read(allreduce(1, 0) + line("B", "NEGOTIATE_ALLREDUCE", 100, 9) + allreduce(1, 101) +
           line("E", "", 120, 9) + line("B", "ALLREDUCE", 121, 9) + line("E", "", 122, 9));
  EXPECT_EQ(rounds(got), (std::vector<uint32_t>{0, 1, 1}));
}

TEST(Horovod, RoundsWithoutAQuietMomentAreStillTold) {
  // Tensor 9 never ends.
  const Read got =
      read(line("B", "NEGOTIATE_ALLREDUCE", 0, 9) + allreduce(1, 1) + allreduce(2, 11) +
           allreduce(1, 101) + allreduce(2, 111) + allreduce(1, 201));
  EXPECT_EQ(rounds(got), (std::vector<uint32_t>{0, 0, 1, 1, 2}));
  EXPECT_EQ(got.report.abandoned, 1u);
  EXPECT_EQ(got.report.first_abandoned, 0);
}

TEST(Horovod, BroadcastsMakeNoRounds) {
  const std::string broadcast = line("B", "NEGOTIATE_BROADCAST", 0, 1) + line("E", "", 1, 1) +
                                line("B", "BROADCAST", 2, 1) + line("E", "", 3, 1);
  const Read got = read(broadcast + broadcast + allreduce(1, 10));
  EXPECT_EQ(rounds(got), (std::vector<uint32_t>{0, 0, 0}));
}

TEST(Horovod, TornLinesCostThemselvesOnly) {
  const std::string whole = allreduce(1, 0) + allreduce(1, 100) + allreduce(1, 200);
  std::string torn = whole;
  torn.insert(whole.find("NEGOTIATE", 10), "\", {{{[[ \"}] \n{\"ph\": \"");
  const Read got = read(torn);
  EXPECT_EQ(got.ops.rows.size(), 3u);
  EXPECT_GE(got.scan.damaged, 1u);
  EXPECT_GE(got.scan.first_damage, 0);
}

TEST(Horovod, ACutOffFileTellsWhere) {
  const std::string whole = "[\n" + allreduce(1, 0) + allreduce(1, 100);
  const size_t last = whole.rfind("{\"ph\"");
  const Read got = read(whole.substr(0, whole.size() - 8));
  EXPECT_EQ(got.ops.rows.size(), 1u);
  EXPECT_EQ(got.scan.cut_off, static_cast<int64_t>(last));
  EXPECT_EQ(got.scan.damaged, 0u);
  EXPECT_EQ(got.report.abandoned, 1u);
}

TEST(Horovod, PiecesOfAnySizeGiveTheSame) {
  const std::string text = "{\"x\": {\"y\": 1}, \"traceEvents\": [" + allreduce(1, 0) +
                           "garbage {" + allreduce(2, 10) + allreduce(1, 50) + "]}";
  const Read whole = read(text);
  EXPECT_EQ(whole.ops.rows.size(), 3u);
  for (size_t piece = 1; piece < 70; ++piece) {
    const Read got = read(text, piece);
    ASSERT_EQ(got.ops.rows.size(), whole.ops.rows.size()) << piece;
    EXPECT_EQ(got.ops.tick_time, whole.ops.tick_time) << piece;
    EXPECT_EQ(got.scan.damaged_bytes, whole.scan.damaged_bytes) << piece;
  }
}

TEST(Horovod, ClocksThatJumpAndTimesThatAreNoneAreCounted) {
  const Read got = read(allreduce(1, 10'000'000) + allreduce(1, 0) +
                        "{\"ph\": \"B\", \"name\": \"ALLREDUCE\", \"ts\": 1e99, \"pid\": 1}");
  EXPECT_EQ(got.report.jumps, 1u);
  EXPECT_EQ(got.report.untimed, 1u);
}

TEST(Horovod, NamesComeFromMetadataWithTheirEscapes) {
  const Read got =
      read(R"({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "<\u0041>"}})" +
           allreduce(1, 0) + allreduce(2, 20));
  EXPECT_EQ(got.tensors, (std::vector<std::string>{"<A>", "pid 2"}));
}

}  // namespace
}  // namespace nostall::timeline
