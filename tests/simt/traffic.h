#pragma once
// Memory traffic as a warp causes it: which lanes' accesses are one request, and what each request costs.
#include <cstdint>
#include <string>
#include <vector>

namespace simt::traffic {

struct Access {
  uint64_t address;
  const void* pc;
  uint32_t size;
  bool write, shared;
};

// Adds to simt::counters() the accesses that one warp's lanes made since they last stood together; a lane
// without any may be null. The n-th accesses of one instruction by several lanes are one request.
void account(const std::vector<Access>* const lanes[32]);

}  // namespace simt::traffic

namespace simt {

std::string
traffic_table();  // requests, bytes and cost per source line since clear_traffic(), costliest first
void clear_traffic();

}  // namespace simt
