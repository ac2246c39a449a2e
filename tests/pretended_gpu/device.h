// What the files of the pretended device share: streams, events, the counter of calls, and the log.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))

using Clock = std::vector<unsigned>;  // by line of races.cpp: how much of that line comes before

struct Stream {
  double ready = 0;
  int id;
  int dev;
  unsigned long long capture = 0;
  bool origin = false;
  int prio = 0;
  int line = -1;  // of races.cpp; -1 as long as nothing was noted of it
};
struct Event {
  double time = 0;
  int id;
  unsigned long long capture = 0;
  bool recorded = false;
  int stream = -1;
  Clock clock;        // what came before it, where races are watched
  double noted = 0;   // when it was recorded, in seconds
};

extern std::recursive_mutex mu;
extern thread_local int cur_dev;
double now();
Stream* S(void* handle);                                    // the stream of a handle
bool hit(const char* name);                                 // counts a call, and returns whether it is to fail
void logf_(const char* format, ...) __attribute__((format(printf, 1, 2)));
void node(Stream* s);                                       // one more node of the graph that the stream captures, if any
void busy(Stream* s, double seconds);                       // the stream works so long
bool nodata();                                              // whether large copies are left out
double dur_coll();                                          // of each collective, in seconds
double dur_byte();                                          // of each byte of a collective, in seconds
