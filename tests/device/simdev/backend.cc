// The simulated accelerator as torch's PrivateUse1 device: registrations over runtime.h, no Python.
//
// All operators but the few below go through one fallback, which is asynchronous: the operator runs
// on meta tensors for the shapes of its results, and later, in the thread of the stream, on CPU
// tensors that lie over device memory. What meta tensors cannot tell waits for the stream first.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceGuard.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>

#include "gil.h"
#include "runtime.h"

namespace {

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kSim = c10::DeviceType::PrivateUse1;

// ---------------------------------------------------------------------------- devices and streams

thread_local DeviceIndex current_device = 0;
thread_local std::array<int, simdev::kDevices> current_stream{0, 1};

// torch writes every default stream as 0.
int number_of(const Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}
Stream stream_of(int number, DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(kSim, device), number == device ? 0 : number);
}
DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }
void check_index(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < simdev::kDevices, "simdev has no device ", int(device));
}
simdev::Event& event_of(void* event) { return *static_cast<simdev::Event*>(event); }

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override {
    const Device before = getDevice();
    setDevice(d);
    return before;
  }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device d) const override {
    check_index(d.index());
    current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  Stream getStream(Device d) const override {
    const DeviceIndex i = index_of(d);
    return stream_of(current_stream[i], i);
  }
  Stream getDefaultStream(Device d) const override { return stream_of(index_of(d), index_of(d)); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override {
    return stream_of(simdev::new_stream(index_of(d)), index_of(d));
  }
  Stream exchangeStream(Stream s) const override {
    const Stream before = getStream(s.device());
    current_stream[s.device_index()] = number_of(s);
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(number_of(s)));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    const simdev::Inside inside;
    delete static_cast<simdev::Event*>(event);
  }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    const simdev::Inside inside;
    if (*event == nullptr) *event = new simdev::Event;
    simdev::record(event_of(*event), number_of(s));
  }
  void block(void* event, const Stream& s) const override {
    const simdev::Inside inside;
    if (event) simdev::block(event_of(event), number_of(s));
  }
  bool queryEvent(void* event) const override {
    const simdev::Inside inside;
    return !event || simdev::query(event_of(event));
  }
  DeviceIndex deviceCount() const noexcept override { return simdev::kDevices; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  bool queryStream(const Stream& s) const override {
    const simdev::Inside inside;
    return simdev::query(number_of(s));
  }
  void synchronizeStream(const Stream& s) const override { simdev::synchronize(number_of(s)); }
  void synchronizeEvent(void* event) const override {
    const simdev::Inside inside;
    if (event) simdev::synchronize(event_of(event));
  }
  void synchronizeDevice(DeviceIndex i) const override {
    simdev::synchronize_device(i < 0 ? current_device : i);
  }
  void recordDataPtrOnStream(const DataPtr& p, const Stream& s) const override;
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    return simdev::milliseconds(event_of(from), event_of(to));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

// ---------------------------------------------------------------------------- device memory

struct Block {
  void* address;
  size_t bytes;
  int device, stream;
  std::set<int> others;  // streams told by record_stream
};

// Free blocks stay with their stream and size; one that other streams used waits for their events.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  DataPtr allocate(size_t bytes) override {
    const simdev::Inside inside;
    const int device = current_device, stream = current_stream[device];
    if (bytes == 0) return {nullptr, nullptr, &forget, Device(kSim, current_device)};
    bytes = (bytes + 511) / 512 * 512;
    const std::lock_guard lock(mutex_);
    collect();
    void* address = nullptr;
    auto& list = free_[{device, stream, bytes}];
    if (!list.empty()) {
      address = list.back().first;
      // Another thread may have seen them done: this one must know it too.
      for (const simdev::Event& event : list.back().second) simdev::query(event);
      list.pop_back();
      simdev::poison(stream, address, bytes);
    } else {
      address = simdev::take_device(device, bytes);
      if (!address) {
        flush(device);
        address = simdev::take_device(device, bytes);
      }
      if (address) ++taken_[device];
    }
    TORCH_CHECK_WITH(OutOfMemoryError, address, "simdev: out of memory: no ", bytes,
                     " bytes on device ", device);
    used_[device] += static_cast<int64_t>(bytes);
    peak_[device] = std::max(peak_[device], used_[device]);
    return {address, new Block{address, bytes, device, stream, {}}, &release,
            Device(kSim, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    simdev::push(current_stream[current_device], "copy_data",
                 {{from, bytes, false}, {to, bytes, true}}, bytes,
                 [=] { std::memcpy(simdev::reach(to), simdev::reach(from), bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < simdev::kDevices; ++i) flush(i);
  }
  void recordStream(const DataPtr& p, Stream s) override {
    const simdev::Inside inside;
    if (!p.get_context() || p.get_deleter() != &release) return;
    auto* block = static_cast<Block*>(p.get_context());
    const std::lock_guard lock(mutex_);
    if (number_of(s) != block->stream) block->others.insert(number_of(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override {
    const std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.num_device_alloc = taken_[i];
    stats.allocated_bytes[0].current = used_[i];
    stats.allocated_bytes[0].peak = peak_[i];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex i) override {
    const std::lock_guard lock(mutex_);
    peak_[i] = used_[i];
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex i) override {
    const size_t all = simdev::capacity(i);
    const std::lock_guard lock(mutex_);
    return {all - static_cast<size_t>(used_[i]), all};
  }

 private:
  static void forget(void*) {}
  static void release(void* context);

  // It is a deleter's: what a lost device refuses keeps the memory.
  void give_back(Block* block) noexcept {
    const std::lock_guard lock(mutex_);
    used_[block->device] -= static_cast<int64_t>(block->bytes);
    try {
      std::vector<simdev::Event> events;
      for (const int stream : block->others) simdev::record(events.emplace_back(), stream);
      waiting_.emplace_back(block, std::move(events));
      collect();
    } catch (const std::exception&) {
    }
  }
  void collect() {
    std::erase_if(waiting_, [&](auto& entry) {
      for (const simdev::Event& event : entry.second) {
        if (!simdev::query(event)) return false;
      }
      Block* block = entry.first;
      free_[{block->device, block->stream, block->bytes}].emplace_back(block->address,
                                                                       std::move(entry.second));
      delete block;
      return true;
    });
  }
  void flush(int device) {
    for (auto& [key, list] : free_) {
      if (std::get<0>(key) != device || list.empty()) continue;
      simdev::synchronize_device(device);
      for (auto& [p, events] : list) simdev::give_device(device, p, std::get<2>(key));
      list.clear();
    }
  }

  std::mutex mutex_;
  using Free = std::pair<void*, std::vector<simdev::Event>>;  // and the last uses of it
  std::map<std::tuple<int, int, size_t>, std::vector<Free>> free_;
  std::vector<std::pair<Block*, std::vector<simdev::Event>>> waiting_;
  std::array<int64_t, simdev::kDevices> used_{}, peak_{}, taken_{};
};

DeviceMemory& device_memory() {
  static auto* const made = new DeviceMemory;
  return *made;
}
void DeviceMemory::release(void* context) {
  const simdev::Inside inside;
  if (simdev::is_forked()) return;
  device_memory().give_back(static_cast<Block*>(context));
}
void GuardImpl::recordDataPtrOnStream(const DataPtr& p, const Stream& s) const {
  device_memory().recordStream(p, s);
}
const bool allocator_set = [] {
  c10::SetAllocator(kSim, &device_memory());
  return true;
}();

// ---------------------------------------------------------------------------- pinned memory

using Impl = at::CachingHostAllocatorImpl<Stream, std::shared_ptr<simdev::Event>>;

struct HostImpl final : Impl {
  bool pinned_use_background_threads() override { return false; }

 private:
  void allocate_host_memory(size_t size, void** ptr) override {
    *ptr = simdev::take_pinned(size);
    TORCH_CHECK(*ptr, "simdev: ", size, " bytes of host memory cannot be pinned");
  }
  void free_block(at::HostBlock<Stream>* block) override {
    simdev::give_pinned(block->ptr_, block->size_);
  }
  void record_stream(std::optional<std::vector<std::shared_ptr<simdev::Event>>>& events,
                     Stream stream) override {
    events->push_back(std::make_shared<simdev::Event>());
    try {  // for a deleter
      simdev::record(*events->back(), number_of(stream));
    } catch (const std::exception&) {
    }
  }
  bool query_event(std::shared_ptr<simdev::Event>& event) override { return simdev::query(*event); }
  Stream get_current_stream() const override {
    return stream_of(current_stream[current_device], current_device);
  }
  bool stream_is_capturing(Stream) const override { return false; }
};

void free_pinned(void* context);
using HostMemory = at::CachingHostAllocatorInterface<HostImpl, free_pinned>;
HostMemory& host_memory() {
  static auto* const made = new HostMemory;
  return *made;
}
void free_pinned(void* context) {
  if (!simdev::is_forked()) host_memory().free(context);
}
const bool host_allocator_set = [] {
  at::setHostAllocator(kSim, &host_memory());
  return true;
}();

// ---------------------------------------------------------------------------- hooks

void resize_storage(c10::StorageImpl* storage, size_t bytes);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return simdev::kDevices; }
  void setCurrentDevice(DeviceIndex i) const override {
    check_index(i);
    current_device = i;
  }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    return std::exchange(current_device, i);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override {
    return std::exchange(current_device, i);
  }
  bool isPinnedPtr(const void* p) const override { return simdev::is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory(); }
  Device getDeviceFromPtr(void* p) const override {
    return Device(kSim, static_cast<DeviceIndex>(simdev::device_of(p)));
  }
  // Operators run on the CPU in the end, with its generator.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
const bool hooks_set = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---------------------------------------------------------------------------- memory of tensors

bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kSim; }
int stream_for(const Tensor& t) { return current_stream[t.device().index()]; }

simdev::Range range_of(const Tensor& t, bool write) {
  if (t.numel() == 0) return {nullptr, 0, write};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return {t.const_data_ptr(), static_cast<size_t>(last + 1) * t.itemsize(), write};
}

// A CPU tensor over the device's own mapping; it owns nothing.
Tensor over(const Tensor& t) {
  void* data = t.numel() == 0 ? nullptr : simdev::reach(t.const_data_ptr());
  return at::from_blob(data, t.sizes(), t.strides(),
                       at::TensorOptions().dtype(t.scalar_type()).device(c10::kCPU));
}

Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<Device> device,
                           std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Device(kSim)));
  return at::detail::empty_generic(size, &device_memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(Device(kSim)));
  return at::detail::empty_strided_generic(size, stride, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const c10::DeviceGuard guard(storage->device());
  DataPtr fresh = device_memory().allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0) device_memory().copy_data(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const size_t need = static_cast<size_t>(self.storage_offset() + impl->numel()) * self.itemsize();
  if (need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  return self;
}

// ---------------------------------------------------------------------------- copies

bool plain_pair(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense() && !a.is_conj() &&
         !b.is_conj();
}

void to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  const int stream = stream_for(to);
  const size_t bytes = to.nbytes();
  const bool pinned = simdev::is_pinned(from.const_data_ptr());
  if (pinned && plain_pair(from, to)) {
    const void* source = from.const_data_ptr();
    void* target = to.data_ptr();
    const simdev::Range read{source, bytes, false};
    simdev::push(
        stream, "copy to the device", {read, {target, bytes, true}}, bytes,
        [=] { std::memcpy(simdev::reach(target), simdev::reach(source), bytes); }, &read);
    host_memory().record_event(const_cast<void*>(source), from.storage().data_ptr().get_context(),
                               stream_of(stream, to.device().index()));
    if (!non_blocking) simdev::synchronize(stream);
    return;
  }
  // From pageable memory the call returns when the source has been read.
  const Tensor source = pinned ? from.clone() : from;
  const Tensor target = over(to);
  simdev::push(stream, "copy from pageable memory", {range_of(to, true)}, bytes, [source, target] {
    const at::NoGradGuard no_grad;
    target.copy_(source);
  });
  simdev::synchronize(stream);
}

void to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const int stream = stream_for(from);
  const size_t bytes = from.nbytes();
  if (simdev::is_pinned(to.const_data_ptr()) && plain_pair(from, to)) {
    const void* source = from.const_data_ptr();
    void* target = to.data_ptr();
    const simdev::Range write{target, bytes, true};
    // An earlier copy of the stream may still have to read it.
    if (!simdev::is_guarded(target, bytes)) std::memset(simdev::reach(target), 0xff, bytes);
    simdev::push(
        stream, "copy to the host", {{source, bytes, false}, write}, bytes,
        [=] { std::memcpy(simdev::reach(target), simdev::reach(source), bytes); }, &write);
    host_memory().record_event(target, to.storage().data_ptr().get_context(),
                               stream_of(stream, from.device().index()));
    if (!non_blocking) simdev::synchronize(stream);
    return;
  }
  const Tensor source = over(from);
  auto between = std::make_shared<Tensor>();
  simdev::push(stream, "copy to pageable memory", {range_of(from, false)}, bytes,
               [source, between] {
                 const at::NoGradGuard no_grad;
                 *between = source.clone();
               });
  simdev::synchronize(stream);
  to.copy_(*between);
}

void on_device(const Tensor& from, const Tensor& to) {
  const int reader = stream_for(from), writer = stream_for(to);
  if (reader != writer) {
    simdev::Event ready;
    simdev::record(ready, reader);
    simdev::block(ready, writer);
  }
  const Tensor source = over(from), target = over(to);
  simdev::push(writer, "copy", {range_of(from, false), range_of(to, true)}, to.nbytes(),
               [source, target] {
                 const at::NoGradGuard no_grad;
                 target.copy_(source);
               });
  if (reader != writer) {
    simdev::Event done;
    simdev::record(done, writer);
    simdev::block(done, reader);
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const simdev::Inside inside;
  if (to.numel() == 0) return to;
  const Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (is_sim(source) && is_sim(to)) {
    on_device(source, to);
  } else if (is_sim(to)) {
    to_device(source, to, non_blocking);
  } else {
    to_host(source, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  const simdev::Inside inside;
  const int stream = stream_for(self);
  simdev::push(stream, "item", {range_of(self, false)}, 0, [] {});
  simdev::synchronize(stream);
  return over(self).item();
}

void record_stream(Tensor& self, Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------------------- all other operators

// The value with every tensor in it replaced, and devices too.
template <typename Function>
c10::IValue mapped(const c10::IValue& value, Device device, const Function& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : value.toTensorVector()) out.push_back(function(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
      out.push_back(t ? std::optional(function(*t)) : t);
    }
    return out;
  }
  if (value.isDevice()) return device;
  if (value.isGenerator()) return c10::IValue();
  return value;
}

Tensor as_meta(const Tensor& t) {
  if (!t.defined()) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
}

// What meta tensors tell of a call depends on this; nothing where a value has no short name.
std::optional<std::string> signature(const c10::OperatorHandle& op,
                                     const std::vector<c10::IValue>& arguments) {
  std::ostringstream text;
  const auto put = [&](const Tensor& t) {
    if (!t.defined()) {
      text << "no;";
      return t;
    }
    text << t.scalar_type() << t.sizes() << t.strides() << (t.dim() == 0 && !is_sim(t)) << ';';
    return t;
  };
  text << op.operator_name() << c10::get_default_dtype();
  for (const c10::IValue& value : arguments) {
    text << '|' << value.tagKind();
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      mapped(value, c10::kCPU, put);
    } else if (value.isNone() || value.isBool() || value.isInt() || value.isDouble() ||
               value.isIntList() || value.isDoubleList() || value.isString() || value.isDevice()) {
      text << value;
    } else {
      return std::nullopt;
    }
  }
  return text.str();
}

// What meta tensors told of calls before: many of their operators are Python's.
struct Told {
  bool tells = false;
  torch::jit::Stack shapes;
};
std::mutex told_mutex;
std::unordered_map<std::string, Told>& told() {
  static auto* const all = new std::unordered_map<std::string, Told>;
  return *all;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// One call of an operator: its arguments, and its results once their shapes are known.
struct Call {
  const c10::OperatorHandle& op;
  std::vector<c10::IValue> arguments;
  DeviceIndex device = -1;
  std::vector<simdev::Range> touched;
  torch::jit::Stack shapes, results;
  std::vector<std::pair<size_t, Tensor>> made;  // results that are copied to, over device memory

  void look() {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool write = writes(op.schema().arguments()[i]);
      mapped(arguments[i], c10::kCPU, [&](const Tensor& t) {
        if (is_sim(t)) {
          if (device < 0) device = t.device().index();
          touched.push_back(range_of(t, write));
        }
        return t;
      });
      if (device < 0 && arguments[i].isDevice()) device = index_of(arguments[i].toDevice());
    }
    if (device < 0) device = current_device;
  }

  // Whether the shapes of the results are known before the call.
  bool tell() {
    const std::optional<std::string> call = signature(op, arguments);
    if (call) {
      const std::lock_guard lock(told_mutex);
      if (const auto found = told().find(*call); found != told().end()) {
        shapes = found->second.shapes;
        return found->second.tells;
      }
    }
    const size_t before = touched.size();
    const bool tells = ask();
    if (call && touched.size() == before) {  // no out= has grown
      const std::lock_guard lock(told_mutex);
      told()[*call] = {tells, shapes};
    }
    return tells;
  }

  bool ask() {
    for (const c10::IValue& value : arguments) {
      shapes.push_back(mapped(value, c10::kMeta, as_meta));
    }
    const std::vector<c10::IValue> given(shapes);
    try {
      op.callBoxed(&shapes);
    } catch (const c10::Error&) {
      return false;
    }
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (!shapes[i].isTensor() && !shapes[i].isTensorList()) return false;
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      // An out= may have grown.
      if (writes(op.schema().arguments()[i]) && arguments[i].isTensor() &&
          given[i].toTensor().defined() &&
          given[i].toTensor().sizes() != arguments[i].toTensor().sizes()) {
        resize_(arguments[i].toTensor(), given[i].toTensor().sizes(), std::nullopt);
        touched.push_back(range_of(arguments[i].toTensor(), true));
      }
    }
    return true;
  }

  Tensor make(size_t place, const Tensor& shape) {
    if (!shape.defined()) return shape;
    Tensor t = empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), {},
                             Device(kSim, device), {});
    touched.push_back(range_of(t, true));
    made.emplace_back(place, over(t));
    return t;
  }

  void allocate() {
    const auto& schema = op.schema();
    size_t place = 0;  // among the tensors of all results
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto* alias = schema.returns()[i].alias_info();
      if (!alias) {
        if (shapes[i].isTensor()) {
          results.push_back(make(place++, shapes[i].toTensor()));
          continue;
        }
        c10::List<Tensor> list;
        for (const Tensor& t : shapes[i].toTensorVector()) list.push_back(make(place++, t));
        results.push_back(list);
        continue;
      }
      place += shapes[i].isTensor() ? 1 : shapes[i].toTensorVector().size();
      for (size_t j = 0; j < arguments.size(); ++j) {
        const auto* other = schema.arguments()[j].alias_info();
        if (!other || other->beforeSets() != alias->beforeSets()) continue;
        results.push_back(alias->isWrite() ? arguments[j] : view(arguments[j], shapes[i]));
        break;
      }
    }
    TORCH_CHECK(results.size() == shapes.size(), "simdev: ", schema.name(), ": results unknown");
  }

  static c10::IValue view(const c10::IValue& of, const c10::IValue& shape) {
    const auto one = [&](const Tensor& t) {
      const Tensor& base = of.toTensor();
      return at::native::as_strided_tensorimpl(base, t.sizes(), t.strides(),
                                               base.storage_offset() + t.storage_offset());
    };
    return mapped(shape, c10::kCPU, one);
  }

  void enqueue() {
    torch::jit::Stack late;
    for (const c10::IValue& value : arguments) {
      late.push_back(mapped(value, c10::kCPU, [](const Tensor& t) {
        return is_sim(t) ? over(t) : t.defined() ? t.clone() : t;
      }));
    }
    size_t bytes = 0;
    for (const simdev::Range& range : touched) bytes += range.bytes;
    simdev::push(current_stream[device], op.schema().name(), touched, bytes,
                 [op = op, late = std::move(late), made = std::move(made)]() mutable {
                   const at::NoGradGuard no_grad;
                   const at::AutoDispatchBelowADInplaceOrView below;
                   op.callBoxed(&late);
                   std::vector<Tensor> flat;
                   for (const c10::IValue& value : late) {
                     mapped(value, c10::kCPU, [&](const Tensor& t) {
                       flat.push_back(t);
                       return t;
                     });
                   }
                   for (auto& [place, target] : made) target.copy_(flat.at(place));
                 });
  }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const simdev::Inside inside;
  const at::AutoDispatchBelowADInplaceOrView below;
  const size_t count = op.schema().arguments().size();
  Call call{op, {stack->end() - static_cast<ptrdiff_t>(count), stack->end()}};
  call.look();
  if (!call.tell()) {
    simdev::synchronize(current_stream[call.device]);
    at::native::cpu_fallback(op, stack);
    return;
  }
  call.allocate();
  call.enqueue();
  torch::jit::drop(*stack, count);
  for (c10::IValue& value : call.results) stack->push_back(std::move(value));
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp);
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp);
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp);
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("record_stream", record_stream);
  // They would look for a kernel of the device by another name.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
