// The simulated device: what the parts of the simulation share. See ../README.md.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define SIMULATED extern "C" __attribute__((visibility("default")))

namespace sim {

// ---- settings: environment variables CUDASIM_*, read when the library is loaded and again in a forked child
struct Settings {
  int devices;           // CUDASIM_DEVICES: how many GPUs the machine has
  size_t memory;         // CUDASIM_MEMORY: bytes of each
  double delay;          // CUDASIM_DELAY: seconds for which an operation of a stream that nobody waits for is left undone
  double host_delay;     // CUDASIM_HOST_DELAY: seconds after which the host sees a copy that it has not waited for; CUDASIM_DELAY if not set
  double patience;       // CUDASIM_HANG: seconds without any progress after which a wait is a hang
  int resident;          // CUDASIM_NCCL_MOST: how many NCCL kernels fit on a device together; 0 is no limit
  bool races;            // CUDASIM_RACES: whether an access that is ordered behind no earlier one is an error
  bool log_streams, log_nccl, log_host;  // CUDASIM_LOG: a list of streams, nccl, host
};
const Settings& settings();
int visible_devices();  // of them, what CUDA_VISIBLE_DEVICES allows

// ---- time
inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void note_progress();

// ---- happens-before: for each stream, the operation of every other stream that has surely ended before its next one begins
using Clock = std::map<int, uint64_t>;
void join(Clock& into, const Clock& other);

// ---- streams
enum class Outcome { Done, Blocked };
struct Operation { std::string name; std::function<Outcome()> run; double born = now(); };
// What a copy from a device to pinned memory has read, and the host does not see before it waits for the copy.
struct HostWrite { void* to; std::string bytes; double born = now(); bool seen = false; };
using HostWrites = std::map<uint64_t, std::shared_ptr<HostWrite>>;  // by their number, in the order in which they were made
struct Stream {
  int device = 0, id = 0, priority = 0;
  std::deque<Operation> queue;
  bool running = false;
  Clock clock;
  HostWrites unseen;
};
struct Recording { bool done = false; double time = 0; Clock clock; HostWrites unseen; };
struct Event { std::shared_ptr<Recording> recording; Stream* stream = nullptr; };

// What threads may still use while the process ends is never destroyed.
extern std::recursive_mutex& M;  // guards everything
extern thread_local int current_device;
extern std::set<Stream*>& streams;
Stream* stream_of(cudaStream_t handle);  // the default stream of the current device for none
void enqueue(Stream* s, std::string name, std::function<Outcome()> run);
bool advance(Stream* s);                 // run what can run; whether something did
void drain(Stream* s, const char* why);  // until it is empty; other streams run only what this one needs
void drain_device(int device, const char* why);  // a negative one: all
void wait_for(const std::function<bool()>& over, const char* why);
void show_host(HostWrites& writes);      // the host has waited for them
void inherit(HostWrites& into, const HostWrites& from);  // those that the host has not seen yet
[[noreturn]] void hang(const char* why);
bool has_run(int device);                // whether its default stream was ever used
void start_clockwork();                  // the thread that runs what has waited for longer than the delay

// ---- memory
bool is_device(const void* p);
bool is_pinned(const void* p);
void* host_view(const void* p);          // where this process may touch the bytes of a device address
size_t free_memory(int device);
bool owns_memory(int device);

// ---- races (races.cpp)
struct Access { const void* p; size_t bytes; bool write; };
// Orders one operation behind what its stream has done and seen; the error, empty if each access is ordered behind every earlier one
// that touched the same bytes (of the two at least one being a write).
std::string launch(Stream* s, const std::string& name, const std::vector<Access>& accesses);
void host_saw(const Clock& clock);       // the host has waited: what it starts from now on comes after
const Clock& host_clock();
void forget(const void* p, size_t bytes);
void set_last_error(const std::string& text);

// ---- counters, for tests
enum Count { StreamSyncs, EventSyncs, DeviceSyncs, Frees, HostAllocations, PageableCopies, Counts };
void count(Count which);
}  // namespace sim
