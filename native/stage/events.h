// stage/events.h - private to the stage: what it records (trace/trace.h).
#pragma once

#include <array>

#include "stage/origin.h"
#include "trace/trace.h"

namespace nostall::stage {

// The consumer waits for a batch; its samples by origin, and the finished batches behind it.
inline const trace::Kind kWaitBatch = trace::define(
    "data", "wait for batch", {"epoch", "batch", "ram", "file", "peer", "source", "queue"});
// One round trip of a fetch thread to the source; `failed` samples among them.
inline const trace::Kind kReadSource =
    trace::define("data", "read source", {"samples", "bytes", "failed"});
// The same for the tiers alone, ahead of need (LoaderConfig::ahead).
inline const trace::Kind kReadOwned = trace::define("data", "read for tiers", {"samples", "bytes"});
inline const trace::Kind kReadTiers = trace::define("data", "take from tiers", {"samples"});
// Samples of one file tier; `many`: side by side, for its disk makes reads wait.
inline const trace::Kind kReadFiles =
    trace::define("data", "read file tier", {"tier", "samples", "bytes", "many"});
// A sample is not taken from the nearest place that has it, and why: one kind for each Reason.
inline const std::array<trace::Kind, kReasons> kChose{
    trace::define("data", "take from the only place", {"sample"}),
    trace::define("data", "take from memory", {"sample"}),
    trace::define("data", "take from the nearest place", {"sample"}),
    trace::define("data", "take from a node not measured yet", {"sample", "node"}),
    trace::define("data", "take from a node faster than the file tier", {"sample", "node"}),
    trace::define("data", "take from the source, faster than tiers and nodes", {"sample"}),
    trace::define("data", "try a slower place again", {"sample", "origin"})};
inline const trace::Kind kFetchPeers =
    trace::define("data", "fetch from peers", {"samples", "came", "bytes"});
inline const trace::Kind kWaitOthers = trace::define("data", "wait for others", {"sample"});
// A sample is written to a file tier or pushed to its owner.
inline const trace::Kind kPassOn = trace::define("data", "pass on", {"sample", "bytes"});
inline const trace::Kind kDecode =
    trace::define("data", "decode", {"sample", "bytes", "epoch", "batch"});

}  // namespace nostall::stage
