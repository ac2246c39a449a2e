// A pretended CUDA 13 runtime, driver and NCCL, with which torch's CUDA build runs without a GPU. Memory is host
// memory. Kernels and cuBLAS do nothing, but for torch's fills, so that small control values are right. Copies and
// small collectives move bytes: the peers of a communicator are thought to hold what this rank holds. Every call is
// counted and, if asked, logged with its stream. The order of streams and events, and the rules of stream capture, are
// modelled. A chosen call can be made to fail.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <nccl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))

#include <time.h>
static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
struct Stream {
  double ready = 0;
  int id;
  int dev;
  unsigned long long capture = 0;
  bool origin = false;
  int prio = 0;
};
struct Event {
  double time = 0;
  int id;
  unsigned long long capture = 0;
  bool recorded = false;
  int stream = -1;
};
struct Kernel {
  std::string name;
};
struct Graph {
  int nodes = 0;
};

static std::recursive_mutex mu;
static std::map<std::string, long> counts;
static std::vector<std::string> logv;
static std::atomic<bool> logging{false}, counting{true};
static int n_stream = 1, n_event = 1;
static unsigned long long n_capture = 0;
static Stream default_streams[16];
static std::unordered_map<const void*, Kernel*> kernels_by_host;
static std::map<char*, std::pair<size_t, int>> blocks;  // address -> size, kind (0 device, 1 host)
static std::set<unsigned long long> active_captures;
static std::map<unsigned long long, int> capture_mode;
static thread_local int cur_dev = 0;
static thread_local int thread_mode = 0;  // cudaStreamCaptureModeGlobal
static thread_local cudaError_t last_error = cudaSuccess;
static std::map<unsigned long long, int> capture_nodes;
static std::set<Stream*> all_streams;

static bool nodata() {
  static bool b = getenv("PRETENDED_NODATA");
  return b;
}
static bool kernelnames() {
  static bool b = getenv("PRETENDED_KERNELS");
  return b;
}
static int ndev() {
  static int n = getenv("PRETENDED_DEVICES") ? atoi(getenv("PRETENDED_DEVICES")) : 1;
  return n;
}
static Stream* S(void* s) {
  if (s == nullptr || s == (void*)1 || s == (void*)2) {
    auto* d = &default_streams[cur_dev];
    d->id = 0;
    d->dev = cur_dev;
    return d;
  }
  return (Stream*)s;
}
static std::map<std::string, long> failing;  // by call: so many more calls until one fails
static bool broken = false;                  // an error of the device lasts: every later call fails, too
// Counts a call. Returns whether it is to fail.
static bool hit(const char* name) {
  std::lock_guard<std::recursive_mutex> g(mu);
  if (counting) counts[name]++;
  if (broken) return true;
  auto i = failing.find(name);
  if (i == failing.end() || --i->second > 0) return false;
  failing.erase(i);
  std::string call = name;
  broken = call != "cudaMalloc" && call != "cudaHostAlloc" && call != "cudaEventCreate" && call.find("nccl") != 0;
  return true;
}
static void logf_(const char* f, ...) __attribute__((format(printf, 1, 2)));
static void logf_(const char* f, ...) {
  if (!logging) return;
  char b[1024];
  va_list a;
  va_start(a, f);
  vsnprintf(b, sizeof b, f, a);
  va_end(a);
  std::lock_guard<std::recursive_mutex> g(mu);
  logv.push_back(b);
}
static cudaError_t err(cudaError_t e, const char* what) {
  last_error = e;
  logf_("ERROR %d in %s", (int)e, what);
  if (getenv("PRETENDED_VERBOSE")) fprintf(stderr, "pretended device: error %d in %s\n", (int)e, what);
  return e;
}
// whether an unsafe call is forbidden now on this thread
static std::map<unsigned long long, pthread_t> capture_thread;
static bool unsafe_now() {
  if (thread_mode == 2) return false;
  std::lock_guard<std::recursive_mutex> g(mu);
  for (auto c : active_captures) {
    bool mine = pthread_equal(capture_thread[c], pthread_self());
    if (capture_mode[c] == 2) continue;
    if (mine || (thread_mode == 0 && capture_mode[c] == 0)) return true;
  }
  return false;
}

// Durations, for order in time: microseconds per kernel and per collective, GB/s of the network.
static double dur_kernel() {
  static double d = getenv("PRETENDED_KERNEL_US") ? atof(getenv("PRETENDED_KERNEL_US")) * 1e-6 : 0;
  return d;
}
static double dur_byte() {
  static double d = getenv("PRETENDED_NET_GBS") ? 1e-9 / atof(getenv("PRETENDED_NET_GBS")) : 0;
  return d;
}
static double dur_coll() {
  static double d = getenv("PRETENDED_COLL_US") ? atof(getenv("PRETENDED_COLL_US")) * 1e-6 : 0;
  return d;
}
static void busy(Stream* s, double d) {
  if (s->capture) return;
  double t = now();
  if (s->ready < t) s->ready = t;
  s->ready += d;
}
static void wait_until(double t) {
  while (now() < t) usleep(20);
}
static double device_ready() {
  std::lock_guard<std::recursive_mutex> g(mu);
  double t = default_streams[cur_dev].ready;
  for (auto* o : all_streams)
    if (o->dev == cur_dev && o->ready > t) t = o->ready;
  return t;
}
// ---- controls ----
API void pretended_log(int on) { logging = on; }
API void pretended_counting(int on) { counting = on; }
API void pretended_fail(const char* name, long after) {
  std::lock_guard<std::recursive_mutex> g(mu);
  failing[name] = after;
}
API void pretended_reset() {
  std::lock_guard<std::recursive_mutex> g(mu);
  counts.clear();
  logv.clear();
}
API const char* pretended_counts() {
  static std::string s;
  std::lock_guard<std::recursive_mutex> g(mu);
  s.clear();
  for (auto& c : counts) s += c.first + "\t" + std::to_string(c.second) + "\n";
  return s.c_str();
}
API const char* pretended_log_text() {
  static std::string s;
  std::lock_guard<std::recursive_mutex> g(mu);
  s.clear();
  for (auto& l : logv) s += l + "\n";
  return s.c_str();
}

// ---- runtime ----
API cudaError_t cudaGetDeviceCount(int* n) {
  *n = ndev();
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* d) {
  *d = cur_dev;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int d) {
  if (d >= ndev()) return err(cudaErrorInvalidDevice, "setDevice");
  cur_dev = d;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API const char* cudaGetErrorString(cudaError_t e) {
  static thread_local char b[64];
  snprintf(b, 64, "pretended CUDA error %d", (int)e);
  return b;
}
API const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
API cudaError_t cudaGetLastError() {
  auto e = last_error;
  last_error = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3 (pretended)");
  p->totalGlobalMem = 85ull << 30;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->sharedMemPerBlockOptin = 232448;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->pciBusID = 1;
  p->textureAlignment = 512;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  switch (a) {
    case cudaDevAttrMultiProcessorCount:
      *v = 132;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *v = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *v = 0;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *v = 1024;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *v = 2048;
      break;
    case cudaDevAttrWarpSize:
      *v = 32;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *v = 232448;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *v = 49152;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *v = 65536;
      break;
    default:
      *v = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* b, int n, int d) {
  snprintf(b, n, "0000:%02x:00.0", d + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* l, int* g) {
  *l = 0;
  *g = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* c, int, int) {
  *c = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  if (hit("cudaDeviceSynchronize")) return err(cudaErrorIllegalAddress, "cudaDeviceSynchronize");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "deviceSync");
  logf_("host waits for the device");
  wait_until(device_ready());
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void** p, size_t n) {
  if (hit("cudaMalloc")) return err(cudaErrorMemoryAllocation, "malloc");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "malloc");
  size_t m = (n + (2u << 20)) & ~((2ul << 20) - 1);
  char* a =
      (char*)mmap(nullptr, m + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (a == MAP_FAILED) return err(cudaErrorMemoryAllocation, "malloc");
  char* b = (char*)(((size_t)a + (2 << 20) - 1) & ~((2ul << 20) - 1));
  std::lock_guard<std::recursive_mutex> g(mu);
  blocks[b] = {m, 0};
  *p = b;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  hit("cudaFree");
  if (!p) return cudaSuccess;
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "free");
  std::lock_guard<std::recursive_mutex> g(mu);
  auto i = blocks.find((char*)p);
  if (i != blocks.end()) {
    munmap(p, i->second.first);
    blocks.erase(i);
  }
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  if (hit("cudaHostAlloc")) return err(cudaErrorMemoryAllocation, "hostAlloc");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "hostAlloc");
  *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::lock_guard<std::recursive_mutex> g(mu);
  blocks[(char*)*p] = {n, 1};
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* p) {
  std::lock_guard<std::recursive_mutex> g(mu);
  blocks.erase((char*)p);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  *f = 80ull << 30;
  *t = 85ull << 30;
  return cudaSuccess;
}
static std::pair<char*, int> where(const void* p) {
  std::lock_guard<std::recursive_mutex> g(mu);
  auto i = blocks.upper_bound((char*)p);
  if (i == blocks.begin()) return {nullptr, 2};
  --i;
  if ((char*)p < i->first + i->second.first) return {i->first, i->second.second};
  return {nullptr, 2};
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  auto w = where(p);
  a->type = w.second == 0 ? cudaMemoryTypeDevice : w.second == 1 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = cur_dev;
  a->devicePointer = (void*)p;
  a->hostPointer = (void*)p;
  return cudaSuccess;
}
static void node(Stream* s) {
  if (s->capture) capture_nodes[s->capture]++;
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t st) {
  auto* f = S(st);
  const char* kinds[] = {"HtoH", "HtoD", "DtoH", "DtoD", "any"};
  if (hit((std::string("memcpyAsync ") + kinds[k]).c_str())) return err(cudaErrorIllegalAddress, "memcpyAsync");
  int pinned = where(k == 1 ? s : d).second;
  logf_("stream %d: memcpy %s%s %zu bytes %p -> %p%s", f->id, kinds[k],
        (k == 1 || k == 2) && pinned == 2 ? " (pageable)" : "", n, s, d, f->capture ? " [captured]" : "");
  if (f->capture && (k == 1 || k == 2) && pinned == 2)
    return err(cudaErrorStreamCaptureUnsupported, "memcpy of pageable memory in capture");
  node(f);
  if (k == 2 && pinned == 2) wait_until(f->ready);
  if (!f->capture && !(k == 3 && n > (1 << 16) && nodata())) memcpy(d, s, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  if (hit("memcpy sync")) return err(cudaErrorIllegalAddress, "memcpy sync");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "memcpy sync");
  memcpy(d, s, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t) {
  hit("memcpyPeer");
  memcpy(d, s, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  static char b[65536];
  *p = b;
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* d, int v, size_t n) {
  hit("memset");
  memset(d, v, n);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) {
  auto* f = S(st);
  if (hit("memsetAsync")) return err(cudaErrorIllegalAddress, "memsetAsync");
  logf_("stream %d: memset %zu bytes at %p", f->id, n, d);
  node(f);
  if (!f->capture) memset(d, v, n);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int p) {
  auto* f = new Stream;
  f->dev = cur_dev;
  f->prio = p;
  {
    std::lock_guard<std::recursive_mutex> g(mu);
    f->id = n_stream++;
    all_streams.insert(f);
  }
  *s = (cudaStream_t)f;
  hit("cudaStreamCreate");
  logf_("stream %d created, priority %d", f->id, p);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = S(s)->prio;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  if (hit("cudaStreamQuery")) return err(cudaErrorIllegalAddress, "cudaStreamQuery");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "streamQuery");
  return now() < S(s)->ready ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  if (hit("cudaStreamSynchronize")) return err(cudaErrorIllegalAddress, "cudaStreamSynchronize");
  if (S(s)->capture || unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "streamSynchronize");
  logf_("host waits for stream %d", S(s)->id);
  wait_until(S(s)->ready);
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned fl) {
  auto* f = S(s);
  auto* v = (Event*)e;
  if (hit("cudaStreamWaitEvent")) return err(cudaErrorIllegalAddress, "streamWaitEvent");
  logf_("stream %d: waits for event %d (stream %d)%s", f->id, v->id, v->stream, f->capture ? " [captured]" : "");
  if (f->capture && v->recorded && v->capture != f->capture)
    return err(cudaErrorStreamCaptureIsolation, "a captured stream waits for an event from outside");
  if (!f->capture && f->ready < v->time) f->ready = v->time;
  if (!f->capture && v->capture) {
    if (!active_captures.count(v->capture)) return cudaSuccess;
    f->capture = v->capture;
  }
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  auto* v = new Event;
  {
    std::lock_guard<std::recursive_mutex> g(mu);
    v->id = n_event++;
  }
  *e = (cudaEvent_t)v;
  if (hit("cudaEventCreate")) return err(cudaErrorMemoryAllocation, "eventCreate");
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  hit("cudaEventDestroy");
  delete (Event*)e;
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  auto* v = (Event*)e;
  auto* f = S(s);
  v->recorded = true;
  v->capture = f->capture;
  v->stream = f->id;
  v->time = f->ready > now() ? f->ready : now();
  if (hit("cudaEventRecord")) return err(cudaErrorIllegalAddress, "eventRecord");
  logf_("stream %d: records event %d", f->id, v->id);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  if (hit("cudaEventQuery")) return err(cudaErrorIllegalAddress, "cudaEventQuery");
  auto* v = (Event*)e;
  if (v->capture && active_captures.count(v->capture)) return err(cudaErrorCapturedEvent, "query of a captured event");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "eventQuery during a capture");
  return v->recorded && now() < v->time ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  if (hit("cudaEventSynchronize")) return err(cudaErrorIllegalAddress, "eventSynchronize");
  auto* v = (Event*)e;
  if (v->capture && active_captures.count(v->capture))
    return err(cudaErrorCapturedEvent, "synchronize of a captured event");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "eventSynchronize during a capture");
  logf_("host waits for event %d (stream %d)", v->id, v->stream);
  if (v->recorded) wait_until(v->time);
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* t, cudaEvent_t a, cudaEvent_t b) {
  *t = (((Event*)b)->time - ((Event*)a)->time) * 1e3;
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime_v2(float* t, cudaEvent_t a, cudaEvent_t b) {
  return cudaEventElapsedTime(t, a, b);
}
API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcCloseMemHandle(void*) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return cudaErrorNotSupported; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* u) {
  hit("launchHostFunc");
  f(u);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* u, unsigned) {
  f(s, cudaSuccess, u);
  return cudaSuccess;
}
// pools
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) {
  *p = (cudaMemPool_t)1;
  return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
// capture
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode m) {
  auto* f = S(s);
  std::lock_guard<std::recursive_mutex> g(mu);
  f->capture = ++n_capture;
  f->origin = true;
  active_captures.insert(f->capture);
  capture_mode[f->capture] = m;
  capture_thread[f->capture] = pthread_self();
  logf_("stream %d: capture %llu begins, mode %d", f->id, f->capture, (int)m);
  hit("beginCapture");
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* gr) {
  auto* f = S(s);
  std::lock_guard<std::recursive_mutex> g(mu);
  auto c = f->capture;
  auto* q = new Graph;
  q->nodes = capture_nodes[c];
  *gr = (cudaGraph_t)q;
  for (auto* o : all_streams)
    if (o->capture == c) o->capture = 0;
  f->origin = false;
  active_captures.erase(c);
  logf_("stream %d: capture ends with %d nodes", f->id, q->nodes);
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st) {
  hit("cudaStreamIsCapturing");
  *st = S(s)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* st, unsigned long long* id,
                                         cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** ed,
                                         size_t* n) {
  auto* f = S(s);
  *st = f->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = f->capture;
  if (g) *g = (cudaGraph_t)1;
  if (d) *d = nullptr;
  if (ed) *ed = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  int old = thread_mode;
  thread_mode = *m;
  *m = (cudaStreamCaptureMode)old;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
  *e = (cudaGraphExec_t)g;
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t s) {
  if (hit("cudaGraphLaunch")) return err(cudaErrorIllegalAddress, "cudaGraphLaunch");
  logf_("stream %d: graph launch", S(s)->id);
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) {
  *n = 1;
  return cudaSuccess;
}
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
// kernels
static thread_local struct {
  dim3 g, b;
  size_t m;
  void* s;
} cfg[16];
static thread_local int ncfg = 0;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, CUstream_st* s) {
  cfg[ncfg++] = {g, b, m, s};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* m, void* s) {
  --ncfg;
  *g = cfg[ncfg].g;
  *b = cfg[ncfg].b;
  *m = cfg[ncfg].m;
  *(void**)s = cfg[ncfg].s;
  return cudaSuccess;
}
API void** __cudaRegisterFatBinary(void*) {
  static void* h[4];
  return h;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* h, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  std::lock_guard<std::recursive_mutex> g(mu);
  auto* k = new Kernel;
  k->name = name;
  kernels_by_host[h] = k;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  std::lock_guard<std::recursive_mutex> g(mu);
  auto i = kernels_by_host.find(f);
  if (i == kernels_by_host.end()) {
    auto* q = new Kernel;
    q->name = "unknown";
    kernels_by_host[f] = q;
    *k = (cudaKernel_t)q;
  } else
    *k = (cudaKernel_t)i->second;
  return cudaSuccess;
}
static std::string pretty(const std::string& n) {
  int st;
  char* d = abi::__cxa_demangle(n.c_str(), 0, 0, &st);
  std::string r = d ? d : n;
  free(d);
  return r;
}
static bool run_torch_kernel(const std::string& name, void** args, dim3 g, dim3 b);
static cudaError_t launched(Kernel* k, dim3 g, dim3 b, void** args, void* st) {
  auto* f = S(st);
  if (hit("kernel")) return err(cudaErrorLaunchFailure, "launch");
  node(f);
  busy(f, k->name.find("spin_kernel") != std::string::npos ? *(long*)args[0] / 1.98e9 : dur_kernel());
  if (logging) {
    std::string p = pretty(k->name);
    logf_("stream %d: kernel %.220s grid %u%s", f->id, p.c_str(), g.x, f->capture ? " [captured]" : "");
  }
  if (!f->capture) run_torch_kernel(k->name, args, g, b);
  if (kernelnames()) {
    std::lock_guard<std::recursive_mutex> l(mu);
    counts["kernel " + pretty(k->name).substr(0, 200)]++;
  }
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** a, size_t, cudaStream_t s) {
  return launched((Kernel*)k, g, b, a, s);
}
API cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** a, size_t, cudaStream_t s) {
  cudaKernel_t k;
  __cudaGetKernel(&k, f);
  return launched((Kernel*)k, g, b, a, s);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) {
  cudaKernel_t k;
  __cudaGetKernel(&k, f);
  return launched((Kernel*)k, c->gridDim, c->blockDim, a, c->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = 90;
  a->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 4;
  return cudaSuccess;
}

// Fills and copies of torch are done, so that small control values are right. Everything else does nothing. Of a large
// fill only the end is done: there lies the report of a bucket, which must not be what an earlier owner has left.
template <class T>
static bool fill(void** a) {
  int N = *(int*)a[0];
  T v = *(T*)a[1];
  T* p = *(T**)a[2];
  int most = nodata() ? 1 << 16 : 1 << 22;
  for (int i = N > most ? N - 8192 : 0; i < N; i++) p[i] = v;
  return true;
}
static bool run_torch_kernel(const std::string& n, void** a, dim3, dim3) {
  if (n.find("vectorized_elementwise_kernel") == std::string::npos &&
      n.find("unrolled_elementwise_kernel") == std::string::npos)
    return false;
  size_t f = n.find("FillFunctorI");
  if (f != std::string::npos) {
    char c = n[f + 12];
    switch (c) {
      case 'f':
        return fill<float>(a);
      case 'd':
        return fill<double>(a);
      case 'i':
        return fill<int>(a);
      case 'l':
        return fill<long>(a);
      case 'b':
        return fill<bool>(a);
      case 'h':
        return fill<unsigned char>(a);
      case 'a':
        return fill<signed char>(a);
      case 's':
        return fill<short>(a);
      default:
        if (n.compare(f + 12, 13, "N3c108BFloat1") == 0 || n.compare(f + 12, 11, "N3c104HalfE") == 0)
          return fill<unsigned short>(a);
    }
  }
  return false;
}

// ---- driver ----
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult r, const char** s) {
  static thread_local char b[64];
  snprintf(b, 64, "pretended driver error %d", (int)r);
  *s = b;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult r, const char** s) { return cuGetErrorString(r, s); }
API CUresult cuDeviceGet(CUdevice* d, int n) {
  *d = n;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* n) {
  *n = ndev();
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) {
  return (CUresult)cudaDeviceGetAttribute(v, (cudaDeviceAttr)a, d);
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  *c = (CUcontext)(size_t)(d + 1);
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* f, int* a) {
  *f = 0;
  *a = 1;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)1;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* d) {
  *d = cur_dev;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetLimit(size_t* v, CUlimit) {
  *v = 1 << 20;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuModuleLoadData(CUmodule* m, const void*) {
  *m = (CUmodule)1;
  hit("cuModuleLoadData");
  return CUDA_SUCCESS;
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* f, CUmodule, const char* n) {
  auto* k = new Kernel;
  k->name = n;
  *f = (CUfunction)k;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 40 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuFuncGetModule(CUmodule* m, CUfunction) {
  *m = (CUmodule)1;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction fn, void** a, void**) {
  auto* f = S(c->hStream);
  auto* k = (Kernel*)fn;
  if (hit("triton launch")) return CUDA_ERROR_LAUNCH_FAILED;
  node(f);
  busy(f, dur_kernel());
  logf_("stream %d: triton %s grid %u%s", f->id, k->name.c_str(), c->gridDimX, f->capture ? " [captured]" : "");
  (void)a;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction fn, unsigned x, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            CUstream s, void**, void**) {
  auto* f = S(s);
  hit("driver launch");
  node(f);
  logf_("stream %d: driver kernel %s grid %u", f->id, ((Kernel*)fn)->name.c_str(), x);
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 1;
  return CUDA_SUCCESS;
}
API CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* v, CUpointer_attribute a, CUdeviceptr p) {
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr*)v = p;
  else
    *(unsigned long long*)v = 0;
  return CUDA_SUCCESS;
}
API CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* st) {
  *st = S(s)->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
static CUresult anything() { return CUDA_SUCCESS; }
#include <dlfcn.h>
API cudaError_t cudaGetDriverEntryPointByVersion(const char* n, void** p, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* r) {
  void* f = dlsym(RTLD_DEFAULT, n);
  *p = f ? f : (void*)anything;
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API CUresult cuGetProcAddress_v2(const char* n, void** p, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
  void* f = dlsym(RTLD_DEFAULT, n);
  *p = f ? f : (void*)anything;
  return CUDA_SUCCESS;
}

// ---- NCCL: this rank alone; its peers are thought to hold what it holds ----
struct Comm {
  int n, r, dev;
};
static std::map<int, double> premul;
static int n_op = 1000;
static size_t width(ncclDataType_t t) {
  switch (t) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    default:
      return 8;
  }
}
API ncclResult_t ncclGetVersion(int* v) {
  *v = 22809;
  return ncclSuccess;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* u) {
  memset(u, 7, sizeof *u);
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId, int r, ncclConfig_t*) {
  *c = (ncclComm_t) new Comm{n, r, cur_dev};
  hit("ncclCommInit");
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId u, int r) {
  return ncclCommInitRankConfig(c, n, u, r, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int r, int, ncclUniqueId* u, ncclConfig_t* f) {
  return ncclCommInitRankConfig(c, n, *u, r, f);
}
API ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return ncclInternalError; }
API ncclResult_t ncclCommSplit(ncclComm_t p, int, int, ncclComm_t* c, ncclConfig_t*) {
  *c = (ncclComm_t) new Comm(*(Comm*)p);
  return ncclSuccess;
}
API ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) { return ncclInternalError; }
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* r) {
  static bool failed = false;
  failed = failed || hit("ncclCommGetAsyncError");
  *r = failed ? ncclRemoteError : ncclSuccess;
  return ncclSuccess;
}
API ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
  *n = ((Comm*)c)->n;
  return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int* n) {
  *n = ((Comm*)c)->r;
  return ncclSuccess;
}
API ncclResult_t ncclCommRegister(const ncclComm_t, void* b, size_t n, void** h) {
  hit("ncclCommRegister");
  logf_("nccl registers %zu bytes at %p", n, b);
  *h = b;
  return ncclSuccess;
}
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
  hit("ncclCommDeregister");
  return ncclSuccess;
}
API ncclResult_t ncclCommWindowRegister(ncclComm_t, void* b, size_t, ncclWindow_t* w, int) {
  hit("ncclCommWindowRegister");
  *w = (ncclWindow_t)b;
  return ncclSuccess;
}
API ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }
API ncclResult_t ncclDevCommCreate(ncclComm_t, const void*, void*) { return ncclInternalError; }
API ncclResult_t ncclDevCommDestroy(ncclComm_t, const void*) { return ncclInternalError; }
API ncclResult_t ncclMemAlloc(void** p, size_t n) {
  hit("ncclMemAlloc");
  return cudaMalloc(p, n) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
API ncclResult_t ncclMemFree(void* p) {
  cudaFree(p);
  return ncclSuccess;
}
API const char* ncclGetErrorString(ncclResult_t) { return "pretended NCCL error"; }
API const char* ncclGetLastError(ncclComm_t) { return ""; }
API ncclResult_t ncclGroupStart() {
  hit("ncclGroupStart");
  return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() { return ncclSuccess; }
API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return ncclSuccess; }
API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* s, ncclDataType_t t, ncclScalarResidence_t,
                                          ncclComm_t) {
  hit("ncclRedOpCreatePreMulSum");
  *op = (ncclRedOp_t)(n_op++);
  premul[*op] = t == ncclFloat64 ? *(double*)s : t == ncclFloat32 ? *(float*)s : 1;
  return ncclSuccess;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
static bool coll(const char* n, size_t bytes, const void* a, void* b, cudaStream_t s, int op = -1) {
  auto* f = S(s);
  bool fails = hit((std::string("nccl ") + n).c_str());
  node(f);
  busy(f, dur_coll() + bytes * dur_byte());
  logf_("stream %d: nccl %s %zu bytes op %d %p -> %p%s", f->id, n, bytes, op, a, b, f->capture ? " [captured]" : "");
  return fails;
}
#define SMALL (1 << 20)
#define TINY (1 << 12)  // bytes: where only calls are timed, no time goes into the sums of whole buckets
static double peers_hold = 1;  // what each other rank holds, over what this one holds
API void pretended_peers(double factor) { peers_hold = factor; }
static void multiply_bfloat16(unsigned short* p, double m) {
  unsigned bits = (unsigned)*p << 16;
  float value;
  memcpy(&value, &bits, 4);
  value *= m;
  memcpy(&bits, &value, 4);
  *p = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // rounded to the nearest, to even
}
API ncclResult_t ncclAllReduce(const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t s) {
  if (coll("allReduce", n * width(t), a, b, s, op)) return ncclSystemError;
  if (S(s)->capture) return ncclSuccess;
  int k = ((Comm*)c)->n;
  if (nodata() && n * width(t) > TINY) return ncclSuccess;
  if (a != b) memcpy(b, a, n * width(t));
  double sum = 1 + (k - 1) * peers_hold;
  double m = op == ncclSum ? sum : op >= 1000 ? premul[op] * sum : 1;
  if (m != 1)
    for (size_t i = 0; i < n; i++) switch (t) {
        case ncclFloat32:
          ((float*)b)[i] *= m;
          break;
        case ncclFloat64:
          ((double*)b)[i] *= m;
          break;
        case ncclInt32:
          ((int*)b)[i] *= m;
          break;
        case ncclInt64:
          ((long*)b)[i] *= m;
          break;
        case ncclUint8:
          ((unsigned char*)b)[i] *= m;
          break;
        case ncclBfloat16:
          multiply_bfloat16((unsigned short*)b + i, m);
          break;
        default:
          break;
      }
  return ncclSuccess;
}
API ncclResult_t ncclAllGather(const void* a, void* b, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  if (coll("allGather", n * width(t), a, b, s)) return ncclSystemError;
  if (S(s)->capture) return ncclSuccess;
  if (nodata() && n * width(t) > SMALL) return ncclSuccess;
  size_t w = n * width(t);
  std::vector<char> x((const char*)a, (const char*)a + w);
  for (int i = 0; i < ((Comm*)c)->n; i++) memcpy((char*)b + i * w, x.data(), w);
  return ncclSuccess;
}
API ncclResult_t ncclReduceScatter(const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                                   cudaStream_t s) {
  if (coll("reduceScatter", n * width(t), a, b, s, op)) return ncclSystemError;
  if (S(s)->capture) return ncclSuccess;
  int k = ((Comm*)c)->n, r = ((Comm*)c)->r;
  if (n * width(t) > SMALL) return ncclSuccess;
  memmove(b, (const char*)a + r * n * width(t), n * width(t));
  double m = op == ncclSum ? k : op >= 1000 ? premul[op] * k : 1;
  for (size_t i = 0; i < n; i++) switch (t) {
      case ncclFloat32:
        ((float*)b)[i] *= m;
        break;
      case ncclFloat64:
        ((double*)b)[i] *= m;
        break;
      default:
        break;
    }
  return ncclSuccess;
}
API ncclResult_t ncclAlltoAll(const void* a, void* b, size_t n, ncclDataType_t t, ncclComm_t, cudaStream_t s) {
  if (coll("alltoAll", n * width(t), a, b, s)) return ncclSystemError;
  return ncclSuccess;
}
API ncclResult_t ncclBroadcast(const void* a, void* b, size_t n, ncclDataType_t t, int, ncclComm_t, cudaStream_t s) {
  if (coll("broadcast", n * width(t), a, b, s)) return ncclSystemError;
  if (a != b && !S(s)->capture) memmove(b, a, n * width(t));
  return ncclSuccess;
}
API ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t t, int, ncclComm_t, cudaStream_t s) {
  if (coll("bcast", n * width(t), b, b, s)) return ncclSystemError;
  return ncclSuccess;
}
API ncclResult_t ncclReduce(const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t, int, ncclComm_t,
                            cudaStream_t s) {
  if (coll("reduce", n * width(t), a, b, s)) return ncclSystemError;
  return ncclSuccess;
}
API ncclResult_t ncclSend(const void* a, size_t n, ncclDataType_t t, int, ncclComm_t, cudaStream_t s) {
  if (coll("send", n * width(t), a, 0, s)) return ncclSystemError;
  return ncclSuccess;
}
API ncclResult_t ncclRecv(void* b, size_t n, ncclDataType_t t, int, ncclComm_t, cudaStream_t s) {
  if (coll("recv", n * width(t), 0, b, s)) return ncclSystemError;
  return ncclSuccess;
}
// ---- cuBLAS: does nothing ----
#define OK(name)      \
  API int name(...) { \
    hit("cublas");    \
    return 0;         \
  }
API int cublasCreate_v2(void** h) {
  *h = (void*)1;
  return 0;
}
API int cublasDestroy_v2(void*) { return 0; }
API int cublasSetStream_v2(void*, void*) { return 0; }
API int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
API int cublasSetMathMode(void*, int) { return 0; }
API int cublasGetMathMode(void*, int* m) {
  *m = 0;
  return 0;
}
API int cublasSetPointerMode_v2(void*, int) { return 0; }
API int cublasGetPointerMode_v2(void*, int* m) {
  *m = 0;
  return 0;
}
OK(cublasSgemm_v2)
OK(cublasDgemm_v2)
OK(cublasSgemv_v2) OK(cublasDgemv_v2) OK(cublasGemmEx) OK(cublasSgemmEx) OK(cublasSgemmStridedBatched)
    OK(cublasDgemmStridedBatched) OK(cublasGemmStridedBatchedEx) OK(cublasSdot_v2) OK(cublasDdot_v2) OK(cublasDotEx) API
    int cublasLtMatmulDescCreate(void** d, int, int) {
  *d = malloc(8);
  return 0;
}
API int cublasLtMatmulDescDestroy(void*) { return 0; }
API int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatrixLayoutCreate(void** d, int, unsigned long, unsigned long, long) {
  *d = malloc(8);
  return 0;
}
API int cublasLtMatrixLayoutDestroy(void*) { return 0; }
API int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulPreferenceCreate(void** d) {
  *d = malloc(8);
  return 0;
}
API int cublasLtMatmulPreferenceDestroy(void*) { return 0; }
API int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int n, void* r, int* found) {
  (void)n;
  memset(r, 0, 64);
  *found = 1;
  return 0;
}
OK(cublasLtMatmul)
