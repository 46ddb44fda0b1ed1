// The few functions of the driver that torch calls.
extern "C" int cudasim_active(int);
#define SIMULATED extern "C" __attribute__((visibility("default")))

SIMULATED int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = cudasim_active(device);
  return 0;
}
SIMULATED int cuDevicePrimaryCtxRetain(void** context, int) { return *context = (void*)1, 0; }
SIMULATED int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
SIMULATED int cuCtxSetCurrent(void*) { return 0; }
SIMULATED int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
SIMULATED int cuGetErrorString(int, const char** text) { return *text = "an error of the simulated driver", 0; }
