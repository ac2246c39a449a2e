// What the two halves of the pretended NCCL share: nccl.cpp has the functions and the values, nccl_peers.cpp has the
// processes, which are real where PRETENDED_PEERS=real, and their waits.
#pragma once
#include <nccl.h>

#include <memory>
#include <string>
#include <vector>

#include "races.h"

enum class Kind { all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, send, recv, split };

class Peers;
struct Comm {  // what an ncclComm_t points to
  int n, r, dev;
  std::shared_ptr<Peers> peers;  // none where this process is alone
};
struct Factor {  // of a PreMulSum
  unsigned char value[8] = {};
  const void* at = nullptr;  // memory of the device that has the value when the collective runs
};
struct Op {  // a call of NCCL, kept until it runs
  Kind kind;
  const void* in;
  void* out;
  size_t count;
  ncclDataType_t type;
  int op;    // of a reduction; PREMUL for each handle of a PreMulSum
  int root;  // or the peer
  Comm* comm;
  Stream* stream;
  Factor factor;
  std::string site;
  bool captured = false;
  int color = 0, key = 0;  // of a split
};
static const int PREMUL = 1000;

// ---- nccl.cpp ----
size_t width(ncclDataType_t type);
std::string name_of(Kind kind);
std::vector<Range> ranges_of(const Op& op);
// Adds up (or multiplies, ...) what the ranks hold, in the order of the ranks, so that each rank gets the same bits.
void combine(ncclDataType_t type, int op, const std::vector<const void*>& in, const std::vector<Factor>& factors,
             void* out, size_t count);

// ---- nccl_peers.cpp ----
bool peers_are_real();
ncclResult_t make_id(ncclUniqueId* id);
ncclResult_t join_by_id(Comm* comm, const ncclUniqueId& id, const std::string& site);
ncclResult_t split(Comm* parent, int color, int key, const std::string& site, Comm** made);
ncclResult_t run_group(std::vector<Op> ops);  // waits for the peers
void leave(Comm* comm, bool aborts);
ncclResult_t error_of(Comm* comm);
std::string last_finding();
