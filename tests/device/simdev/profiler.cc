// What streams did, for torch.profiler: Kineto asks each kind of device by an interface of its own.
//
// The events have the categories, the names of copies and the places that those of CUDA have.
#define FMT_HEADER_ONLY  // Kineto's headers use it, and torch exports none of it
#include <GenericTraceActivity.h>
#include <IActivityProfiler.h>
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

#include <chrono>

#include "runtime.h"

namespace {

using libkineto::ActivityType;

// Of the clock of Kineto's events, seconds after the steady clock.
double since_steady() {
  const auto seconds = [](auto moment) {
    return std::chrono::duration<double>(moment.time_since_epoch()).count();
  };
  return seconds(std::chrono::system_clock::now()) - seconds(std::chrono::steady_clock::now());
}

std::string name_of(const std::string& task) {
  if (task == "copy to the device") return "Memcpy HtoD (Pinned -> Device)";
  if (task == "copy from pageable memory") return "Memcpy HtoD (Pageable -> Device)";
  if (task == "copy to the host") return "Memcpy DtoH (Device -> Pinned)";
  if (task == "copy to pageable memory") return "Memcpy DtoH (Device -> Pageable)";
  return task;
}

class Session : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    shift_ = since_steady();
    simdev::start_log();
  }
  void stop() override { done_ = simdev::stop_log(); }
  std::vector<std::string> errors() override { return {}; }
  // Kineto keeps the addresses of the events, and takes them with the buffer.
  void processTrace(libkineto::ActivityLogger& logger) override {
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(0, 0, "simdev");
    for (const simdev::Done& done : done_) {
      const std::string name = name_of(done.name);
      const bool copies = name.rfind("Memcpy", 0) == 0;
      buffer_->emplace_activity(
          buffer_->span, copies ? ActivityType::GPU_MEMCPY : ActivityType::CONCURRENT_KERNEL, name);
      libkineto::GenericTraceActivity& event = *buffer_->activities.back();
      event.startTime = static_cast<int64_t>((done.begin + shift_) * 1e9);
      event.endTime = static_cast<int64_t>((done.end + shift_) * 1e9);
      event.device = done.device;
      event.resource = done.stream;
      event.addMetadata("device", done.device);
      event.addMetadata("stream", done.stream);
      event.addMetadata("bytes", done.bytes);
      logger.handleActivity(event);
    }
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }

 private:
  double shift_ = 0;
  std::vector<simdev::Done> done_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class Profiler : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override { return name_; }
  const std::set<ActivityType>& availableActivities() const override { return types_; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>&, const libkineto::Config&) override {
    return std::make_unique<Session>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<ActivityType>& types,
      const libkineto::Config& config) override {
    return configure(types, config);
  }

 private:
  const std::string name_ = "simdev";
  const std::set<ActivityType> types_ = {ActivityType::GPU_MEMCPY, ActivityType::CONCURRENT_KERNEL};
};
REGISTER_PRIVATEUSE1_PROFILER(Profiler);

}  // namespace
