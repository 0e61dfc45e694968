// source/sums.h - the checksums of a data set's samples: their stored form, and the probe whether
// they are those of the content that is there.
//
// The stored form (docs/formats/sums.md, version 1) is little-endian and ends in a CRC32C.
// parse_sums is total: any bytes give checksums or an Error of kind corruption.
// Thread-safety: free functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/sums.h"
#include "source/source.h"

namespace nostall::source {

// `dataset` is Source::fingerprint(), `stamp` Source::stamp() of the source they were learned from.
std::vector<std::byte> serialize_sums(uint64_t dataset, uint64_t stamp, const SampleSums& sums);
// Fills `into` and gives the stamp; an Error also for another data set or number of samples.
Result<uint64_t> parse_sums(std::span<const std::byte> bytes, uint64_t dataset, SampleSums& into);
// Bytes of the stored form for so many samples.
uint64_t stored_sums_bytes(uint64_t samples) noexcept;

struct KnownSum {
  uint64_t sample = 0;
  uint32_t sum = 0;
};

struct Probe {
  uint64_t compared = 0;   // samples that could be read
  uint64_t different = 0;  // of which the bytes are not those that are known
};

// How many samples to look at: 1 % of those that are known, between 16 and 64; 64 if the data set
// moved or was touched.
uint64_t probe_size(uint64_t known, bool same_stamp) noexcept;
// Which of them, in rising order: drawn by the data set's fingerprint.
std::vector<uint64_t> draw(const Source& source, uint64_t known, bool same_stamp);
// Reads what was drawn, 16 MiB at most but at least one sample; nothing where an equal stamp means the
// same content. What cannot be read is not counted.
Probe probe(const Source& source, std::span<const KnownSum> drawn, bool same_stamp);
// Whether what is known is of another version of the data set. Where neither the place nor the
// times changed, a few other samples are damage, which is found when they are read.
bool another_version(const Probe& probe, bool same_stamp) noexcept;

// Loads the checksums that are kept in `path` into source.sums() and probes them. Empty: they hold,
// or there are none; else why they, and the index they lie beside, are of another content.
std::string open_sums(const Source& source, const std::string& path);
// The message for a sample with the checksum `now` that had `then`, with the remedy.
std::string changed_text(const Source& source, uint64_t sample, uint32_t then, uint32_t now);
// Keeps them there, if more or fewer are known than the file has; a loss of power leaves those or the ones
// before. 0 or -errno.
int keep_sums(const Source& source, FileSystem& files = FileSystem::real());

}  // namespace nostall::source
