// The order of reductions from a graph, and what is fused.
#include "sync/order.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"

namespace nostall::sync {
namespace {

using Groups = std::vector<std::vector<uint32_t>>;

std::vector<TensorSpec> tensors_of(size_t n, uint64_t count = 10) {
  std::vector<TensorSpec> out;
  for (size_t i = 0; i < n; ++i) out.push_back({"t" + std::to_string(i), count});
  return out;
}

// Figure 6.13 in kind: reductions 0 and 1 side by side, 2 needs 0, 3 needs 2, 4 is as deep as 3 but
// needs no other reduction.
std::vector<GraphNode> figure() {
  return {
      {{}, -1},   // 0: root
      {{0}, 0},   // 1: reduction 0
      {{0}, 1},   // 2: reduction 1
      {{1}, 2},   // 3: reduction 2
      {{3}, 3},   // 4: reduction 3
      {{0}, -1},  // 5
      {{5}, -1},  // 6
      {{6}, 4},   // 7: reduction 4
  };
}

TEST(Order, ParentsComeFirstAndOthersByDepth) {
  EXPECT_EQ(order_of(figure(), 5), (std::vector<uint32_t>{0, 1, 2, 3, 4}));
}

TEST(Order, WhatDependsOnEachOtherIsNotFused) {
  const ReductionPlan plan = plan_reductions(figure(), tensors_of(5), 1 << 20);
  EXPECT_EQ(plan.groups, (Groups{{0, 1}, {2}, {3, 4}}));
  EXPECT_EQ(plan.nodes, 8u);
  EXPECT_EQ(plan.edges, 7u);
}

TEST(Order, TheThresholdCutsGroups) {
  const ReductionPlan plan = plan_reductions(figure(), tensors_of(5), 79);
  EXPECT_EQ(plan.groups, (Groups{{0}, {1}, {2}, {3}, {4}}));
}

TEST(Order, PrioritiesOrderWhatCouldRunAtOnce) {
  std::vector<GraphNode> graph = {{{}, -1, 9}, {{0}, 0, 1}, {{0}, 1, 5}, {{2}, 2, 4}};
  EXPECT_EQ(order_of(graph, 3), (std::vector<uint32_t>{1, 2, 0}));
}

TEST(Order, TensorsThatTheGraphDoesNotReachComeLast) {
  const ReductionPlan plan = plan_reductions(figure(), tensors_of(7), 1 << 20);
  EXPECT_EQ(plan.groups, (Groups{{0, 1}, {2}, {3, 4}, {5, 6}}));
}

TEST(Order, DifferentTypesAreNotFused) {
  auto tensors = tensors_of(3);
  tensors[1].wire = collective::DataType::bfloat16;
  const std::vector<uint32_t> order{0, 1, 2};
  EXPECT_EQ(fuse(order, tensors, 1 << 20).groups, (Groups{{0}, {1}, {2}}));
}

TEST(Order, BadGraphsAreRefused) {
  const std::vector<GraphNode> cycle = {{{1}, 0}, {{0}, 1}};
  EXPECT_THROW(order_of(cycle, 2), Error);
  const std::vector<GraphNode> unknown = {{{7}, 0}};
  EXPECT_THROW(order_of(unknown, 1), Error);
  const std::vector<GraphNode> twice = {{{}, 0}, {{}, 0}};
  EXPECT_THROW(order_of(twice, 1), Error);
  const std::vector<GraphNode> more = {{{}, 3}};
  EXPECT_THROW(order_of(more, 1), Error);
  const std::vector<uint32_t> again{0, 0};
  EXPECT_THROW(fuse(again, tensors_of(2), 1), Error);
}

TEST(Order, RandomGraphsKeepTheirDependencies) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const uint32_t n = 1 + random() % 60;
    std::vector<GraphNode> graph(n);
    uint32_t tensors = 0;
    for (uint32_t i = 0; i < n; ++i) {
      for (uint32_t p = 0; p < i; ++p) {
        if (random() % 8 == 0) graph[i].parents.push_back(p);
      }
      if (random() % 2) graph[i].tensor = tensors++;
      graph[i].priority = random() % 3;
    }
    const auto plan = plan_reductions(graph, tensors_of(tensors), 45);
    std::vector<size_t> group_of(tensors);
    size_t seen = 0;
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      for (const uint32_t t : plan.groups[g]) {
        group_of[t] = g;
        ++seen;
      }
    }
    EXPECT_EQ(seen, tensors);
    // Longest way back: every tensor upstream is in an earlier group.
    std::vector<std::vector<bool>> up(n, std::vector<bool>(n));
    for (uint32_t i = 0; i < n; ++i) {
      for (const uint32_t p : graph[i].parents) {
        up[i][p] = true;
        for (uint32_t q = 0; q < n; ++q) up[i][q] = up[i][q] || up[p][q];
      }
      if (graph[i].tensor < 0) continue;
      for (uint32_t q = 0; q < n; ++q) {
        if (up[i][q] && graph[q].tensor >= 0) {
          EXPECT_LT(group_of[static_cast<size_t>(graph[q].tensor)],
                    group_of[static_cast<size_t>(graph[i].tensor)]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace nostall::sync
