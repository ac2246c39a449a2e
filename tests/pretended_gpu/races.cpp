// The race detector. Operations run at once, in the order of the program. Beside that, each stream and the host have a
// vector clock. An access must come after the last write to each of its bytes, and a write after all reads since, in
// every order that a GPU could choose. All threads of the program are one host: they hand work to each other under
// locks that are not seen here.
#include "races.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

namespace {

const double LONG_AGO = 20;     // seconds after which a query says that an event has passed
const double A_WHILE = 0.3;     // the same, where a thread asks for it again and again
const int AGAIN_AND_AGAIN = 50;

struct Access {
  int line = -1;
  unsigned time = 0;
  int entry = -1;
};
struct Bytes {  // up to `end`, all with the same history
  size_t end;
  Access write;
  std::vector<Access> reads;  // since the last write, one per line
};
struct Entry {
  int what, site, stream;
};
using Memory = std::map<size_t, Bytes>;
struct Capture {
  Memory memory;
  std::vector<Clock> clocks;  // of all lines when it began
  std::vector<Range> ranges;
  std::vector<std::function<void()>> runs;
};

std::mutex mine;  // held for a moment only, and no other lock is taken meanwhile
std::atomic<bool> on{false};
std::vector<Clock> lines(1);  // 0 is the host
Memory memory;
std::map<unsigned long long, Capture> captures;
std::vector<Entry> entries;
std::vector<std::string> texts;
std::unordered_map<std::string, int> known_texts;
std::vector<std::string> found;
std::set<std::string> found_before;
long compared = 0;

thread_local int silent = 0;
thread_local int site_now = -1;
thread_local bool launched = false;
thread_local Stream* launch_stream = nullptr;
thread_local Event* asked = nullptr;
thread_local int asked_often = 0;

std::atomic<int (*)()> ask_site{nullptr};          // asks Python for the line
std::atomic<void (*)(long)> run_python{nullptr};   // runs what was kept under a number

int intern(const std::string& text) {  // with `mine` held
  auto [place, is_new] = known_texts.emplace(text, (int)texts.size());
  if (is_new) texts.push_back(text);
  return place->second;
}
unsigned at(const Clock& clock, int line) { return line < (int)clock.size() ? clock[line] : 0; }
void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}
void tick(int line) {
  if ((int)lines[line].size() <= line) lines[line].resize(line + 1);
  lines[line][line]++;
}
int line_of(Stream* s) {
  if (s->line < 0) {
    s->line = lines.size();
    lines.emplace_back();
    tick(s->line);
  }
  return s->line;
}
bool covers(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); i++)
    if (other[i] > at(clock, i)) return false;
  return true;
}
std::string told(const Entry& e) {
  std::string by = e.stream < 0 ? "the host" : "stream " + std::to_string(e.stream);
  return texts[e.what] + " on " + by + " (" + (texts[e.site].empty() ? "unknown line" : texts[e.site]) + ")";
}
void keep(const std::string& text) {  // in a file, too, since a process may end before it is asked
  found.push_back(text);
  if (const char* place = getenv("PRETENDED_FINDINGS"))
    if (FILE* file = fopen(place, "a")) {
      fprintf(file, "%s\n", text.c_str());
      fclose(file);
    }
}
void race(const Access& before, int entry, bool wrote, bool writes, size_t from, size_t to) {
  char where[64];
  snprintf(where, sizeof where, " at %zx", from);
  std::string text = "race: " + told(entries[entry]) + (writes ? " writes" : " reads") + " what " +
                     told(entries[before.entry]) + (wrote ? " writes" : " reads") + ", and nothing says which is first";
  if (found_before.insert(text).second) keep(text + "; " + std::to_string(to - from) + " bytes" + where);
}
Memory::iterator split(Memory& m, size_t at) {  // so that one piece begins at `at`, if any holds it
  auto i = m.lower_bound(at);
  if (i != m.end() && i->first == at) return i;
  if (i == m.begin()) return i;
  auto before = std::prev(i);
  if (before->second.end <= at) return i;
  Bytes rest = before->second;
  before->second.end = at;
  return m.emplace_hint(i, at, rest);
}
void access(Memory& m, int line, int entry, size_t from, size_t to, bool writes) {
  const Clock& clock = lines[line];
  Access now{line, at(clock, line), entry};
  split(m, to);
  auto i = split(m, from);
  size_t done = from;
  auto check = [&](const Access& other, bool wrote, size_t a, size_t b) {
    if (other.line < 0 || other.entry == entry) return;
    compared++;
    if (other.line != line && at(clock, other.line) < other.time) race(other, entry, wrote, writes, a, b);
  };
  while (done < to) {
    if (i == m.end() || i->first > done) {  // nothing was noted of these bytes yet
      size_t end = i == m.end() ? to : std::min(to, i->first);
      if (!writes) {
        Bytes fresh{end, {}, {now}};
        m.emplace_hint(i, done, fresh);
      }
      done = end;
      continue;
    }
    Bytes& b = i->second;
    check(b.write, true, i->first, b.end);
    if (writes)
      for (auto& r : b.reads) check(r, false, i->first, b.end);
    else {
      auto same = std::find_if(b.reads.begin(), b.reads.end(), [&](auto& r) { return r.line == line; });
      if (same == b.reads.end())
        b.reads.push_back(now);
      else
        *same = now;
    }
    done = b.end;
    ++i;
  }
  if (writes) {
    m.erase(m.lower_bound(from), m.lower_bound(to));
    m[from] = Bytes{to, now, {}};
  }
}
void note(Memory& m, int line, int stream, const std::string& what, int site_id, const std::vector<Range>& ranges) {
  entries.push_back({intern(what), site_id, stream});
  for (bool writes : {false, true})  // what an entry reads comes before what it writes
    for (auto& r : ranges)
      if (r.writes == writes && r.bytes) access(m, line, entries.size() - 1, (size_t)r.at, (size_t)r.at + r.bytes, writes);
}
int site_id() {  // never with `mine` held: Python is asked
  if (site_now >= 0) return site_now;
  auto ask = ask_site.load();
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (ask && strncmp(name, "pt_nccl", 7)) return ask();
  std::lock_guard<std::mutex> g(mine);
  return intern("");
}
}  // namespace

bool is_silent() { return silent; }
bool watching() { return on && !silent; }
Silence::Silence() { silent++; }
Silence::~Silence() { silent--; }

void on_stream(Stream* s, const std::string& what, const std::vector<Range>& ranges) {
  if (!watching()) return;
  int where = site_id();
  std::lock_guard<std::mutex> g(mine);
  int line = line_of(s);
  join(lines[line], lines[0]);
  tick(line);
  note(s->capture ? captures[s->capture].memory : memory, line, s->id, what, where, ranges);
}
bool is_pinned(const void* p);
void on_host(const std::string& what, const std::vector<Range>& ranges) {
  if (!watching()) return;
  std::vector<Range> pinned;
  for (auto& r : ranges)
    if (is_pinned(r.at)) pinned.push_back(r);
  if (pinned.empty()) return;
  int where = site_id();
  std::lock_guard<std::mutex> g(mine);
  tick(0);
  note(memory, 0, -1, what, where, pinned);
}
void recorded(Event* e, Stream* s) {
  if (!on) return;
  std::lock_guard<std::mutex> g(mine);
  int line = line_of(s);
  if (!silent) join(lines[line], lines[0]);
  e->clock = lines[line];
  e->noted = now();
}
void waits_for(Stream* s, Event* e) {
  if (!watching()) return;
  std::lock_guard<std::mutex> g(mine);
  join(lines[line_of(s)], e->clock);
}
void host_waits_for(Event* e) {
  if (!watching()) return;
  std::lock_guard<std::mutex> g(mine);
  join(lines[0], e->clock);
}
void host_waits_for(Stream* s) {
  if (!watching()) return;
  std::lock_guard<std::mutex> g(mine);
  join(lines[0], lines[line_of(s)]);
}
void host_waits_for_all() {
  if (!watching()) return;
  std::lock_guard<std::mutex> g(mine);
  for (size_t i = 1; i < lines.size(); i++) join(lines[0], lines[i]);
}
bool known_to_have_passed(Event* e) {
  if (!on || e->clock.empty()) return true;
  std::lock_guard<std::mutex> g(mine);
  if (covers(lines[0], e->clock)) return true;
  if (silent) return false;
  asked_often = asked == e ? asked_often + 1 : 0;
  asked = e;
  double age = now() - e->noted;
  if (age < A_WHILE || (age < LONG_AGO && asked_often < AGAIN_AND_AGAIN)) return false;
  join(lines[0], e->clock);
  return true;
}
bool known_to_have_passed(Stream* s) {
  if (!on) return true;
  std::lock_guard<std::mutex> g(mine);
  return covers(lines[0], lines[line_of(s)]);
}
void forget(const void* at, size_t bytes) {
  if (!on) return;
  std::lock_guard<std::mutex> g(mine);
  size_t from = (size_t)at, to = from + bytes;
  split(memory, to);
  split(memory, from);
  memory.erase(memory.lower_bound(from), memory.lower_bound(to));
}
void launched_on(Stream* s) {
  asked = nullptr;
  launched = true;
  if (s) launch_stream = s;
}
std::string site() {
  if (!on) return "";
  int where = site_id();
  std::lock_guard<std::mutex> g(mine);
  return texts[where];
}
void finding(const std::string& text) {
  std::lock_guard<std::mutex> g(mine);
  if (found_before.insert(text).second) keep(text);
}

void captured_entry(Stream* s, const std::string& what, const std::vector<Range>& ranges, std::function<void()> run) {
  on_stream(s, what, ranges);
  if (silent) return;
  std::lock_guard<std::mutex> g(mine);
  captures[s->capture].runs.push_back(std::move(run));
}
void capture_begins(unsigned long long capture) {
  std::lock_guard<std::mutex> g(mine);
  captures[capture].clocks = lines;
}
void capture_ends(unsigned long long capture, const std::vector<Stream*>& streams) {
  std::lock_guard<std::mutex> g(mine);
  auto& c = captures[capture];
  for (auto* s : streams)  // what waited for what inside the graph says nothing of the time after it
    if (s->line >= 0) lines[s->line] = s->line < (int)c.clocks.size() ? c.clocks[s->line] : Clock();
  for (auto* s : streams)
    if (s->line >= 0 && (int)lines[s->line].size() <= s->line) tick(s->line);
  Memory all;  // pieces that are read or written
  c.memory.swap(all);
  c.ranges.clear();
  for (auto& [from, b] : all) c.ranges.push_back({(void*)from, b.end - from, b.write.line >= 0});
}
void capture_runs(unsigned long long capture, Stream* s) {
  std::vector<Range> ranges;
  std::vector<std::function<void()>> runs;
  {
    std::lock_guard<std::mutex> g(mine);
    ranges = captures[capture].ranges;
    runs = captures[capture].runs;
  }
  on_stream(s, "the replay of a graph", ranges);
  Silence silence;
  for (auto& run : runs) run();
}

// ---- controls ----
API void pretended_watch(int yes) { on = yes; }
API void pretended_ask(int (*ask)(), void (*run)(long)) {
  ask_site = ask;
  run_python = run;
}
API int pretended_text(const char* text) {
  std::lock_guard<std::mutex> g(mine);
  return intern(text);
}
API int pretended_is_silent() { return silent; }
API void pretended_finding(const char* text) { finding(text); }
API void pretended_silent(int more) { silent += more; }
// An operation of torch begins, at a line of the program, and ends. The answer is whether it has launched a kernel.
API int pretended_begin(int where) {
  int before = site_now;
  site_now = where;
  launched = false;
  launch_stream = nullptr;
  return before;
}
API int pretended_end(int before) {
  site_now = before;
  return launched;
}
static std::vector<Range> ranges_of(int n, const size_t* from, const size_t* bytes, const int* writes) {
  std::vector<Range> r;
  for (int i = 0; i < n; i++) r.push_back({(void*)from[i], bytes[i], writes[i] != 0});
  return r;
}
// An entry of the queue of a stream, or of the one on which the last operation of torch has launched a kernel.
API void pretended_entry(void* stream, int as_launched, const char* what, int where, int n, const size_t* from,
                         const size_t* bytes, const int* writes) {
  int before = site_now;
  site_now = where;
  on_stream(as_launched && launch_stream ? launch_stream : S(stream), what, ranges_of(n, from, bytes, writes));
  site_now = before;
}
API void pretended_host(const char* what, int where, int n, const size_t* from, const size_t* bytes, const int* writes) {
  int before = site_now;
  site_now = where;
  on_host(what, ranges_of(n, from, bytes, writes));
  site_now = before;
}
API int pretended_is_captured(void* stream) { return S(stream)->capture != 0; }
// Keeps a calculation of Python, under a number, for each replay of what the stream captures.
API void pretended_keep(void* stream, long number) {
  auto* s = S(stream);
  std::lock_guard<std::mutex> g(mine);
  captures[s->capture].runs.push_back([number] {
    if (auto run = run_python.load()) run(number);
  });
}
API const char* pretended_findings() {
  static std::string all;
  std::lock_guard<std::mutex> g(mine);
  all.clear();
  for (auto& f : found) all += f + "\n";
  return all.c_str();
}
API void pretended_forget_findings() {
  std::lock_guard<std::mutex> g(mine);
  found.clear();
  found_before.clear();
}
API long pretended_compared() { return compared; }
