// Devices, settings, errors, and what the simulated kernels call.
#include "simulation.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace sim {
static Settings read_settings() {
  auto text = [](const char* name, const char* otherwise) { return getenv(name) && *getenv(name) ? getenv(name) : otherwise; };
  std::string log = text("CUDASIM_LOG", "");
  auto logs = [&log](const char* what) { return log.find(what) != std::string::npos; };
  return Settings{
      atoi(text("CUDASIM_DEVICES", "8")),
      strtoull(text("CUDASIM_MEMORY", "8589934592"), nullptr, 10),
      atof(text("CUDASIM_DELAY", "0.005")),
      atof(text("CUDASIM_HOST_DELAY", text("CUDASIM_DELAY", "0.005"))),
      atof(text("CUDASIM_HANG", "30")),
      atoi(text("CUDASIM_NCCL_MOST", "0")),
      std::string(text("CUDASIM_RACES", "1")) != "0",
      logs("streams"),
      logs("nccl"),
      logs("host"),
  };
}
static Settings current = read_settings();
const Settings& settings() { return current; }

int visible_devices() {
  const char* listed = getenv("CUDA_VISIBLE_DEVICES");
  if (!listed) return settings().devices;
  int n = 0;
  for (std::string rest = listed; !rest.empty();) {
    size_t comma = rest.find(',');
    std::string one = rest.substr(0, comma);
    if (one.empty() || one[0] == '-') break;  // what stands behind an invalid name is not seen
    n++;
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
  }
  return std::min(n, settings().devices);
}

static std::atomic<long> counted[Counts];
void count(Count which) { counted[which]++; }

static auto& last_error = *new std::string;
void set_last_error(const std::string& text) { last_error = text; }
}  // namespace sim

using namespace sim;
#define LOCK std::lock_guard<std::recursive_mutex> lock_(M)

// ---- for simulated_cuda and the tests
SIMULATED void cudasim_configure() { current = read_settings(); }
SIMULATED int cudasim_devices() { return settings().devices; }
SIMULATED long cudasim_count(int which) { return counted[which]; }
SIMULATED unsigned long cudasim_host_view(unsigned long p) { return (unsigned long)host_view((const void*)p); }
SIMULATED int cudasim_active(int device) {
  LOCK;
  return owns_memory(device) || has_run(device);
}
// Before a kernel of the host runs as one of the device: its stream's earlier work is done first. `lazy` is the first launch of a kernel
// under lazy loading, which may wait for the whole device. Null, or what is wrong with the order of its accesses.
SIMULATED const char* cudasim_kernel(void* stream, int device, int lazy, const char* name, int n, const unsigned long* addresses, const unsigned long* bytes,
                                     const unsigned char* writes) {
  static thread_local std::string error;
  int before = current_device;
  current_device = device;
  Stream* s = stream_of((cudaStream_t)stream);
  std::vector<Access> accesses;
  for (int i = 0; i < n; i++) accesses.push_back({(const void*)addresses[i], bytes[i], writes[i] != 0});
  error = launch(s, name, accesses);
  if (lazy) drain_device(device, "the first launch of a kernel, which under lazy loading may wait for the device");
  else drain(s, "a kernel behind other work of its stream");
  current_device = before;
  return error.empty() ? nullptr : error.c_str();
}

// ---- devices
SIMULATED cudaError_t cudaGetDeviceCount(int* n) {
  *n = visible_devices();
  return *n ? cudaSuccess : cudaErrorNoDevice;
}
SIMULATED cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
SIMULATED cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= visible_devices()) return cudaErrorInvalidDevice;
  current_device = device;
  start_clockwork();
  return cudaSuccess;
}
SIMULATED cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }
static const int MULTIPROCESSORS = 132, SHARED_MEMORY = 232448, CAPABILITY = 9;
SIMULATED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "simulated GPU");
  p->totalGlobalMem = settings().memory;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = SHARED_MEMORY;
  p->sharedMemPerMultiprocessor = SHARED_MEMORY + 1024;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = CAPABILITY;
  p->multiProcessorCount = MULTIPROCESSORS;
  p->maxThreadsPerMultiProcessor = 2048;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = p->streamPrioritiesSupported = 1;
  p->asyncEngineCount = 3;
  p->pciBusID = device + 1;
  p->uuid.bytes[0] = (char)device;
  return cudaSuccess;
}
SIMULATED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
    case cudaDevAttrComputeCapabilityMajor: *value = CAPABILITY; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_MEMORY; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
SIMULATED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
SIMULATED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
SIMULATED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
SIMULATED cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int device) { return snprintf(text, n, "0000:%02x:00.0", device + 1), cudaSuccess; }
SIMULATED cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
SIMULATED cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
SIMULATED cudaError_t cudaProfilerStart() { return cudaSuccess; }
SIMULATED cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- errors
SIMULATED cudaError_t cudaGetLastError() { return cudaSuccess; }
SIMULATED cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
SIMULATED const char* cudaGetErrorString(cudaError_t e) {
  static thread_local char text[1024];
  if (e == cudaErrorUnknown && !last_error.empty()) snprintf(text, sizeof text, "%s", last_error.c_str());
  else if (e == cudaErrorNoDevice) snprintf(text, sizeof text, "no CUDA-capable device is detected");
  else if (e == cudaErrorMemoryAllocation) snprintf(text, sizeof text, "out of memory");
  else snprintf(text, sizeof text, "simulated CUDA error %d", (int)e);
  return text;
}
SIMULATED const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }

// ---- the device code that torch carries: none of it runs here, and a launch of it is an error
SIMULATED cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  static thread_local bool told = false;
  if (!told) fprintf(stderr, "[cudasim %d] a kernel of real device code (%p) was launched: it does not run here\n", getpid(), function);
  told = true;
  set_last_error("a kernel of real device code was launched, which the simulation cannot run");
  return cudaErrorUnknown;
}
SIMULATED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* f, void** a) { return cudaLaunchKernel(f, dim3(), dim3(), a, 0, nullptr); }
SIMULATED cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3, dim3, void** a, size_t, cudaStream_t) { return cudaLaunchKernel(f, dim3(), dim3(), a, 0, nullptr); }
SIMULATED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* f) { return *kernel = (cudaKernel_t)f, cudaSuccess; }
SIMULATED cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void** a, size_t s, cudaStream_t h) { return cudaLaunchKernel((const void*)f, g, b, a, s, h); }
SIMULATED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  return cudaSuccess;
}
SIMULATED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
SIMULATED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { return *n = 2, cudaSuccess; }
SIMULATED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { return *n = 2, cudaSuccess; }
static void* module[4];
SIMULATED void** __cudaRegisterFatBinary(void*) { return module; }
SIMULATED void __cudaRegisterFatBinaryEnd(void**) {}
SIMULATED void __cudaUnregisterFatBinary(void**) {}
SIMULATED void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
SIMULATED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
SIMULATED char __cudaInitModule(void**) { return 1; }
static thread_local struct { dim3 grid, block; size_t shared; void* stream; } pushed;
SIMULATED unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, void* h) { return pushed = {g, b, s, h}, 0; }
SIMULATED cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* s, void* h) {
  *g = pushed.grid;
  *b = pushed.block;
  *s = pushed.shared;
  *(void**)h = pushed.stream;
  return cudaSuccess;
}
static cudaError_t no_entry(void** p, cudaDriverEntryPointQueryResult* r) {
  *p = nullptr;
  if (r) *r = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorNotSupported;
}
SIMULATED cudaError_t cudaGetDriverEntryPoint(const char*, void** p, unsigned long long, cudaDriverEntryPointQueryResult* r) { return no_entry(p, r); }
SIMULATED cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** p, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) { return no_entry(p, r); }
