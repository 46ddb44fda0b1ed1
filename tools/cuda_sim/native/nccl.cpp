// NCCL over files in shared memory: real bytes, real stream order, real rendezvous. What would hang on NCCL hangs here and says where.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include "arithmetic.hpp"
#include "simulation.hpp"

using namespace sim;
#define LOCK std::lock_guard<std::recursive_mutex> lock_(M)

struct ncclComm {
  int rank = 0, size = 0;
  std::string folder, name;  // name: what torch calls the group, and the ranks of the world in it
  uint64_t collectives = 0, launched = 0, serving = 0;
  std::map<int, uint64_t> sent, received;  // by peer
  bool aborted = false;
};

namespace {
enum Kind { AllReduce, Broadcast, Reduce, AllGather, ReduceScatter, AlltoAll, Gather, Scatter, Send, Recv };
const char* const KINDS[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter", "Send", "Recv"};
struct Task {
  ncclComm* comm;
  Kind kind;
  const void* in;
  void* out;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int root;  // or the peer
  uint64_t number;
  bool posted = false, done = false;
};
struct Header { int kind, type, op, root; uint64_t count; };  // must be equal on all ranks

// ---- files
std::string root_folder() { return getenv("CUDASIM_FOLDER") ? getenv("CUDASIM_FOLDER") : "/dev/shm/cudasim"; }
bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }
[[noreturn]] void fail(const std::string& why) {
  fprintf(stderr, "[cudasim %d] %s\n", getpid(), why.c_str());
  fflush(stderr);
  abort();
}
void put(const std::string& path, const std::string& bytes) {
  std::string part = path + ".part";
  int file = open(part.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  for (size_t at = 0; at < bytes.size();) {
    ssize_t written = write(file, bytes.data() + at, bytes.size() - at);
    if (written <= 0) fail("cannot write " + part);
    at += written;
  }
  close(file);
  rename(part.c_str(), path.c_str());
}
bool get(const std::string& path, std::string& bytes) {
  int file = open(path.c_str(), O_RDONLY);
  if (file < 0) return false;
  struct stat facts;
  fstat(file, &facts);
  bytes.resize(facts.st_size);
  for (size_t at = 0; at < bytes.size();) {
    ssize_t n = read(file, &bytes[at], bytes.size() - at);
    if (n <= 0) break;
    at += n;
  }
  close(file);
  return true;
}

// ---- one task
std::string describe(const Task& t) {
  char text[400];
  const char* whom = t.kind == Send ? " to " : t.kind == Recv ? " from " : " root ";
  bool one = t.root >= 0;
  snprintf(text, sizeof text, "nccl%s %lu of group %s as %d of %d, %zu elements%s%s", KINDS[t.kind], (unsigned long)t.number, t.comm->name.c_str(), t.comm->rank,
           t.comm->size, t.count, one ? whom : "", one ? std::to_string(t.root).c_str() : "");
  return text;
}
size_t elements_in(const Task& t) {
  bool root = t.comm->rank == t.root;
  switch (t.kind) {
    case ReduceScatter: case AlltoAll: return t.count * t.comm->size;
    case Scatter: return root ? t.count * t.comm->size : 0;
    case Broadcast: return root ? t.count : 0;
    case Recv: return 0;
    default: return t.count;
  }
}
size_t elements_out(const Task& t) {
  bool root = t.comm->rank == t.root;
  switch (t.kind) {
    case AllGather: case AlltoAll: return t.count * t.comm->size;
    case Gather: return root ? t.count * t.comm->size : 0;
    case Reduce: return root ? t.count : 0;
    case Broadcast: return root && t.in == t.out ? 0 : t.count;  // NCCL's root only sends in place
    case Send: return 0;
    default: return t.count;
  }
}

void send(Task& t) {
  std::string path = t.comm->folder + "/p" + std::to_string(t.comm->rank) + "-" + std::to_string(t.root) + "." + std::to_string(t.number);
  if (!t.posted) {
    put(path, std::string((char*)host_view(t.in), t.count * width(t.type)));
    t.posted = true;
  }
  if (!exists(path + ".taken")) return;  // a send of NCCL may wait until its receiver has come
  unlink((path + ".taken").c_str());
  t.done = true;
}
void receive(Task& t) {
  std::string path = t.comm->folder + "/p" + std::to_string(t.root) + "-" + std::to_string(t.comm->rank) + "." + std::to_string(t.number);
  std::string bytes;
  if (!exists(path) || !get(path, bytes)) return;
  if (bytes.size() != t.count * width(t.type)) fail("MISMATCH: " + describe(t) + " got " + std::to_string(bytes.size()) + " bytes");
  memcpy(host_view(t.out), bytes.data(), bytes.size());
  put(path + ".taken", "");
  unlink(path.c_str());
  t.done = true;
}

std::string file_of(const Task& t, uint64_t number, int rank) { return t.comm->folder + "/c" + std::to_string(number) + "." + std::to_string(rank); }

// All ranks' inputs, once all have come; a rank that calls something else is named.
bool inputs(Task& t, std::vector<std::string>& all) {
  Header mine{t.kind, t.type, t.op, t.root, t.count};
  if (!t.posted) {
    size_t n = elements_in(t) * width(t.type);
    put(file_of(t, t.number, t.comm->rank), std::string((char*)&mine, sizeof mine) + (n ? std::string((char*)host_view(t.in), n) : ""));
    if (t.number >= 2) unlink(file_of(t, t.number - 2, t.comm->rank).c_str());
    t.posted = true;
  }
  for (int r = 0; r < t.comm->size; r++)
    if (!exists(file_of(t, t.number, r))) return false;
  all.resize(t.comm->size);
  for (int r = 0; r < t.comm->size; r++) {
    get(file_of(t, t.number, r), all[r]);
    if (memcmp(all[r].data(), &mine, sizeof mine)) {
      Header other;
      memcpy(&other, all[r].data(), sizeof other);
      fail("MISMATCH: " + describe(t) + ", but member " + std::to_string(r) + " calls nccl" + KINDS[other.kind] + " with type " + std::to_string(other.type) +
           ", reduction " + std::to_string(other.op) + ", root " + std::to_string(other.root) + ", " + std::to_string(other.count) + " elements");
    }
    all[r].erase(0, sizeof mine);
  }
  return true;
}

void collective(Task& t) {
  std::vector<std::string> all;
  if (!inputs(t, all)) return;
  ncclComm& c = *t.comm;
  char* out = (char*)host_view(t.out);
  size_t n = t.count * width(t.type);
  auto reduced = [&](size_t from) {
    std::string sum = all[0].substr(from, n);
    for (int r = 1; r < c.size; r++)
      if (!reduce_into(&sum[0], all[r].data() + from, t.count, t.type, t.op)) fail("a reduction of type " + std::to_string(t.type) + " is not simulated");
    if (t.op == ncclAvg) average(&sum[0], t.count, t.type, c.size);
    return sum;
  };
  switch (t.kind) {
    case AllReduce: memcpy(out, reduced(0).data(), n); break;
    case Reduce: if (c.rank == t.root) memcpy(out, reduced(0).data(), n); break;
    case ReduceScatter: memcpy(out, reduced(c.rank * n).data(), n); break;
    case Broadcast: memcpy(out, all[t.root].data(), n); break;
    case Scatter: memcpy(out, all[t.root].data() + c.rank * n, n); break;
    case AllGather: for (int r = 0; r < c.size; r++) memcpy(out + r * n, all[r].data(), n); break;
    case Gather: if (c.rank == t.root) for (int r = 0; r < c.size; r++) memcpy(out + r * n, all[r].data(), n); break;
    case AlltoAll: for (int r = 0; r < c.size; r++) memcpy(out + r * n, all[r].data() + c.rank * n, n); break;
    default: break;
  }
  t.done = true;
}

void step(Task& t) {
  if (t.comm->aborted) t.done = true;
  else if (t.kind == Send) send(t);
  else if (t.kind == Recv) receive(t);
  else collective(t);
}

// ---- launches: kernels of one communicator run in their order; at most `settings().resident` kernels are on a device together,
// and of those that could start, the one that was launched first does
auto& resident = *new std::map<int, int>;
auto& waiting = *new std::map<int, std::map<uint64_t, Stream*>>;  // device -> number of the launch -> stream
uint64_t launches = 0;
thread_local int depth = 0;
thread_local std::vector<std::pair<Stream*, Task>> grouped;
thread_local std::string nccl_error;

// Whether a kernel may take a place on its device.
bool may_start(int device, uint64_t launch) {
  int most = settings().resident;
  if (!most) return true;
  auto queued = waiting[device];
  for (auto& [number, stream] : queued)
    if (number < launch) advance(stream);  // takes the place if nothing else keeps it from starting
  return resident[device] < most;
}

ncclResult_t launch_kernel(Stream* s, std::vector<Task> tasks) {
  std::string name;
  std::vector<Access> accesses;
  std::map<ncclComm*, uint64_t> tickets;
  for (auto& t : tasks) {
    name += (name.empty() ? "" : "; ") + describe(t);
    accesses.push_back({t.in, elements_in(t) * width(t.type), false});
    accesses.push_back({t.out, elements_out(t) * width(t.type), true});
    if (!tickets.count(t.comm)) tickets[t.comm] = t.comm->launched++;
  }
  if (settings().log_nccl) fprintf(stderr, "[cudasim %d] %.4f stream %d %s\n", getpid(), now(), s->id, name.c_str());
  nccl_error = launch(s, name, accesses);
  auto work = std::make_shared<std::vector<Task>>(std::move(tasks));
  auto holds = std::make_shared<bool>(false);
  int device = s->device;
  uint64_t number = launches++;
  waiting[device][number] = s;
  enqueue(s, name, [=] {
    for (auto& [comm, ticket] : tickets)
      if (comm->serving != ticket && !comm->aborted) return Outcome::Blocked;
    if (!*holds) {
      if (!may_start(device, number)) return Outcome::Blocked;
      waiting[device].erase(number);
      resident[device]++;
      *holds = true;
    }
    bool over = true;
    for (auto& t : *work) {
      if (!t.done) step(t);
      over &= t.done;
    }
    if (!over) return Outcome::Blocked;
    resident[device]--;
    for (auto& [comm, _] : tickets) comm->serving++;
    return Outcome::Done;
  });
  if (settings().resident) advance(s);  // a GPU starts a kernel as soon as it may, and it stays
  return nccl_error.empty() ? ncclSuccess : ncclInternalError;
}

ncclResult_t add(ncclComm* c, Kind kind, const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t op, int root, cudaStream_t handle) {
  LOCK;
  if ((in && !is_device(in)) || (out && !is_device(out))) {
    nccl_error = std::string("nccl") + KINDS[kind] + " was given memory of the host";
    return ncclInvalidArgument;
  }
  uint64_t number = kind == Send ? c->sent[root]++ : kind == Recv ? c->received[root]++ : c->collectives++;
  Task t{c, kind, in, out, n, type, op, root, number};
  if (!depth) return launch_kernel(stream_of(handle), {t});
  grouped.push_back({stream_of(handle), t});
  return ncclSuccess;
}

ncclResult_t connect(ncclComm_t* c, int size, const ncclUniqueId& id, int rank, const char* label) {
  auto* m = new ncclComm;
  m->rank = rank;
  m->size = size;
  m->folder = root_folder() + "/" + id.internal;
  mkdir(root_folder().c_str(), 0700);
  mkdir(m->folder.c_str(), 0700);
  std::string world = getenv("RANK") ? getenv("RANK") : "?", name = label && *label ? label : id.internal;
  put(m->folder + "/i" + std::to_string(rank), world);
  std::string why = "ncclCommInitRank of " + name + " as " + std::to_string(rank) + " of " + std::to_string(size);
  wait_for([&] {
    for (int r = 0; r < size; r++)
      if (!exists(m->folder + "/i" + std::to_string(r))) return false;
    return true;
  }, why.c_str());
  std::string members;
  for (int r = 0; r < size; r++) {
    std::string one;
    get(m->folder + "/i" + std::to_string(r), one);
    members += (r ? " " : "") + one;
  }
  m->name = name + " (ranks " + members + ")";
  if (settings().log_nccl) fprintf(stderr, "[cudasim %d] communicator %s\n", getpid(), m->name.c_str());
  *c = m;
  return ncclSuccess;
}
}  // namespace

SIMULATED ncclResult_t ncclGroupStart() { return depth++, ncclSuccess; }
SIMULATED ncclResult_t ncclGroupEnd() {
  if (--depth > 0) return ncclSuccess;
  LOCK;
  std::vector<std::pair<Stream*, std::vector<Task>>> launches;  // one kernel for each stream
  for (auto& [s, task] : grouped) {
    auto of_stream = std::find_if(launches.begin(), launches.end(), [s = s](auto& l) { return l.first == s; });
    if (of_stream == launches.end()) launches.push_back({s, {task}});
    else of_stream->second.push_back(task);
  }
  grouped.clear();
  ncclResult_t result = ncclSuccess;
  for (auto& [s, tasks] : launches)
    if (ncclResult_t one = launch_kernel(s, tasks)) result = one;
  return result;
}
#define COMM ncclComm_t c, cudaStream_t s
SIMULATED ncclResult_t ncclAllReduce(const void* i, void* o, size_t n, ncclDataType_t t, ncclRedOp_t op, COMM) { return add(c, AllReduce, i, o, n, t, op, -1, s); }
SIMULATED ncclResult_t ncclBroadcast(const void* i, void* o, size_t n, ncclDataType_t t, int r, COMM) { return add(c, Broadcast, i, o, n, t, ncclSum, r, s); }
SIMULATED ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t t, int r, COMM) { return add(c, Broadcast, b, b, n, t, ncclSum, r, s); }
SIMULATED ncclResult_t ncclReduce(const void* i, void* o, size_t n, ncclDataType_t t, ncclRedOp_t op, int r, COMM) { return add(c, Reduce, i, o, n, t, op, r, s); }
SIMULATED ncclResult_t ncclAllGather(const void* i, void* o, size_t n, ncclDataType_t t, COMM) { return add(c, AllGather, i, o, n, t, ncclSum, -1, s); }
SIMULATED ncclResult_t ncclReduceScatter(const void* i, void* o, size_t n, ncclDataType_t t, ncclRedOp_t op, COMM) { return add(c, ReduceScatter, i, o, n, t, op, -1, s); }
SIMULATED ncclResult_t ncclAlltoAll(const void* i, void* o, size_t n, ncclDataType_t t, COMM) { return add(c, AlltoAll, i, o, n, t, ncclSum, -1, s); }
SIMULATED ncclResult_t ncclGather(const void* i, void* o, size_t n, ncclDataType_t t, int r, COMM) { return add(c, Gather, i, o, n, t, ncclSum, r, s); }
SIMULATED ncclResult_t ncclScatter(const void* i, void* o, size_t n, ncclDataType_t t, int r, COMM) { return add(c, Scatter, i, o, n, t, ncclSum, r, s); }
SIMULATED ncclResult_t ncclSend(const void* b, size_t n, ncclDataType_t t, int peer, COMM) { return add(c, Send, b, nullptr, n, t, ncclSum, peer, s); }
SIMULATED ncclResult_t ncclRecv(void* b, size_t n, ncclDataType_t t, int peer, COMM) { return add(c, Recv, nullptr, b, n, t, ncclSum, peer, s); }

SIMULATED ncclResult_t ncclGetVersion(int* version) { return *version = 22907, ncclSuccess; }
SIMULATED ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  std::random_device random;
  snprintf(id->internal, sizeof id->internal, "%08x%08x", random(), random());
  return ncclSuccess;
}
SIMULATED ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int r) { return connect(c, n, id, r, nullptr); }
SIMULATED ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int r, ncclConfig_t* config) { return connect(c, n, id, r, config->commName); }
SIMULATED ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int r, int, ncclUniqueId* ids, ncclConfig_t* config) { return connect(c, n, ids[0], r, config->commName); }
SIMULATED ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t* c, ncclConfig_t*) {
  *c = nullptr;
  nccl_error = "ncclCommSplit is not simulated";
  return ncclInvalidUsage;
}
SIMULATED ncclResult_t ncclCommAbort(ncclComm_t c) {
  LOCK;
  c->aborted = true;
  return ncclSuccess;
}
SIMULATED ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
SIMULATED ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
SIMULATED ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
SIMULATED ncclResult_t ncclCommCount(const ncclComm_t c, int* n) { return *n = c->size, ncclSuccess; }
SIMULATED ncclResult_t ncclCommUserRank(const ncclComm_t c, int* n) { return *n = c->rank, ncclSuccess; }
SIMULATED ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) { return *handle = nullptr, ncclSuccess; }
SIMULATED ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
SIMULATED ncclResult_t ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n) == cudaSuccess ? ncclSuccess : ncclSystemError; }
SIMULATED ncclResult_t ncclMemFree(void* p) { return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclSystemError; }
SIMULATED const char* ncclGetErrorString(ncclResult_t) { return "an error of the simulated NCCL"; }
SIMULATED const char* ncclGetLastError(ncclComm_t) { return nccl_error.c_str(); }
SIMULATED ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t*, void*, ncclDataType_t, int, ncclComm_t) {
  nccl_error = "ncclRedOpCreatePreMulSum is not simulated";
  return ncclInvalidUsage;
}
SIMULATED ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
