// Streams and events: queues that run as late as they are allowed to.
#include "simulation.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {
std::recursive_mutex& M = *new std::recursive_mutex;
thread_local int current_device = 0;
std::set<Stream*>& streams = *new std::set<Stream*>;

static Stream* const default_streams = new Stream[64];
static int made_streams = 64;  // the ids below are the default streams'
static double last_progress = now();
static bool clockwork = false;
#define LOCK std::lock_guard<std::recursive_mutex> lock_(M)

void note_progress() { last_progress = now(); }

Stream* stream_of(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (Stream*)handle;
  LOCK;
  Stream* s = &default_streams[current_device];
  s->device = s->id = current_device;
  streams.insert(s);
  return s;
}

bool has_run(int device) { return streams.count(&default_streams[device]) > 0; }

void enqueue(Stream* s, std::string name, std::function<Outcome()> run) {
  LOCK;
  if (settings().log_streams) fprintf(stderr, "[cudasim %d] device %d stream %d <- %s\n", getpid(), s->device, s->id, name.c_str());
  s->queue.push_back(Operation{std::move(name), std::move(run)});
}

// Runs the first operation of a stream; whether it is done.
static bool run_first(Stream* s) {
  s->running = true;
  Outcome outcome = s->queue.front().run();
  s->running = false;
  if (outcome == Outcome::Blocked) return false;
  s->queue.pop_front();
  note_progress();
  return true;
}

bool advance(Stream* s) {
  LOCK;
  bool any = false;
  while (!s->queue.empty() && !s->running && run_first(s)) any = true;
  return any;
}

static void advance_all() {
  for (Stream* s : streams) advance(s);
}

void hang(const char* why) {
  fprintf(stderr, "[cudasim %d] HANG in %s; the streams of this process wait at:\n", getpid(), why);
  for (Stream* s : streams)
    for (size_t i = 0; i < std::min<size_t>(s->queue.size(), 4); i++)
      fprintf(stderr, "[cudasim %d]   device %d stream %d, operation %zu: %s\n", getpid(), s->device, s->id, i + 1, s->queue[i].name.c_str());
  fflush(stderr);
  abort();
}

void wait_for(const std::function<bool()>& over, const char* why) {
  double start = now();
  for (useconds_t pause = 20;; pause = std::min<useconds_t>(pause * 2, 500)) {
    {
      LOCK;
      if (over()) return;
      advance_all();
      if (over()) return;
      if (now() - std::max(start, last_progress) > settings().patience) hang(why);
    }
    usleep(pause);
  }
}

void drain(Stream* s, const char* why) {
  {
    LOCK;
    advance(s);  // first what `s` needs; the others stay behind as long as they can, unless this waits for another rank
    if (s->queue.empty()) return;
  }
  wait_for([s] { return s->queue.empty(); }, why);
}

void drain_device(int device, const char* why) {
  auto empty = [device] {
    return std::all_of(streams.begin(), streams.end(), [device](Stream* s) { return (device >= 0 && s->device != device) || s->queue.empty(); });
  };
  wait_for(empty, why);
}

void inherit(HostWrites& into, const HostWrites& from) {
  for (auto& [number, write] : from)
    if (!write->seen) into.emplace(number, write);
}

void show_host(HostWrites& writes) {
  for (auto& [_, write] : writes)
    if (!write->seen) {
      memcpy(write->to, write->bytes.data(), write->bytes.size());
      write->seen = true;
      write->bytes.clear();
    }
  writes.clear();
}

static void run_overdue(Stream* s) {
  double before = now() - settings().delay, copied_before = now() - settings().host_delay;
  while (!s->queue.empty() && !s->running && s->queue.front().born < before && run_first(s)) {
  }
  HostWrites due;
  for (auto it = s->unseen.begin(); it != s->unseen.end();)
    if (it->second->seen || it->second->born < copied_before) {
      due.insert(*it);
      it = s->unseen.erase(it);
    } else {
      ++it;
    }
  show_host(due);
}

static void* run_clockwork(void*) {
  while (true) {
    usleep((useconds_t)(std::min(std::max(settings().delay, 0.0005), 0.1) * 1e6 / 2));
    LOCK;
    for (Stream* s : streams) run_overdue(s);
  }
  return nullptr;
}

void start_clockwork() {
  LOCK;
  if (clockwork) return;
  clockwork = true;
  pthread_t thread;
  pthread_create(&thread, nullptr, run_clockwork, nullptr);
  pthread_detach(thread);
}

// A forked child has no thread but the one that forked.
__attribute__((constructor)) static void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { clockwork = false; });
}

// What the host learns by waiting for a stream: all that was queued on it.
static void host_waited(Stream* s) {
  LOCK;
  host_saw(s->clock);
  show_host(s->unseen);
}
static void host_waited(Recording& r) {
  LOCK;
  host_saw(r.clock);
  show_host(r.unseen);
}

// NCCL's watchdog asks for events now and then: what it learns says nothing of what the program has waited for.
static bool is_watchdog() {
  static thread_local const bool found = [] {
    char name[16] = "";
    return pthread_getname_np(pthread_self(), name, sizeof name) == 0 && strncmp(name, "pt_nccl_", 8) == 0;
  }();
  return found;
}
}  // namespace sim

using namespace sim;

SIMULATED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  LOCK;
  auto* s = new Stream;
  s->device = current_device;
  s->id = made_streams++;
  s->priority = priority;
  streams.insert(s);
  *handle = (cudaStream_t)s;
  return cudaSuccess;
}
SIMULATED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned) { return cudaStreamCreateWithPriority(handle, 0, 0); }
SIMULATED cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
SIMULATED cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
SIMULATED cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  count(StreamSyncs);
  Stream* s = stream_of(handle);
  drain(s, "cudaStreamSynchronize");
  host_waited(s);
  return cudaSuccess;
}
SIMULATED cudaError_t cudaStreamQuery(cudaStream_t handle) {
  LOCK;
  Stream* s = stream_of(handle);
  if (!s->queue.empty()) return cudaErrorNotReady;
  host_waited(s);
  return cudaSuccess;
}
SIMULATED cudaError_t cudaDeviceSynchronize() {
  count(DeviceSyncs);
  drain_device(current_device, "cudaDeviceSynchronize");
  LOCK;
  for (Stream* s : streams)
    if (s->device == current_device) host_waited(s);
  return cudaSuccess;
}
SIMULATED cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) { return *priority = stream_of(handle)->priority, cudaSuccess; }
SIMULATED cudaError_t cudaStreamGetFlags(cudaStream_t, unsigned* flags) { return *flags = cudaStreamNonBlocking, cudaSuccess; }
SIMULATED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { return *status = cudaStreamCaptureStatusNone, cudaSuccess; }
SIMULATED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                               const cudaGraphEdgeData**, size_t*) {
  if (id) *id = 0;
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
SIMULATED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
SIMULATED cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t f, void* data) {
  enqueue(stream_of(handle), "a function of the host", [=] { return f(data), Outcome::Done; });
  return cudaSuccess;
}

SIMULATED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return *e = (cudaEvent_t) new Event, cudaSuccess; }
SIMULATED cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
SIMULATED cudaError_t cudaEventDestroy(cudaEvent_t e) { return delete (Event*)e, cudaSuccess; }
SIMULATED cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t handle) {
  LOCK;
  Stream* s = stream_of(handle);
  auto r = std::make_shared<Recording>();
  r->clock = s->clock;
  join(r->clock, host_clock());
  *(Event*)e = Event{r, s};
  auto record = [r, s] {
    r->done = true;
    r->time = now();
    inherit(r->unseen, s->unseen);
    return Outcome::Done;
  };
  enqueue(s, "record an event", record);  // not at once, even if nothing is before it: who asks for it must wait for it
  return cudaSuccess;
}
SIMULATED cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t handle, unsigned) { return cudaEventRecord(e, handle); }
SIMULATED cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t e, unsigned) {
  LOCK;
  auto r = ((Event*)e)->recording;
  Stream *on = ((Event*)e)->stream, *s = stream_of(handle);
  if (!r || s == on) return cudaSuccess;
  join(s->clock, r->clock);
  if (r->done) return inherit(s->unseen, r->unseen), cudaSuccess;
  enqueue(s, "wait for an event of stream " + std::to_string(on->id), [=] {
    while (!r->done && advance(on)) {  // what it waits for runs now, as late as it may
    }
    if (!r->done) return Outcome::Blocked;
    inherit(s->unseen, r->unseen);
    return Outcome::Done;
  });
  return cudaSuccess;
}
SIMULATED cudaError_t cudaEventQuery(cudaEvent_t e) {
  LOCK;
  auto r = ((Event*)e)->recording;
  if (r && !r->done) return cudaErrorNotReady;
  if (r && !is_watchdog()) host_waited(*r);
  return cudaSuccess;
}
SIMULATED cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  count(EventSyncs);
  auto r = ((Event*)e)->recording;
  Stream* on = ((Event*)e)->stream;
  if (!r) return cudaSuccess;
  {
    LOCK;
    while (!r->done && advance(on)) {
    }
  }
  wait_for([r] { return r->done; }, "cudaEventSynchronize");
  host_waited(*r);
  return cudaSuccess;
}
SIMULATED cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  LOCK;
  auto x = ((Event*)a)->recording, y = ((Event*)b)->recording;
  if (!x || !y) return cudaErrorInvalidResourceHandle;
  if (!x->done || !y->done) return cudaErrorNotReady;
  return *ms = (float)((y->time - x->time) * 1e3), cudaSuccess;
}
