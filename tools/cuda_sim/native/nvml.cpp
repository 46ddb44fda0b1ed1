// The part of NVML with which torch counts devices without touching them, so that a process that has only counted can still fork.
#include <cstdio>
#define SIMULATED extern "C" __attribute__((visibility("default")))

SIMULATED int cudasim_devices();
SIMULATED int nvmlInit() { return 0; }
SIMULATED int nvmlInit_v2() { return 0; }
SIMULATED int nvmlShutdown() { return 0; }
SIMULATED int nvmlDeviceGetCount_v2(int* n) { return *n = cudasim_devices(), 0; }
SIMULATED int nvmlDeviceGetHandleByIndex_v2(int index, void** handle) { return *handle = (void*)(long)(index + 1), 0; }
SIMULATED int nvmlDeviceGetUUID(void* handle, char* text, unsigned length) {
  snprintf(text, length, "GPU-00000000-0000-0000-0000-%012ld", (long)handle - 1);
  return 0;
}
