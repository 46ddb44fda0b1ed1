// Memory of the devices, pinned memory of the host, and copies.
//
// A device address is mapped without any right, so that a host that reads it faults; the same pages are readable and writable at a
// fixed distance, which only the simulation uses.
#include "simulation.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace sim {
#define LOCK std::lock_guard<std::recursive_mutex> lock_(M)
static const uintptr_t FIRST = 0x200000000000ull, DISTANCE = 0x100000000000ull, PAGE = 0x1000, SPACING = 0x200000;
struct Block { size_t size; int device; };
static auto& device_blocks = *new std::map<uintptr_t, Block>;
static auto& pinned_blocks = *new std::map<uintptr_t, size_t>;
static uintptr_t next_address = FIRST;
static size_t used[64];

static size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

static const std::pair<const uintptr_t, Block>* block_of(const void* p) {
  auto it = device_blocks.upper_bound((uintptr_t)p);
  if (it == device_blocks.begin()) return nullptr;
  --it;
  return (uintptr_t)p < it->first + it->second.size ? &*it : nullptr;
}
bool is_device(const void* p) {
  LOCK;
  return block_of(p) != nullptr;
}
bool is_pinned(const void* p) {
  LOCK;
  auto it = pinned_blocks.upper_bound((uintptr_t)p);
  if (it == pinned_blocks.begin()) return false;
  --it;
  return (uintptr_t)p < it->first + it->second;
}
void* host_view(const void* p) { return is_device(p) ? (void*)((uintptr_t)p + DISTANCE) : (void*)p; }
size_t free_memory(int device) { return settings().memory - used[device]; }
bool owns_memory(int device) { return used[device] > 0; }

static cudaError_t allocate(void** p, size_t size) {
  LOCK;
  start_clockwork();
  size_t n = rounded(size ? size : 1, PAGE);
  *p = nullptr;
  if (used[current_device] + n > settings().memory) return cudaErrorMemoryAllocation;
  int file = memfd_create("cudasim", 0);
  if (file < 0 || ftruncate(file, n)) return cudaErrorMemoryAllocation;
  uintptr_t at = next_address;
  next_address += rounded(n, SPACING);
  void* address = mmap((void*)at, n, PROT_NONE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
  void* view = mmap((void*)(at + DISTANCE), n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
  close(file);
  if (address != (void*)at || view != (void*)(at + DISTANCE)) return cudaErrorMemoryAllocation;
  memset(view, 0xff, n);  // NaN in every floating-point type
  device_blocks[at] = {n, current_device};
  used[current_device] += n;
  *p = address;
  return cudaSuccess;
}

static bool pageable(const void* p) { return !is_device(p) && !is_pinned(p); }

// What an earlier copy on the same stream has put into [p, p + n) of pinned memory is there for the device, if not yet for the host.
static void show_device(Stream* s, const void* p, size_t n) {
  for (auto& [_, write] : s->unseen)
    if (!write->seen && (const char*)write->to < (const char*)p + n && (const char*)p < (const char*)write->to + write->bytes.size()) {
      memcpy(write->to, write->bytes.data(), write->bytes.size());
      write->seen = true;
    }
}

struct Copy { void* to; const void* from; size_t width, rows, to_pitch, from_pitch; };

static size_t extent(size_t pitch, const Copy& c) { return c.rows ? (c.rows - 1) * pitch + c.width : 0; }

static void copy_now(Stream* s, const Copy& c) {
  if (is_pinned(c.from)) show_device(s, c.from, extent(c.from_pitch, c));
  static uint64_t number = 0;
  bool late = is_pinned(c.to) && is_device(c.from);
  for (size_t row = 0; row < c.rows; row++) {
    char* to = (char*)c.to + row * c.to_pitch;
    const char* from = (const char*)host_view(c.from) + row * c.from_pitch;
    if (late) s->unseen.emplace(number++, std::make_shared<HostWrite>(HostWrite{to, std::string(from, c.width)}));
    else memmove(host_view(to), from, c.width);
  }
}

static cudaError_t copy(const Copy& c, cudaStream_t handle) {
  Stream* s = stream_of(handle);
  char name[120];
  auto side = [](const void* p) { return is_device(p) ? "device" : is_pinned(p) ? "pinned" : "pageable"; };
  snprintf(name, sizeof name, "copy of %zu bytes from %s to %s memory", c.width * c.rows, side(c.from), side(c.to));
  std::vector<Access> accesses = {{c.from, extent(c.from_pitch, c), false}, {c.to, extent(c.to_pitch, c), true}};
  if (!launch(s, name, accesses).empty()) return cudaErrorUnknown;
  if (pageable(c.from) && is_device(c.to)) {  // the host's bytes are taken at once
    auto bytes = std::make_shared<std::string>((const char*)c.from, extent(c.from_pitch, c));
    Copy staged = c;
    staged.from = bytes->data();
    enqueue(s, name, [=] {
      (void)bytes;
      copy_now(s, staged);
      return Outcome::Done;
    });
    count(PageableCopies);  // a GPU may still read the host's memory, so the driver waits for all but small copies
  } else {
    enqueue(s, name, [=] { return copy_now(s, c), Outcome::Done; });
    if (pageable(c.to)) {
      count(PageableCopies);
      drain(s, "a copy to pageable memory");
      host_saw(s->clock);
    }
  }
  return cudaSuccess;
}

static cudaError_t fill(void* p, int value, size_t n, cudaStream_t handle) {
  Stream* s = stream_of(handle);
  if (!launch(s, "memset", {{p, n, true}}).empty()) return cudaErrorUnknown;
  enqueue(s, "memset", [=] { return memset(host_view(p), value, n), Outcome::Done; });
  return cudaSuccess;
}
}  // namespace sim

using namespace sim;

SIMULATED cudaError_t cudaMalloc(void** p, size_t size) { return allocate(p, size); }
SIMULATED cudaError_t cudaMallocAsync(void** p, size_t size, cudaStream_t) { return allocate(p, size); }
SIMULATED cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  count(Frees);
  drain_device(current_device, "cudaFree, which waits for the device");
  LOCK;
  auto it = device_blocks.find((uintptr_t)p);
  if (it == device_blocks.end()) return cudaErrorInvalidValue;
  forget(p, it->second.size);
  munmap(p, it->second.size);
  munmap((void*)((uintptr_t)p + DISTANCE), it->second.size);
  used[it->second.device] -= it->second.size;
  device_blocks.erase(it);
  return cudaSuccess;
}
SIMULATED cudaError_t cudaHostAlloc(void** p, size_t size, unsigned) {
  count(HostAllocations);
  if (settings().log_host) fprintf(stderr, "[cudasim %d] cudaHostAlloc %zu\n", getpid(), size);
  LOCK;
  *p = aligned_alloc(PAGE, rounded(size, PAGE));
  memset(*p, 0xff, rounded(size, PAGE));
  pinned_blocks[(uintptr_t)*p] = size;
  return cudaSuccess;
}
SIMULATED cudaError_t cudaMallocHost(void** p, size_t size) { return cudaHostAlloc(p, size, 0); }
static void unpin(void* p) {
  drain_device(-1, "cudaFreeHost or cudaHostUnregister, which wait for the devices");
  LOCK;
  for (Stream* s : streams) show_host(s->unseen);
  auto it = pinned_blocks.find((uintptr_t)p);
  if (it == pinned_blocks.end()) return;
  forget(p, it->second);
  pinned_blocks.erase(it);
}
SIMULATED cudaError_t cudaFreeHost(void* p) { return unpin(p), free(p), cudaSuccess; }
SIMULATED cudaError_t cudaHostRegister(void* p, size_t size, unsigned) {
  if (settings().log_host) fprintf(stderr, "[cudasim %d] cudaHostRegister %zu\n", getpid(), size);
  LOCK;
  pinned_blocks[(uintptr_t)p] = size;
  return cudaSuccess;
}
SIMULATED cudaError_t cudaHostUnregister(void* p) { return unpin(p), cudaSuccess; }
SIMULATED cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
SIMULATED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  LOCK;
  *total = settings().memory;
  *free = free_memory(current_device);
  return cudaSuccess;
}
SIMULATED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  LOCK;
  memset(a, 0, sizeof *a);
  if (auto* block = block_of(p)) {
    a->type = cudaMemoryTypeDevice;
    a->device = block->second.device;
    a->devicePointer = (void*)p;
  } else if (is_pinned(p)) {
    a->type = cudaMemoryTypeHost;
    a->device = current_device;
    a->devicePointer = a->hostPointer = (void*)p;
  } else {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -1;
    a->hostPointer = (void*)p;
  }
  return cudaSuccess;
}
SIMULATED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t h) { return copy({to, from, n, 1, n, n}, h); }
SIMULATED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t h) { return copy({to, from, n, 1, n, n}, h); }
SIMULATED cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows, cudaMemcpyKind, cudaStream_t h) {
  return copy({to, from, width, rows, to_pitch, from_pitch}, h);
}
SIMULATED cudaError_t cudaStreamSynchronize(cudaStream_t);
SIMULATED cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  cudaError_t error = copy({to, from, n, 1, n, n}, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}
SIMULATED cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t h) { return fill(p, value, n, h); }
SIMULATED cudaError_t cudaMemset(void* p, int value, size_t n) {
  cudaError_t error = fill(p, value, n, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}
