// Real processes as the peers of a communicator. They share a file in /dev/shm: each rank lays what it holds into a
// place of its own there, and computes the result from what all have laid down.
//
// A second file of the job, the board, says what each process waits for. From it a rank that waits long finds out
// whether the answer can still come: a circle of waits is a hang. A host that waits (for a store, say) is no proof of
// one: here each call runs at once, but on a GPU the host would go on, so that it might be the one to wake the other.
#include "nccl_peers.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

using Number64 = std::atomic<uint64_t>;
static const int RANKS = 8, SLOTS = 64, ENTRIES = 8;
static const size_t HALF = 512ul << 20;  // most of the input of one collective; memory is used where it is written
static const size_t BOX = 128ul << 20;   // most of what one send sends
static const double POSTED_AFTER = 0.02, LOOKS_EVERY = 0.5, LINGERS = 1.5, AFTER_AN_END = 10;

bool peers_are_real() {
  static bool real = getenv("PRETENDED_PEERS") && !strcmp(getenv("PRETENDED_PEERS"), "real");
  return real;
}
static double seconds(const char* name, double otherwise) { return getenv(name) ? atof(getenv(name)) : otherwise; }
static double hang_after() {
  static double s = seconds("PRETENDED_HANG_S", 2);
  return s;
}
static double patience() {
  static double s = seconds("PRETENDED_ANSWER_S", 120);
  return s;
}
static std::mutex last_lock;
static std::string last_text;
static void found(const std::string& text) {
  finding(text);
  std::lock_guard<std::mutex> g(last_lock);
  last_text = text;
}
std::string last_finding() {
  std::lock_guard<std::mutex> g(last_lock);
  return last_text;
}

// ---- files ----
// A process that uses a file holds a shared lock of it, so that others see what is left over of a killed job.
static const std::string FOLDER = "/dev/shm/", PREFIX = "pretended-";

static void unlink_if_unused(const std::string& path) {
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  if (!flock(fd, LOCK_EX | LOCK_NB)) unlink(path.c_str());
  close(fd);
}
static int open_shared(const std::string& name, size_t size, bool empty_if_unused) {
  for (;;) {
    int fd = open((FOLDER + name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return fd;
    if (empty_if_unused && !flock(fd, LOCK_EX | LOCK_NB) && ftruncate(fd, 0)) return -1;
    struct stat s;
    flock(fd, LOCK_SH);
    fstat(fd, &s);
    if (s.st_nlink && !ftruncate(fd, size)) return fd;
    close(fd);  // removed between the two calls
    if (s.st_nlink) return -1;
  }
}
static void* map_shared(int fd, size_t size) {
  void* at = fd < 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  return at == MAP_FAILED ? nullptr : at;
}
static void sweep() {
  DIR* folder = opendir(FOLDER.c_str());
  if (!folder) return;
  while (dirent* one = readdir(folder))
    if (!strncmp(one->d_name, PREFIX.c_str(), PREFIX.size())) unlink_if_unused(FOLDER + one->d_name);
  closedir(folder);
}

// ---- the board ----
struct Entry {         // a thread that waits
  Number64 version;    // odd: it waits now; its texts are as they were when the version became odd
  Number64 awaits;     // the slots of the processes that it waits for
  Number64 polls;      // how often it has looked: one that has stopped does not look
  Number64 hung;       // the version that a peer has found to hang
  Number64 asked;      // the version that a peer has asked to look, too, before that peer goes on
  Number64 told;       // the version that has done so
  bool host, knows;    // whether the host waits, and whether it is known for whom
  char what[160], site[208], ranks[64];
};
struct Slot {  // a process
  std::atomic<int> pid, rank, has_ended;
  Number64 started;
  Entry entries[ENTRIES];
};
struct Board {
  Slot slots[SLOTS];
};
static std::mutex board_lock;
static Board* board = nullptr;
static int my_pid = 0, my_slot = -1, board_fd = -1;
static bool entry_used[ENTRIES];

// When the process began, in ticks; 0 if there is none. One that has ended and was not yet waited for is none.
static uint64_t start_of(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  char* at = strrchr(text, ')');  // the name of a program may have spaces
  if (!at || at[2] == 'Z' || at[2] == 'X') return 0;
  for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
  return at ? strtoull(at + 1, nullptr, 10) : 0;
}
static bool has_ended(int slot) {
  auto& s = board->slots[slot];
  return s.has_ended || (s.started && start_of(s.pid) != s.started);
}
static std::string board_name() {
  const char* job = getenv("PRETENDED_JOB");
  std::string name = job ? job : std::to_string(getppid());
  std::replace(name.begin(), name.end(), '/', '-');
  return PREFIX + "board-" + name;
}
static void end_process() {
  if (my_pid != getpid() || my_slot < 0) return;
  board->slots[my_slot].has_ended = 1;
  if (!flock(board_fd, LOCK_EX | LOCK_NB)) unlink((FOLDER + board_name()).c_str());
}
// The slot of this process; -1 if there is no board.
static int slot_of_me(int rank_if_unknown = -1) {
  std::lock_guard<std::mutex> g(board_lock);
  if (my_pid != getpid()) {  // the first call, or the first one after a fork
    sweep();
    board_fd = open_shared(board_name(), sizeof(Board), true);
    auto* at = (Board*)map_shared(board_fd, sizeof(Board));
    if (!at) return -1;
    if (!my_pid) atexit(end_process);
    memset(entry_used, 0, sizeof entry_used);
    board = at;
    my_pid = getpid();
    my_slot = -1;
    for (int i = 0; i < SLOTS && my_slot < 0; i++) {
      auto& s = board->slots[i];
      int none = 0;
      if (!s.pid.compare_exchange_strong(none, my_pid)) continue;
      s.rank = getenv("RANK") ? atoi(getenv("RANK")) : -1;
      s.started = start_of(my_pid);
      my_slot = i;
    }
  }
  if (my_slot >= 0 && board->slots[my_slot].rank < 0) board->slots[my_slot].rank = rank_if_unknown;
  return my_slot;
}
static int rank_of(int slot) { return board->slots[slot].rank; }
static void copy_text(char* to, size_t size, const std::string& text) { snprintf(to, size, "%s", text.c_str()); }

// A wait on the board, as long as this object has one.
class Post {
 public:
  Entry* entry = nullptr;
  int index = -1, pid = 0;
  ~Post() { clear(); }
  void set(const std::string& what, const std::string& site, const std::string& ranks, bool host, bool knows,
           uint64_t awaits) {
    clear();
    int slot = slot_of_me();
    if (slot < 0) return;
    std::lock_guard<std::mutex> g(board_lock);
    for (index = 0; index < ENTRIES && entry_used[index]; index++) {}
    if (index == ENTRIES) return;
    entry_used[index] = true;
    pid = my_pid;
    entry = &board->slots[slot].entries[index];
    entry->host = host;
    entry->knows = knows;
    entry->awaits = awaits;
    copy_text(entry->what, sizeof entry->what, what);
    copy_text(entry->site, sizeof entry->site, site);
    copy_text(entry->ranks, sizeof entry->ranks, ranks);
    entry->version++;
  }
  void clear() {
    if (!entry || pid != getpid()) return;  // a child has a copy of this object, but not the wait
    entry->version++;
    std::lock_guard<std::mutex> g(board_lock);
    entry_used[index] = false;
    entry = nullptr;
  }
};
API void pretended_host_waits(const char* text) {
  static thread_local Post post;
  if (!peers_are_real()) return;
  if (text && *text)
    post.set(text, site(), "", true, false, 0);
  else
    post.clear();
}

// ---- can the answer still come? ----
struct Seen {  // an entry, as it was read
  int slot, rank;
  Entry* entry;
  uint64_t version, awaits, polls;
  bool host, knows;
  std::string what, site, ranks;
  std::string text() const {
    std::string t = "rank " + std::to_string(rank) + (host && ranks.empty() ? "'s host" : "") + " waits in " + what;
    if (!site.empty()) t += " (" + site + ")";
    return ranks.empty() ? t : t + " of communicator of ranks " + ranks;
  }
};
static bool read_entry(int slot, Entry* e, Seen* seen) {
  uint64_t version = e->version;
  if (version % 2 == 0) return false;
  *seen = {slot, rank_of(slot), e, version, e->awaits, e->polls, e->host, e->knows, e->what, e->site, e->ranks};
  return e->version == version;
}
static std::vector<Seen> waits_of(int slot) {
  std::vector<Seen> all;
  Seen one;
  for (auto& e : board->slots[slot].entries)
    if (read_entry(slot, &e, &one)) all.push_back(one);
  return all;
}
struct Verdict {
  enum State { goes_on, circle, host, ended } state = goes_on;
  std::vector<Seen> path;  // each waits for the next
  std::vector<Seen> all;   // whose waits are what the verdict rests on
  int who = -1;            // the slot that has ended
  bool same_as(const Verdict& v) const {
    auto same = [](auto& a, auto& b) { return a.entry == b.entry && a.version == b.version && a.awaits == b.awaits; };
    return state == v.state && who == v.who && all.size() == v.all.size() &&
           std::equal(all.begin(), all.end(), v.all.begin(), same);
  }
  // Whether all have looked for their answers since. A host that waits does not look.
  bool polled_since(const Verdict& v) const {
    return std::equal(all.begin(), all.end(), v.all.begin(),
                      [](auto& a, auto& b) { return a.ranks.empty() || a.polls >= b.polls + 2; });
  }
};
// No process of the job runs that could wake a host that waits for nobody knows whom.
static bool nobody_runs(int at_least, std::vector<Seen>* all) {
  int here = 0;
  for (int slot = 0; slot < SLOTS && board->slots[slot].pid; slot++, here++) {
    if (has_ended(slot)) continue;
    auto waits = waits_of(slot);
    if (waits.empty()) return false;
    all->insert(all->end(), waits.begin(), waits.end());
  }
  return here >= std::max(at_least, getenv("WORLD_SIZE") ? atoi(getenv("WORLD_SIZE")) : 0);
}
static bool walk(const Seen& at, int size, std::set<Entry*>* visited, Verdict* v) {
  v->path.push_back(at);
  visited->insert(at.entry);
  if (!at.knows) {
    v->all.clear();
    if (nobody_runs(size, &v->all)) {
      v->state = Verdict::host;
      return true;
    }
  }
  for (int slot = 0; slot < SLOTS; slot++) {
    if (!(at.awaits >> slot & 1)) continue;
    if (has_ended(slot)) {
      v->state = Verdict::ended;
      v->who = slot;
      v->all = v->path;
      return true;
    }
    for (auto& next : waits_of(slot)) {
      bool on_path = std::any_of(v->path.begin(), v->path.end(), [&](auto& p) { return p.entry == next.entry; });
      if (on_path) {
        v->state = Verdict::circle;
        v->all = v->path;
        return true;
      }
      if (!visited->count(next.entry) && walk(next, size, visited, v)) return true;
    }
  }
  v->path.pop_back();
  return false;
}
static std::string text_of(const Verdict& v) {
  const Seen& me = v.path[0];
  std::string text;
  if (v.state == Verdict::ended) {
    for (auto& one : v.path) text += (text.empty() ? "hang: " : "; ") + one.text();
    return text + " for rank " + std::to_string(rank_of(v.who)) + ", which has ended";
  }
  // A circle of hosts, or of devices, is one on a GPU, too. What is in between is not.
  auto& waits = v.state == Verdict::circle ? v.path : v.all;
  auto host = std::find_if(waits.begin(), waits.end(), [](auto& one) { return one.host; });
  auto device = std::find_if(waits.begin(), waits.end(), [](auto& one) { return !one.host; });
  if (host != waits.end() && device != waits.end()) {
    const Seen& its = v.state == Verdict::host && v.path.back().host ? v.path.back() : *host;
    const Seen& other = me.host ? *device : me;
    Seen as_host = its;
    if (!as_host.ranks.empty()) as_host.what += " of communicator of ranks " + as_host.ranks;
    as_host.ranks = "";
    return "not modelled: " + as_host.text() + " while " + other.text() + "; on a GPU its host would go on";
  }
  text = "hang: " + me.text();
  for (auto& one : waits)
    if (one.entry != me.entry) text += "; " + one.text();
  return text;
}

// ---- a communicator ----
struct Described {  // what a rank has called
  Number64 number;  // of the call; written last
  Kind kind;
  ncclDataType_t type;
  int op, root, color, key;
  uint64_t count;
  Factor factor;
  char site[204];
};
struct Member {
  std::atomic<int> pid, slot, gone;  // gone: 1 it has left, 2 after an error
  Described calls[2];
};
struct Channel {  // from one rank to another
  Number64 sent, received;
  Described boxes[2];
};
struct Shared {
  std::atomic<int> n;
  Member members[RANKS];
  Channel channels[RANKS][RANKS];
};
static size_t size_of(int n) { return (sizeof(Shared) + 4095) / 4096 * 4096 + n * 2 * HALF + n * n * 2 * BOX; }
static bool reduces(Kind k) { return k == Kind::all_reduce || k == Kind::reduce_scatter || k == Kind::reduce; }
static bool is_p2p(const Op& op) { return op.kind == Kind::send || op.kind == Kind::recv; }

static std::string text_of(const Described& d, int root) {
  static const char* types[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  static const char* ops[] = {"sum", "product", "maximum", "minimum", "average"};
  if (d.kind == Kind::split) return "ncclCommSplit";
  std::string text = name_of(d.kind) + " of " + std::to_string(d.count) + " " + types[d.type];
  if (reduces(d.kind)) text += std::string(", ") + (d.op == PREMUL ? "sum of products" : d.op < 5 ? ops[d.op] : "?");
  if (d.kind == Kind::broadcast || d.kind == Kind::send) text += (d.kind == Kind::send ? " to rank " : " from rank ");
  if (d.kind == Kind::recv) text += " from rank ";
  if (d.kind == Kind::reduce) text += " to rank ";
  bool rooted = d.kind == Kind::broadcast || d.kind == Kind::reduce || d.kind == Kind::send || d.kind == Kind::recv;
  return rooted ? text + std::to_string(root) : text;
}
static void describe(const Op& op, Described* d) {
  d->kind = op.kind;
  d->type = op.type;
  d->op = op.op;
  d->root = op.root;
  d->count = op.count;
  d->color = op.color;
  d->key = op.key;
  d->factor = op.factor;
  if (op.factor.at) memcpy(d->factor.value, op.factor.at, width(op.type));
  copy_text(d->site, sizeof d->site, op.site);
}
static bool equal(const Described& a, const Described& b) {
  return a.kind == b.kind && (a.kind == Kind::split || (a.type == b.type && a.op == b.op && a.root == b.root &&
                                                        a.count == b.count));
}
static std::string with_site(const std::string& what, const char* where) {
  return *where ? what + " (" + where + ")" : what;
}
static uint64_t mixed(uint64_t h, const void* data, size_t n) {
  for (size_t i = 0; i < n; i++) h = (h ^ ((const unsigned char*)data)[i]) * 0x100000001b3;
  return h ^ h >> 29;
}

class Peers {
 public:
  Peers(int n, int r, uint64_t id) : n(n), r(r), id(id) {}
  ncclResult_t join(const std::string& what, const std::string& where);
  ncclResult_t collective(const Op& op);
  ncclResult_t transfers(const std::vector<Op>& ops);
  ncclResult_t split(int color, int key, const std::string& where, Comm** made);
  void leave(bool aborts);
  const int n, r;
  const uint64_t id;
  std::atomic<int> error{ncclSuccess};
  int slot_of[RANKS] = {-1, -1, -1, -1, -1, -1, -1, -1};  // of the board; -1: not known yet
  int dev = 0;

 private:
  struct Waiting {
    std::function<std::string()> what;
    std::string site;
    bool host;
  };
  ncclResult_t wait(const Waiting& w, const std::function<unsigned()>& missing);
  ncclResult_t look(const Post& post, unsigned missing, Verdict* before);
  ncclResult_t has_lost(const Post& post);
  ncclResult_t fail(ncclResult_t e) {
    int none = ncclSuccess;
    error.compare_exchange_strong(none, e);
    if (shared) {
      int in = 0;
      shared->members[r].gone.compare_exchange_strong(in, 2);
    }
    return e;
  }
  int global(int rank) { return slot_of[rank] < 0 ? rank : rank_of(slot_of[rank]); }
  std::string ranks_text() {
    std::string t;
    for (int i = 0; i < n; i++) t += (i ? ", " : "[") + std::to_string(global(i));
    return t + "]";
  }
  char* input(int rank, uint64_t call) { return data + (rank * 2 + call % 2) * HALF; }
  char* box(int from, int to, uint64_t number) {
    return data + n * 2 * HALF + ((from * n + to) * 2 + number % 2) * BOX;
  }
  ncclResult_t exchange(const Op& op);  // publishes a collective and waits for the others
  void compute(const Op& op);
  bool try_send(const Op& op);
  bool try_recv(const Op& op, ncclResult_t* result);

  Shared* shared = nullptr;
  char* data = nullptr;
  std::mutex one;  // calls of a communicator come one after the other
  uint64_t calls = 0;
  std::atomic<bool> aborted{false};
};

// Waits until no rank is missing. The mask that `missing` returns has a bit for each rank of the communicator that is.
ncclResult_t Peers::wait(const Waiting& w, const std::function<unsigned()>& missing) {
  double begin = 0, next_look = 0;
  Post post;
  Verdict before;
  for (long turn = 0;; turn++) {
    unsigned mask = missing();
    if (!mask) return ncclSuccess;
    if (aborted) return fail(ncclSystemError);
    if (turn < 200) continue;
    double t = now();
    if (!begin) next_look = (begin = t) + hang_after();
    usleep(t - begin < 1 ? 50 : 200);
    if (t - begin < POSTED_AFTER) continue;
    uint64_t awaits = 0;
    bool knows = true;
    for (int i = 0; i < n; i++) {
      if (!(mask >> i & 1)) continue;
      if (slot_of[i] < 0)
        knows = false;
      else
        awaits |= 1ull << slot_of[i];
    }
    if (!knows) awaits = 0;
    if (!post.entry) post.set(w.what(), w.site, ranks_text(), w.host, knows, awaits);
    if (!post.entry) continue;
    post.entry->awaits = awaits;
    post.entry->polls++;
    uint64_t version = post.entry->version;
    bool asked = post.entry->asked == version && post.entry->told != version;
    if (t < next_look && !asked) continue;
    next_look = t + LOOKS_EVERY;
    ncclResult_t result = look(post, missing(), &before);
    if (result != ncclSuccess) return result;
    if (asked) post.entry->told = version;
    if (t - begin > patience()) {
      Seen me;
      read_entry(slot_of_me(), post.entry, &me);
      std::string text;
      for (int i = 0; i < n; i++)
        if (mask >> i & 1) text += (text.empty() ? "" : ", ") + std::to_string(global(i));
      found("no answer: " + me.text() + " for " + std::to_string((long)patience()) + " s; ranks that have not come: " +
            text);
      return fail(ncclInternalError);
    }
  }
}
// Waits for an end of this rank's own, after it has said that a peer is gone.
ncclResult_t Peers::has_lost(const Post& post) {
  fail(ncclRemoteError);
  for (double until = now() + AFTER_AN_END; now() < until && !aborted; usleep(1000)) post.entry->polls++;
  return aborted ? ncclSystemError : ncclRemoteError;
}
ncclResult_t Peers::look(const Post& post, unsigned missing, Verdict* before) {
  Seen me;
  if (!missing || !read_entry(slot_of_me(), post.entry, &me)) return ncclSuccess;
  for (int i = 0; i < n; i++) {
    int gone = missing >> i & 1 ? shared->members[i].gone.load() : 0;
    if (!gone) continue;
    found("hang: " + me.text() + " for rank " + std::to_string(global(i)) +
          (gone == 1 ? ", which has left the communicator" : ", which had an error in that communicator"));
    return has_lost(post);
  }
  Verdict v;
  std::set<Entry*> visited;
  walk(me, n, &visited, &v);
  bool known = std::any_of(v.all.begin(), v.all.end(), [](auto& one) { return one.entry->hung == one.version; });
  if (v.state == Verdict::goes_on || !(known || (v.same_as(*before) && v.polled_since(*before)))) {
    if (!v.same_as(*before)) *before = v;
    return ncclSuccess;
  }
  std::string text = text_of(v);
  if (v.state == Verdict::ended) {
    found(text);
    return has_lost(post);
  }
  // Before this rank goes on, the ranks that wait for it must have found the same.
  for (auto& one : v.all) one.entry->hung = one.version;
  std::vector<Seen> others;
  for (int slot = 0; slot < SLOTS && board->slots[slot].pid; slot++)
    for (auto& one : waits_of(slot))
      if (!one.ranks.empty() && !has_ended(slot)) others.push_back(one);
  for (auto& one : others) one.entry->asked = one.version;
  post.entry->told = me.version;
  auto all_told = [&] {
    return std::all_of(others.begin(), others.end(),
                       [](auto& one) { return one.entry->told == one.version || one.entry->version != one.version; });
  };
  for (double until = now() + LINGERS; now() < until && !aborted && !all_told(); usleep(500)) post.entry->polls++;
  if (aborted) return fail(ncclSystemError);
  found(text);
  return fail(ncclInternalError);
}

ncclResult_t Peers::join(const std::string& what, const std::string& where) {
  char name[64];
  snprintf(name, sizeof name, "%snccl-%016lx", PREFIX.c_str(), (unsigned long)id);
  int slot = slot_of_me(r);
  if (n > RANKS || r < 0 || r >= n || slot < 0) return fail(ncclInvalidArgument);
  int fd = open_shared(name, size_of(n), false);
  shared = (Shared*)map_shared(fd, size_of(n));
  if (!shared) {
    found("not modelled: no shared memory for a communicator of " + std::to_string(n) + " ranks");
    return fail(ncclSystemError);
  }
  data = (char*)shared + (size_of(n) - n * 2 * HALF - n * n * 2 * BOX);
  int none = 0, vacant = 0;
  if (!shared->n.compare_exchange_strong(none, n) && none != n) {
    found("mismatch: rank " + std::to_string(r) + " joins a communicator of " + std::to_string(n) + " ranks (" + where +
          "), and another rank says " + std::to_string(none));
    return fail(ncclInvalidUsage);
  }
  auto& me = shared->members[r];
  if (!me.pid.compare_exchange_strong(vacant, getpid())) {
    found("mismatch: two processes join a communicator as its rank " + std::to_string(r) + " (" + where + ")");
    return fail(ncclInvalidUsage);
  }
  me.slot = slot + 1;
  auto missing = [&] {
    unsigned mask = 0;
    for (int i = 0; i < n; i++) {
      int s = shared->members[i].slot;
      if (s)
        slot_of[i] = s - 1;
      else
        mask |= 1u << i;
    }
    return mask;
  };
  auto result = wait({[&] { return what; }, where, true}, missing);
  // All have the file, so that nobody needs its name any more; or nobody will ever have it.
  unlink((FOLDER + name).c_str());
  close(fd);
  for (int i = 0; i < n && result == ncclSuccess; i++) {
    if (board->slots[slot_of[i]].pid == shared->members[i].pid) continue;
    found("not modelled: the ranks have different parents, and so no board in common; set PRETENDED_JOB");
    return fail(ncclInternalError);
  }
  return result;
}

ncclResult_t Peers::exchange(const Op& op) {
  if (error != ncclSuccess) return (ncclResult_t)error.load();
  bool all = op.kind == Kind::reduce_scatter || op.kind == Kind::all_to_all;
  size_t bytes = op.kind == Kind::split ? 0 : op.count * width(op.type) * (all ? n : 1);
  if (op.kind == Kind::broadcast && op.root != r) bytes = 0;
  uint64_t call = calls + 1;
  auto& mine = shared->members[r].calls[call % 2];
  describe(op, &mine);
  if (bytes > HALF) {
    found("not modelled: " + text_of(mine, global(op.root)) + " has more than " + std::to_string(HALF >> 20) + " MiB");
    return fail(ncclInternalError);
  }
  if (bytes) memcpy(input(r, call), op.in, bytes);
  mine.number = call;
  calls = call;
  std::string wrong;
  auto what = [&] { return text_of(mine, global(op.root)) + ", call " + std::to_string(call); };
  auto missing = [&] {
    unsigned mask = 0;
    for (int i = 0; i < n; i++) {
      auto& theirs = shared->members[i].calls[call % 2];
      if (theirs.number != call)
        mask |= 1u << i;
      else if (wrong.empty() && !equal(mine, theirs))
        wrong = "; rank " + std::to_string(global(i)) + " calls " +
                with_site(text_of(theirs, global(theirs.root)), theirs.site);
    }
    return wrong.empty() ? mask : 0;
  };
  auto result = wait({what, op.site, op.kind == Kind::split}, missing);
  if (result != ncclSuccess || wrong.empty()) return result;
  std::string own = with_site(text_of(mine, global(op.root)), mine.site);
  found("mismatch: rank " + std::to_string(global(r)) + " calls " + own + wrong +
        ", as call " + std::to_string(call) + " of communicator of ranks " +
        ranks_text() + "; on a GPU this hangs or gives wrong numbers");
  return fail(ncclInvalidUsage);
}
ncclResult_t Peers::collective(const Op& op) {
  std::lock_guard<std::mutex> g(one);
  auto result = exchange(op);
  if (result != ncclSuccess) return result;
  if (!op.captured) on_stream(op.stream, "nccl " + name_of(op.kind), ranges_of(op));
  compute(op);
  return ncclSuccess;
}
void Peers::compute(const Op& op) {
  size_t bytes = op.count * width(op.type);
  char* out = (char*)op.out;
  if (reduces(op.kind)) {
    if (op.kind == Kind::reduce && op.root != r) return;
    std::vector<const void*> in;
    std::vector<Factor> factors;
    for (int i = 0; i < n; i++) {
      in.push_back(input(i, calls) + (op.kind == Kind::reduce_scatter ? r * bytes : 0));
      factors.push_back(shared->members[i].calls[calls % 2].factor);
    }
    combine(op.type, op.op, in, factors, out, op.count);
  } else if (op.kind == Kind::broadcast) {
    if (op.root != r || op.in != op.out) memcpy(out, input(op.root, calls), bytes);
  } else if (op.kind == Kind::all_gather) {
    for (int i = 0; i < n; i++) memcpy(out + i * bytes, input(i, calls), bytes);
  } else if (op.kind == Kind::all_to_all) {
    for (int i = 0; i < n; i++) memcpy(out + i * bytes, input(i, calls) + r * bytes, bytes);
  }
}

// ---- sends and receives ----
bool Peers::try_send(const Op& op) {
  auto& channel = shared->channels[r][op.root];
  uint64_t number = channel.sent;
  if (number >= channel.received + 2) return false;
  describe(op, &channel.boxes[number % 2]);
  if (!op.captured) on_stream(op.stream, "nccl send", ranges_of(op));
  if (op.count) memcpy(box(r, op.root, number), op.in, op.count * width(op.type));
  channel.sent = number + 1;
  return true;
}
bool Peers::try_recv(const Op& op, ncclResult_t* result) {
  auto& channel = shared->channels[op.root][r];
  uint64_t number = channel.received;
  if (channel.sent <= number) return false;
  auto& theirs = channel.boxes[number % 2];
  if (theirs.count != op.count || theirs.type != op.type) {
    Described mine;
    describe(op, &mine);
    std::string own = with_site(text_of(mine, global(op.root)), mine.site);
    std::string other = with_site(text_of(theirs, global(r)), theirs.site);
    found("mismatch: rank " + std::to_string(global(r)) + " calls " + own + "; rank " +
          std::to_string(global(op.root)) + " calls " + other + "; on a GPU this hangs or gives wrong numbers");
    *result = fail(ncclInvalidUsage);
    return true;
  }
  if (!op.captured) on_stream(op.stream, "nccl recv", ranges_of(op));
  if (op.count) memcpy(op.out, box(op.root, r, number), op.count * width(op.type));
  channel.received = number + 1;
  return true;
}
// The sends and receives of a group go on side by side; those of one channel keep their order.
ncclResult_t Peers::transfers(const std::vector<Op>& ops) {
  std::lock_guard<std::mutex> g(one);
  if (error != ncclSuccess) return (ncclResult_t)error.load();
  for (auto& op : ops)
    if (op.count * width(op.type) > BOX) {
      found("not modelled: " + name_of(op.kind) + " of more than " + std::to_string(BOX >> 20) + " MiB");
      return fail(ncclInternalError);
    }
  std::vector<const Op*> open;
  for (auto& op : ops) open.push_back(&op);
  ncclResult_t wrong = ncclSuccess;
  auto missing = [&] {
    unsigned mask[2] = {0, 0};  // of sends and of receives
    std::vector<const Op*> left;
    for (int receives = 0; receives < 2; receives++)
      for (auto* op : open) {
        if ((op->kind == Kind::recv) != receives) continue;
        unsigned bit = 1u << op->root;
        bool is_done = !(mask[receives] & bit) && wrong == ncclSuccess &&
                       (receives ? try_recv(*op, &wrong) : try_send(*op));
        if (is_done) continue;
        mask[receives] |= bit;
        left.push_back(op);
      }
    open.swap(left);
    return wrong == ncclSuccess ? mask[0] | mask[1] : 0;
  };
  auto what = [&] {
    Described d;
    describe(*open[0], &d);
    std::string more = open.size() > 1 ? " and " + std::to_string(open.size() - 1) + " more of its group" : "";
    return text_of(d, global(d.root)) + more;
  };
  auto result = wait({what, ops[0].site, false}, missing);
  return result == ncclSuccess ? wrong : result;
}

// ---- what nccl.cpp calls ----
ncclResult_t Peers::split(int color, int key, const std::string& where, Comm** made) {
  std::lock_guard<std::mutex> g(one);
  Comm dummy{n, r, dev, nullptr};
  Op op{Kind::split, nullptr, nullptr, 0, ncclInt8, -1, 0, &dummy, nullptr, {}, where};
  op.color = color;
  op.key = key;
  *made = nullptr;
  auto result = exchange(op);
  if (result != ncclSuccess || color == NCCL_SPLIT_NOCOLOR) return result;
  std::vector<std::pair<int, int>> ours;  // key and rank
  for (int i = 0; i < n; i++) {
    auto& d = shared->members[i].calls[calls % 2];
    if (d.color == color) ours.push_back({d.key, i});
  }
  std::sort(ours.begin(), ours.end());
  uint64_t made_from[] = {calls, (uint64_t)color};
  int rank = std::find(ours.begin(), ours.end(), std::make_pair(key, r)) - ours.begin();
  auto peers = std::make_shared<Peers>(ours.size(), rank, mixed(id, made_from, sizeof made_from));
  for (size_t i = 0; i < ours.size(); i++) peers->slot_of[i] = slot_of[ours[i].second];
  peers->dev = dev;
  result = peers->join("ncclCommSplit", where);
  *made = new Comm{peers->n, rank, dev, peers};
  return result;
}
void Peers::leave(bool aborts) {
  if (aborts) aborted = true;
  if (shared) shared->members[r].gone = 1;
  fail(aborts ? ncclSystemError : ncclInvalidUsage);
  if (!shared) return;
  if (!one.try_lock()) return;  // a call of another thread still uses the memory
  munmap(shared, size_of(n));
  shared = nullptr;
  one.unlock();
}

ncclResult_t make_id(ncclUniqueId* id) {
  return getrandom(id, sizeof *id, 0) == sizeof *id ? ncclSuccess : ncclSystemError;
}
ncclResult_t join_by_id(Comm* comm, const ncclUniqueId& id, const std::string& site) {
  comm->peers = std::make_shared<Peers>(comm->n, comm->r, mixed(0xcbf29ce484222325, &id, sizeof id));
  comm->peers->dev = comm->dev;
  return comm->peers->join("ncclCommInitRank", site);
}
ncclResult_t split(Comm* parent, int color, int key, const std::string& site, Comm** made) {
  return parent->peers->split(color, key, site, made);
}
// The communicators of a group come in the same order on each rank, as the calls of a group have none among them.
ncclResult_t run_group(std::vector<Op> ops) {
  std::stable_sort(ops.begin(), ops.end(), [](auto& a, auto& b) {
    return std::make_pair(is_p2p(a), a.comm->peers->id) < std::make_pair(is_p2p(b), b.comm->peers->id);
  });
  for (size_t i = 0; i < ops.size();) {
    size_t end = i + 1;
    auto& peers = ops[i].comm->peers;
    if (is_p2p(ops[i]))
      while (end < ops.size() && ops[end].comm->peers == peers) end++;
    auto result = is_p2p(ops[i]) ? peers->transfers({ops.begin() + i, ops.begin() + end}) : peers->collective(ops[i]);
    if (result != ncclSuccess) return result;
    i = end;
  }
  return ncclSuccess;
}
void leave(Comm* comm, bool aborts) { comm->peers->leave(aborts); }
// What a call has returned is an error of that call. torch ends a process for an error that is found here.
ncclResult_t error_of(Comm* comm) { return comm->peers->error == ncclRemoteError ? ncclRemoteError : ncclSuccess; }
