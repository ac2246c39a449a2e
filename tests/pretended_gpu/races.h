// Who wrote what, and what comes before what: vector clocks over the streams and the host, and the last accesses to
// each byte. Two accesses without an order, of which one writes, are a race.
#pragma once
#include <functional>

#include "device.h"

struct Range {
  const void* at;
  size_t bytes;
  bool writes;
};

bool watching();  // whether races are watched now, and this thread is not one of the instrument's own calculations
// An entry of a stream's queue: it comes after all that this stream and the host have before it.
void on_stream(Stream* s, const std::string& what, const std::vector<Range>& ranges);
// The host reads or writes memory now. Only pinned memory counts.
void on_host(const std::string& what, const std::vector<Range>& ranges);
void recorded(Event* e, Stream* s);         // an event after all that the stream has been given
void waits_for(Stream* s, Event* e);        // what the stream is given from now on comes after the event
void host_waits_for(Event* e);              // the host has waited
void host_waits_for(Stream* s);
void host_waits_for_all();                  // for every stream
bool known_to_have_passed(Event* e);        // whether a query may say yes: the host has waited for something later, or
bool known_to_have_passed(Stream* s);       // it was long ago
void forget(const void* at, size_t bytes);  // the memory has gone back to the device
void launched_on(Stream* s);                // a kernel of torch; null: on the stream that is current
std::string site();                         // the line of the program that makes this call, "" if unknown
void finding(const std::string& text);      // one more thing for the report; equal texts count once

// While a stream is captured, its entries are kept, and run when the graph is launched.
void captured_entry(Stream* s, const std::string& what, const std::vector<Range>& ranges, std::function<void()> run);
void capture_begins(unsigned long long capture);
void capture_ends(unsigned long long capture, const std::vector<Stream*>& streams);
void capture_runs(unsigned long long capture, Stream* s);
// Runs something of the instrument itself: it is no access, and no wait.
bool is_silent();
struct Silence {
  Silence();
  ~Silence();
};
