// A pretended CUDA 13 runtime and driver, with which torch's CUDA build runs without a GPU. Memory is host memory.
// Kernels and cuBLAS do nothing, but for torch's fills, so that small control values are right. Copies move bytes. Every
// call is counted and, if asked, logged with its stream. The order of streams and events, and the rules of stream
// capture, are modelled. A chosen call can be made to fail. nccl.cpp has the collectives, races.cpp the race detector.
#include "device.h"

#include <cxxabi.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "races.h"

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
struct Kernel {
  std::string name;
};
struct Graph {
  int nodes = 0;
  unsigned long long capture = 0;
};

std::recursive_mutex mu;
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
thread_local int cur_dev = 0;
static thread_local int thread_mode = 0;  // cudaStreamCaptureModeGlobal
static thread_local cudaError_t last_error = cudaSuccess;
static std::map<unsigned long long, int> capture_nodes;
static std::set<Stream*> all_streams;

bool nodata() {
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
Stream* S(void* s) {
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
bool hit(const char* name) {
  std::lock_guard<std::recursive_mutex> g(mu);
  if (counting && !is_silent()) counts[name]++;
  if (broken) return true;
  auto i = failing.find(name);
  if (i == failing.end() || --i->second > 0) return false;
  failing.erase(i);
  std::string call = name;
  broken = call != "cudaMalloc" && call != "cudaHostAlloc" && call != "cudaEventCreate" && call.find("nccl") != 0;
  return true;
}
void logf_(const char* f, ...) {
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
static std::set<unsigned long long> invalid_captures;  // a call came between that no capture stands
static bool unsafe_now() {
  if (thread_mode == 2) return false;
  std::lock_guard<std::recursive_mutex> g(mu);
  for (auto c : active_captures) {
    bool mine = pthread_equal(capture_thread[c], pthread_self());
    if (capture_mode[c] == 2) continue;
    if (mine || (thread_mode == 0 && capture_mode[c] == 0)) return invalid_captures.insert(c), true;
  }
  return false;
}

// Durations, for order in time: microseconds per kernel and per collective, GB/s of the network.
static double dur_kernel() {
  static double d = getenv("PRETENDED_KERNEL_US") ? atof(getenv("PRETENDED_KERNEL_US")) * 1e-6 : 0;
  return d;
}
double dur_byte() {
  static double d = getenv("PRETENDED_NET_GBS") ? 1e-9 / atof(getenv("PRETENDED_NET_GBS")) : 0;
  return d;
}
double dur_coll() {
  static double d = getenv("PRETENDED_COLL_US") ? atof(getenv("PRETENDED_COLL_US")) * 1e-6 : 0;
  return d;
}
void busy(Stream* s, double d) {
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
  *v = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = CUDART_VERSION;
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
  host_waits_for_all();
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
  forget(b, m);
  *p = b;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  hit("cudaFree");
  if (!p) return cudaSuccess;
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "free");
  host_waits_for_all();
  std::lock_guard<std::recursive_mutex> g(mu);
  auto i = blocks.find((char*)p);
  if (i != blocks.end()) {
    forget(p, i->second.first);
    munmap(p, i->second.first);
    blocks.erase(i);
  }
  return cudaSuccess;
}
// What hands out memory in the order of a stream, or maps it in pieces, is not modelled.
static void refuse(const char* what) {
  std::string text = std::string("not modelled: ") + what + "; use torch's caching allocator as it is";
  fprintf(stderr, "pretended device: %s\n", text.c_str());
  finding(text);
}
API cudaError_t cudaMallocAsync(void**, size_t, cudaStream_t) {
  refuse("cudaMallocAsync");
  return err(cudaErrorNotSupported, "cudaMallocAsync");
}
API cudaError_t cudaFreeAsync(void*, cudaStream_t) { return err(cudaErrorNotSupported, "cudaFreeAsync"); }
API CUresult cuMemAddressReserve(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long) {
  refuse("expandable segments (cuMemAddressReserve)");
  return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long) {
  refuse("memory that is mapped in pieces (cuMemCreate)");
  return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuMulticastCreate(CUmemGenericAllocationHandle*, const CUmulticastObjectProp*) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  if (hit("cudaHostAlloc")) return err(cudaErrorMemoryAllocation, "hostAlloc");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "hostAlloc");
  *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::lock_guard<std::recursive_mutex> g(mu);
  blocks[(char*)*p] = {n, 1};
  forget(*p, n);
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
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
bool is_pinned(const void* p) { return where(p).second == 1; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  auto w = where(p);
  a->type = w.second == 0 ? cudaMemoryTypeDevice : w.second == 1 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = cur_dev;
  a->devicePointer = (void*)p;
  a->hostPointer = (void*)p;
  return cudaSuccess;
}
void node(Stream* s) {
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
  std::vector<Range> ranges;  // pageable memory is read or written by the host, while the program waits
  if (where(s).second != 2) ranges.push_back({s, n, false});
  if (where(d).second != 2) ranges.push_back({d, n, true});
  if (f->capture) {
    captured_entry(f, std::string("a copy ") + kinds[k], ranges, [=] { memcpy(d, s, n); });
    return cudaSuccess;
  }
  on_stream(f, std::string("a copy ") + kinds[k], ranges);
  if (where(d).second == 2) {
    wait_until(f->ready);
    host_waits_for(f);
  }
  if (!(k == 3 && n > (1 << 16) && nodata())) memcpy(d, s, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  if (hit("memcpy sync")) return err(cudaErrorIllegalAddress, "memcpy sync");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "memcpy sync");
  std::vector<Range> ranges;
  if (where(s).second != 2) ranges.push_back({s, n, false});
  if (where(d).second != 2) ranges.push_back({d, n, true});
  on_stream(S(nullptr), "a copy that the host waits for", ranges);
  host_waits_for(S(nullptr));
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
  on_stream(S(nullptr), "a memset", {{d, n, true}});
  memset(d, v, n);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) {
  auto* f = S(st);
  if (hit("memsetAsync")) return err(cudaErrorIllegalAddress, "memsetAsync");
  logf_("stream %d: memset %zu bytes at %p", f->id, n, d);
  node(f);
  if (f->capture)
    captured_entry(f, "a memset", {{d, n, true}}, [=] { memset(d, v, n); });
  else {
    on_stream(f, "a memset", {{d, n, true}});
    memset(d, v, n);
  }
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
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = S(s)->prio;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  if (hit("cudaStreamQuery")) return err(cudaErrorIllegalAddress, "cudaStreamQuery");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "streamQuery");
  return now() < S(s)->ready || !known_to_have_passed(S(s)) ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  if (hit("cudaStreamSynchronize")) return err(cudaErrorIllegalAddress, "cudaStreamSynchronize");
  if (S(s)->capture || unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "streamSynchronize");
  logf_("host waits for stream %d", S(s)->id);
  wait_until(S(s)->ready);
  host_waits_for(S(s));
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned fl) {
  auto* f = S(s);
  auto* v = (Event*)e;
  if (hit("cudaStreamWaitEvent")) return err(cudaErrorIllegalAddress, "streamWaitEvent");
  logf_("stream %d: waits for event %d (stream %d)%s", f->id, v->id, v->stream, f->capture ? " [captured]" : "");
  if (f->capture && v->recorded && v->capture != f->capture)
    return err(cudaErrorStreamCaptureIsolation, "a captured stream waits for an event from outside");
  waits_for(f, v);
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
  recorded(v, f);
  logf_("stream %d: records event %d", f->id, v->id);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  if (hit("cudaEventQuery")) return err(cudaErrorIllegalAddress, "cudaEventQuery");
  auto* v = (Event*)e;
  if (v->capture && active_captures.count(v->capture)) return err(cudaErrorCapturedEvent, "query of a captured event");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "eventQuery during a capture");
  return v->recorded && (now() < v->time || !known_to_have_passed(v)) ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  if (hit("cudaEventSynchronize")) return err(cudaErrorIllegalAddress, "eventSynchronize");
  auto* v = (Event*)e;
  if (v->capture && active_captures.count(v->capture))
    return err(cudaErrorCapturedEvent, "synchronize of a captured event");
  if (unsafe_now()) return err(cudaErrorStreamCaptureUnsupported, "eventSynchronize during a capture");
  logf_("host waits for event %d (stream %d)", v->id, v->stream);
  if (v->recorded) {
    wait_until(v->time);
    host_waits_for(v);
  }
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
  capture_begins(f->capture);
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
  q->capture = c;
  std::vector<Stream*> captured;
  for (auto* o : all_streams)
    if (o->capture == c) {
      o->capture = 0;
      captured.push_back(o);
    }
  capture_ends(c, captured);
  f->origin = false;
  active_captures.erase(c);
  logf_("stream %d: capture ends with %d nodes", f->id, q->nodes);
  if (invalid_captures.count(c)) return err(cudaErrorStreamCaptureInvalidated, "endCapture");
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
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long f) {
  return cudaGraphInstantiateWithFlags(e, g, f);
}
// What a graph keeps alive is never given back here.
API cudaError_t cudaUserObjectCreate(cudaUserObject_t* o, void*, cudaHostFn_t, unsigned, unsigned) {
  *o = (cudaUserObject_t)1;
  return cudaSuccess;
}
API cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) {
  if (hit("cudaGraphLaunch")) return err(cudaErrorIllegalAddress, "cudaGraphLaunch");
  logf_("stream %d: graph launch", S(s)->id);
  capture_runs(((Graph*)graph)->capture, S(s));
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
  launched_on(f);
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
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 4;
  return cudaSuccess;
}
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
  *v = CUDART_VERSION;
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
// Tells Python of a launch of Triton: function, parameters, programs and stream.
static std::atomic<void (*)(void*, void**, unsigned, void*)> on_launch{nullptr};
API void pretended_on_launch(void (*tell)(void*, void**, unsigned, void*)) { on_launch = tell; }
API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction fn, void** a, void**) {
  auto* f = S(c->hStream);
  auto* k = (Kernel*)fn;
  if (hit("triton launch")) return CUDA_ERROR_LAUNCH_FAILED;
  node(f);
  busy(f, dur_kernel());
  logf_("stream %d: triton %s grid %u%s", f->id, k->name.c_str(), c->gridDimX, f->capture ? " [captured]" : "");
  if (auto tell = on_launch.load(); tell && watching()) tell(fn, a, c->gridDimX, c->hStream);
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

// ---- cuBLAS: does nothing ----
#define OK(name)      \
  API int name(...) { \
    hit("cublas");    \
    launched_on(nullptr); \
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
