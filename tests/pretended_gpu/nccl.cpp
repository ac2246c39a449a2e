// A pretended NCCL: its functions, and the values that they compute. A process is alone by default, and thinks that its
// peers hold what it holds. With PRETENDED_PEERS=real the peers are processes of this machine (see nccl_peers.cpp).
#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "nccl_peers.h"

static std::map<int, double> premul;     // of a process that is alone
static std::map<int, Factor> factor_of;  // of real peers
static int n_op = PREMUL;
static thread_local int depth = 0;             // of ncclGroupStart
static thread_local std::vector<Op> in_group;  // what runs at the outermost ncclGroupEnd
// What this rank has sent by a broadcast in the group that is open: an all-gather may be a broadcast of each rank.
static thread_local const void* sent = nullptr;
static thread_local size_t sent_bytes = 0;

size_t width(ncclDataType_t t) {
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
static const char* NAMES[] = {"allReduce", "allGather", "reduceScatter", "broadcast", "reduce",
                              "alltoAll",  "send",      "recv",          "split"};
std::string name_of(Kind kind) { return NAMES[(int)kind]; }

std::vector<Range> ranges_of(const Op& op) {
  size_t w = op.count * width(op.type), all = w * op.comm->n;
  size_t reads = w, writes = w;
  switch (op.kind) {
    case Kind::all_gather:
      writes = all;
      break;
    case Kind::reduce_scatter:
      reads = all;
      break;
    case Kind::all_to_all:
      reads = writes = all;
      break;
    case Kind::broadcast:
      if (op.comm->r != op.root) reads = 0;
      break;
    case Kind::reduce:
      if (op.comm->r != op.root) writes = 0;
      break;
    case Kind::send:
      writes = 0;
      break;
    case Kind::recv:
      reads = 0;
      break;
    default:
      break;
  }
  auto *in = (const char*)op.in, *out = (const char*)op.out;
  if (writes && in >= out && in + reads <= out + writes) reads = 0;  // in place: what is written is read, too
  std::vector<Range> ranges;
  if (reads) ranges.push_back({in, reads, false});
  if (writes) ranges.push_back({out, writes, true});
  return ranges;
}

// ---- values of real peers ----
// NCCL adds two at a time, and each sum has the type of the values: so each is rounded here, too. Integers wrap.
template <class T>
struct Number {
  static constexpr bool whole = std::is_integral<T>::value;
  using Float = typename std::conditional<std::is_same<T, double>::value, double, float>::type;
  using Wide = typename std::conditional<whole, uint64_t, Float>::type;
  static T sum(T a, T b) { return T(Wide(a) + Wide(b)); }
  static T product(T a, T b) { return T(Wide(a) * Wide(b)); }
  static T least(T a, T b) {
    if constexpr (whole) return std::min(a, b);
    else return T(std::fmin(Wide(a), Wide(b)));
  }
  static T most(T a, T b) {
    if constexpr (whole) return std::max(a, b);
    else return T(std::fmax(Wide(a), Wide(b)));
  }
};
template <class T, class Two>
static void fold(const std::vector<const void*>& in, const std::vector<T>& factors, T* out, size_t count, Two two) {
  for (size_t i = 0; i < count; i++) {
    auto held = [&](size_t rank) {
      T value = ((const T*)in[rank])[i];
      return factors.empty() ? value : Number<T>::product(value, factors[rank]);
    };
    T value = held(0);
    for (size_t rank = 1; rank < in.size(); rank++) value = two(value, held(rank));
    out[i] = value;
  }
}
template <class T>
static void combine_as(int op, const std::vector<const void*>& in, const std::vector<Factor>& given, T* out,
                       size_t count) {
  using N = Number<T>;
  int n = in.size();
  std::vector<T> factors;
  if (op == PREMUL)
    for (auto& f : given) factors.push_back(*(const T*)f.value);
  if (op == ncclAvg && !N::whole) factors.assign(n, T(typename N::Wide(1) / n));
  if (op == ncclProd)
    fold(in, factors, out, count, N::product);
  else if (op == ncclMin)
    fold(in, factors, out, count, N::least);
  else if (op == ncclMax)
    fold(in, factors, out, count, N::most);
  else
    fold(in, factors, out, count, N::sum);
  if constexpr (N::whole)
    if (op == ncclAvg)
      for (size_t i = 0; i < count; i++) out[i] /= T(n);
}
void combine(ncclDataType_t type, int op, const std::vector<const void*>& in, const std::vector<Factor>& factors,
             void* out, size_t count) {
  switch (type) {
    case ncclInt8:
      return combine_as(op, in, factors, (int8_t*)out, count);
    case ncclUint8:
      return combine_as(op, in, factors, (uint8_t*)out, count);
    case ncclInt32:
      return combine_as(op, in, factors, (int32_t*)out, count);
    case ncclUint32:
      return combine_as(op, in, factors, (uint32_t*)out, count);
    case ncclInt64:
      return combine_as(op, in, factors, (int64_t*)out, count);
    case ncclUint64:
      return combine_as(op, in, factors, (uint64_t*)out, count);
    case ncclFloat16:
      return combine_as(op, in, factors, (__half*)out, count);
    case ncclBfloat16:
      return combine_as(op, in, factors, (__nv_bfloat16*)out, count);
    case ncclFloat32:
      return combine_as(op, in, factors, (float*)out, count);
    case ncclFloat64:
      return combine_as(op, in, factors, (double*)out, count);
    case ncclFloat8e4m3:
      return combine_as(op, in, factors, (__nv_fp8_e4m3*)out, count);
    case ncclFloat8e5m2:
      return combine_as(op, in, factors, (__nv_fp8_e5m2*)out, count);
    default:
      break;
  }
}

// ---- communicators ----
API ncclResult_t ncclGetVersion(int* v) {
  *v = 22809;
  return ncclSuccess;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* u) {
  memset(u, 7, sizeof *u);
  return peers_are_real() ? make_id(u) : ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int r, ncclConfig_t*) {
  auto* comm = new Comm{n, r, cur_dev, nullptr};
  *c = (ncclComm_t)comm;
  hit("ncclCommInit");
  return peers_are_real() ? join_by_id(comm, id, site()) : ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId u, int r) {
  return ncclCommInitRankConfig(c, n, u, r, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int r, int, ncclUniqueId* u, ncclConfig_t* f) {
  return ncclCommInitRankConfig(c, n, *u, r, f);
}
API ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return ncclInternalError; }
API ncclResult_t ncclCommSplit(ncclComm_t p, int color, int key, ncclComm_t* c, ncclConfig_t*) {
  auto* parent = (Comm*)p;
  if (parent->peers) return split(parent, color, key, site(), (Comm**)c);
  *c = (ncclComm_t) new Comm(*parent);
  return ncclSuccess;
}
API ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) { return ncclInternalError; }
static ncclResult_t left(ncclComm_t c, bool aborts) {
  if (c && ((Comm*)c)->peers) leave((Comm*)c, aborts);
  return ncclSuccess;
}
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t c) { return left(c, false); }
API ncclResult_t ncclCommAbort(ncclComm_t c) { return left(c, true); }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* r) {
  static bool failed = false;
  failed = failed || hit("ncclCommGetAsyncError");
  *r = failed ? ncclRemoteError : ((Comm*)c)->peers ? error_of((Comm*)c) : ncclSuccess;
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
API ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* device) {
  *device = ((Comm*)c)->dev;
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
API const char* ncclGetLastError(ncclComm_t) {
  static thread_local std::string text;
  text = last_finding();
  return text.c_str();
}
API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* s, ncclDataType_t t, ncclScalarResidence_t where,
                                          ncclComm_t) {
  hit("ncclRedOpCreatePreMulSum");
  std::lock_guard<std::recursive_mutex> g(mu);
  *op = (ncclRedOp_t)(n_op++);
  Factor factor;
  if (where == ncclScalarDevice)
    factor.at = s;
  else
    memcpy(factor.value, s, width(t));
  factor_of[*op] = factor;
  premul[*op] = t == ncclFloat64 ? *(double*)s : t == ncclFloat32 ? *(float*)s : 1;
  return ncclSuccess;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

// ---- groups ----
// Runs the calls of a group, or one call alone. Of a stream that is captured the calls are kept for the replay: those
// of a group together, as a receive of a group must not wait before the group's sends.
static ncclResult_t launch(std::vector<Op> ops) {
  std::vector<Op> at_once;
  std::vector<std::pair<Stream*, std::vector<Op>>> later;
  for (auto& op : ops) {
    if (!op.stream->capture) {
      at_once.push_back(op);
      continue;
    }
    op.captured = true;
    auto of_stream = [&](auto& one) { return one.first == op.stream; };
    auto i = std::find_if(later.begin(), later.end(), of_stream);
    if (i == later.end()) i = later.insert(i, {op.stream, {}});
    i->second.push_back(op);
  }
  for (auto& [stream, kept] : later) {
    std::vector<Range> ranges;
    for (auto& op : kept)
      for (auto& range : ranges_of(op)) ranges.push_back(range);
    std::string what = kept.size() == 1 ? "nccl " + name_of(kept[0].kind) : "an nccl group";
    captured_entry(stream, what, ranges, [kept = kept] { run_group(kept); });
  }
  return at_once.empty() ? ncclSuccess : run_group(std::move(at_once));
}
API ncclResult_t ncclGroupStart() {
  hit("ncclGroupStart");
  if (!depth++) sent = nullptr;
  return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() {
  if (depth > 0) depth--;
  if (depth || in_group.empty()) return ncclSuccess;
  std::vector<Op> ops;
  ops.swap(in_group);
  return launch(std::move(ops));
}
API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return ncclSuccess; }

// Counts and logs a call, and notes what it reads and writes. Returns whether it fails.
static bool noted(const char* n, const Op& op, size_t bytes, const void* a, void* b, int shown_op = -1) {
  auto* f = op.stream;
  bool fails = hit((std::string("nccl ") + n).c_str());
  node(f);
  busy(f, dur_coll() + bytes * dur_byte());
  logf_("stream %d: nccl %s %zu bytes op %d %p -> %p%s", f->id, n, bytes, shown_op, a, b,
        f->capture ? " [captured]" : "");
  if (fails || op.comm->peers) return fails;
  if (f->capture)
    captured_entry(f, std::string("nccl ") + n, ranges_of(op), [] {});  // alone, a replay computes nothing
  else
    on_stream(f, std::string("nccl ") + n, ranges_of(op));
  return false;
}
static Op made(Kind kind, const void* a, void* b, size_t n, ncclDataType_t t, int op, int root, ncclComm_t c,
               cudaStream_t s) {
  Op it{kind, a, b, n, t, op, root, (Comm*)c, S(s), {}, ""};
  if (!it.comm->peers) return it;
  it.site = site();
  if (op >= PREMUL) {
    std::lock_guard<std::recursive_mutex> g(mu);
    it.factor = factor_of[op];
    it.op = PREMUL;
  }
  return it;
}
// Whether a process that is alone has no values to compute.
static bool done(const Op& op, ncclResult_t* result) {
  *result = ncclSuccess;
  if (!op.comm->peers) return op.stream->capture;
  if (op.root < 0 || op.root >= op.comm->n)
    *result = ncclInvalidArgument;
  else if (depth)
    in_group.push_back(op);
  else
    *result = launch({op});
  return true;
}

// ---- the calls; what follows `done` is for a process that is alone ----
#define SMALL (1 << 20)
#define TINY (1 << 12)  // bytes: where only calls are timed, no time goes into the sums of whole buckets
static void multiply_bfloat16(unsigned short* p, double m) {
  unsigned bits = (unsigned)*p << 16;
  float value;
  memcpy(&value, &bits, 4);
  value *= m;
  memcpy(&bits, &value, 4);
  *p = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // rounded to the nearest, to even
}
static double premul_of(int op) {
  std::lock_guard<std::recursive_mutex> g(mu);
  return premul[op];
}
static void multiply(void* values, size_t n, ncclDataType_t t, double m) {
  if (m == 1) return;
  for (size_t i = 0; i < n; i++) switch (t) {
      case ncclFloat32:
        ((float*)values)[i] *= m;
        break;
      case ncclFloat64:
        ((double*)values)[i] *= m;
        break;
      case ncclInt32:
        ((int*)values)[i] *= m;
        break;
      case ncclInt64:
        ((long*)values)[i] *= m;
        break;
      case ncclUint8:
        ((unsigned char*)values)[i] *= m;
        break;
      case ncclBfloat16:
        multiply_bfloat16((unsigned short*)values + i, m);
        break;
      default:
        break;
    }
}
API ncclResult_t ncclAllReduce(const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t s) {
  Op it = made(Kind::all_reduce, a, b, n, t, op, 0, c, s);
  ncclResult_t result;
  if (noted("allReduce", it, n * width(t), a, b, op)) return ncclSystemError;
  if (done(it, &result)) return result;
  int k = ((Comm*)c)->n;
  if (nodata() && n * width(t) > TINY) return ncclSuccess;
  if (a != b) memcpy(b, a, n * width(t));
  multiply(b, n, t, op == ncclSum ? k : op >= PREMUL ? premul_of(op) * k : 1);
  return ncclSuccess;
}
API ncclResult_t ncclAllGather(const void* a, void* b, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  Op it = made(Kind::all_gather, a, b, n, t, -1, 0, c, s);
  ncclResult_t result;
  if (noted("allGather", it, n * width(t), a, b)) return ncclSystemError;
  if (done(it, &result)) return result;
  if (nodata() && n * width(t) > SMALL) return ncclSuccess;
  size_t w = n * width(t);
  std::vector<char> x((const char*)a, (const char*)a + w);
  for (int i = 0; i < ((Comm*)c)->n; i++) memcpy((char*)b + i * w, x.data(), w);
  return ncclSuccess;
}
API ncclResult_t ncclReduceScatter(const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                                   cudaStream_t s) {
  Op it = made(Kind::reduce_scatter, a, b, n, t, op, 0, c, s);
  ncclResult_t result;
  if (noted("reduceScatter", it, n * width(t), a, b, op)) return ncclSystemError;
  if (done(it, &result)) return result;
  int k = ((Comm*)c)->n, r = ((Comm*)c)->r;
  if (n * width(t) > SMALL) return ncclSuccess;
  memmove(b, (const char*)a + r * n * width(t), n * width(t));
  multiply(b, n, t, op == ncclSum ? k : op >= PREMUL ? premul_of(op) * k : 1);
  return ncclSuccess;
}
API ncclResult_t ncclAlltoAll(const void* a, void* b, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  Op it = made(Kind::all_to_all, a, b, n, t, -1, 0, c, s);
  ncclResult_t result;
  if (noted("alltoAll", it, n * width(t), a, b)) return ncclSystemError;
  done(it, &result);
  return result;
}
API ncclResult_t ncclBroadcast(const void* a, void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                               cudaStream_t s) {
  Op it = made(Kind::broadcast, a, b, n, t, -1, root, c, s);
  ncclResult_t result;
  if (noted("broadcast", it, n * width(t), a, b)) return ncclSystemError;
  if (done(it, &result)) return result;
  if (a != b) memmove(b, a, n * width(t));
  if (root == ((Comm*)c)->r) {
    sent = depth ? a : nullptr;
    sent_bytes = n * width(t);
  } else if (depth && sent && sent_bytes == n * width(t)) {
    memmove(b, sent, sent_bytes);  // imaginary peers hold what this rank holds
  }
  return ncclSuccess;
}
API ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  Op it = made(Kind::broadcast, b, b, n, t, -1, root, c, s);
  ncclResult_t result;
  if (noted("bcast", it, n * width(t), b, b)) return ncclSystemError;
  done(it, &result);
  return result;
}
API ncclResult_t ncclReduce(const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c,
                            cudaStream_t s) {
  Op it = made(Kind::reduce, a, b, n, t, op, root, c, s);
  ncclResult_t result;
  if (noted("reduce", it, n * width(t), a, b)) return ncclSystemError;
  done(it, &result);
  return result;
}
API ncclResult_t ncclSend(const void* a, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  Op it = made(Kind::send, a, nullptr, n, t, -1, peer, c, s);
  ncclResult_t result;
  if (noted("send", it, n * width(t), a, nullptr)) return ncclSystemError;
  done(it, &result);
  return result;
}
API ncclResult_t ncclRecv(void* b, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  Op it = made(Kind::recv, nullptr, b, n, t, -1, peer, c, s);
  ncclResult_t result;
  if (noted("recv", it, n * width(t), nullptr, b)) return ncclSystemError;
  done(it, &result);
  return result;
}
