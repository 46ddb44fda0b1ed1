// Which operations are ordered, and which touch the same bytes without being ordered.
//
// Each operation of a stream has a number. A stream's clock holds, for every stream, the number of its last operation that has surely
// ended before what comes next: it grows by waits for events, and by what the host has waited for before it launches. For each byte of a
// device the last write and the reads since are remembered. This finds a missing wait whatever the order in which the simulation ran.
#include "simulation.hpp"

#include <algorithm>

namespace sim {
#define LOCK std::lock_guard<std::recursive_mutex> lock_(M)

struct Mark { int stream = -1; uint64_t number = 0; std::shared_ptr<const std::string> name; };
struct Cell { uintptr_t end; Mark write; std::map<int, Mark> reads; };
static auto& cells = *new std::map<uintptr_t, Cell>;  // disjoint ranges of bytes, by their first address
static auto& host = *new Clock;

void join(Clock& into, const Clock& other) {
  for (auto& [stream, number] : other) {
    auto& mine = into[stream];
    mine = std::max(mine, number);
  }
}
void host_saw(const Clock& clock) { join(host, clock); }
const Clock& host_clock() { return host; }

// Makes `at` the border of two ranges, if it lies inside one.
static void split(uintptr_t at) {
  auto it = cells.upper_bound(at);
  if (it == cells.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Cell rest = it->second;
  it->second.end = at;
  cells.emplace(at, std::move(rest));
}

void forget(const void* p, size_t bytes) {
  LOCK;
  split((uintptr_t)p);
  split((uintptr_t)p + bytes);
  cells.erase(cells.lower_bound((uintptr_t)p), cells.lower_bound((uintptr_t)p + bytes));
}

static std::string conflict(const Stream* s, const std::string& name, const char* does, const Mark& earlier, const char* did, uintptr_t at) {
  char text[900];
  snprintf(text, sizeof text, "RACE on device %d: %.300s on stream %d %s memory at %lx that %.300s on stream %d %s, and nothing makes it wait for that",
           s->device, name.c_str(), s->id, does, (unsigned long)at, earlier.name->c_str(), earlier.stream, did);
  return text;
}

// The error, if an access to the bytes of one cell is not ordered behind an earlier one.
static std::string check(Stream* s, const Mark& mark, bool write, uintptr_t at, const Cell& cell) {
  auto ordered = [s](const Mark& m) { return m.stream < 0 || m.stream == s->id || s->clock[m.stream] >= m.number; };
  if (!ordered(cell.write)) return conflict(s, *mark.name, write ? "overwrites" : "reads", cell.write, "writes", at);
  if (write)
    for (auto& [_, read] : cell.reads)
      if (!ordered(read)) return conflict(s, *mark.name, "overwrites", read, "reads", at);
  return "";
}

// Notes an access to the bytes [begin, end); the error, if it is not ordered behind an earlier one.
static std::string touch(Stream* s, const Mark& mark, bool write, uintptr_t begin, uintptr_t end) {
  std::string error;
  split(begin);
  split(end);
  for (uintptr_t at = begin; at < end;) {
    auto it = cells.lower_bound(at);
    if (it == cells.end() || it->first > at)  // bytes that nobody has touched yet
      it = cells.emplace(at, Cell{it == cells.end() ? end : std::min(end, it->first), {}, {}}).first;
    if (error.empty()) error = check(s, mark, write, at, it->second);
    if (!write) it->second.reads[s->id] = mark;
    at = it->second.end;
  }
  if (write) {
    cells.erase(cells.lower_bound(begin), cells.lower_bound(end));
    cells.emplace(begin, Cell{end, mark, {}});
  }
  return error;
}

std::string launch(Stream* s, const std::string& name, const std::vector<Access>& accesses) {
  LOCK;
  join(s->clock, host);
  Mark mark{s->id, ++s->clock[s->id], std::make_shared<const std::string>(name)};
  if (!settings().races) return "";
  std::string error;
  for (auto& access : accesses) {
    if (!access.bytes || !(is_device(access.p) || is_pinned(access.p))) continue;
    uintptr_t begin = (uintptr_t)access.p;
    std::string found = touch(s, mark, access.write, begin, begin + access.bytes);
    if (error.empty()) error = found;
  }
  if (!error.empty()) {
    fprintf(stderr, "[cudasim] %s\n", error.c_str());
    set_last_error(error);
  }
  return error;
}
}  // namespace sim
