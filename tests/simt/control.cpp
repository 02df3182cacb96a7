// The emulator from outside, for tests that loaded its extension: C functions that ctypes calls
// (tests/simulator.py). A returned text lives until the thread's next call of the same function.
#include <sstream>
#include <string>

#include "simt/emulator.h"
#include "simt/report.h"
#include "simt/traffic.h"

#pragma GCC visibility push(default)
extern "C" {

int simt_checked() { return simt::checked() ? 1 : 0; }

void simt_set_options(uint64_t seed, int preempt, uint64_t max_polls) {
  simt::options() = {.seed = seed, .preempt = preempt, .max_polls = max_polls};
}

void simt_set_device(int multiprocessors, int compute_capability) {
  simt::device_model() = {multiprocessors, compute_capability};
}

uint64_t simt_launches(const char* op) { return simt::launches(op); }

void simt_clear_counters() {
  simt::counters() = {};
  simt::clear_traffic();
}

// One JSON object, name to number.
const char* simt_counters() {
  thread_local std::string text;
  const simt::Counters& c = simt::counters();
  const struct {
    const char* name;
    uint64_t value;
  } kCounters[] = {
      {"launches", c.launches},
      {"threads", c.threads},
      {"global_load_bytes", c.global_load_bytes},
      {"global_load_sectors", c.global_load_sectors},
      {"global_load_requests", c.global_load_requests},
      {"global_store_bytes", c.global_store_bytes},
      {"global_store_sectors", c.global_store_sectors},
      {"global_store_requests", c.global_store_requests},
      {"shared_load_requests", c.shared_load_requests},
      {"shared_load_waves", c.shared_load_waves},
      {"shared_load_ideal", c.shared_load_ideal},
      {"shared_store_requests", c.shared_store_requests},
      {"shared_store_waves", c.shared_store_waves},
      {"shared_store_ideal", c.shared_store_ideal},
      {"barriers", c.barriers},
      {"warp_barriers", c.warp_barriers},
      {"collectives", c.collectives},
      {"atomics", c.atomics},
      {"grid_arrivals", c.grid_arrivals},
      {"grid_asked_bytes", c.grid_asked_bytes},
  };
  static_assert(sizeof(kCounters) / sizeof(kCounters[0]) == sizeof(simt::Counters) / sizeof(uint64_t));
  std::ostringstream json;
  for (const auto& counter : kCounters)
    json << (json.tellp() ? ", " : "{") << '"' << counter.name << "\": " << counter.value;
  json << '}';
  return (text = json.str()).c_str();
}

// Requests, bytes and cost by source line since the counters were cleared.
const char* simt_traffic_table() {
  thread_local std::string text;
  return (text = simt::traffic_table()).c_str();
}

// What the last op was found to do wrong; empty: nothing.
const char* simt_reports() {
  thread_local std::string text;
  return (text = simt::reports_text()).c_str();
}

}  // extern "C"
#pragma GCC visibility pop
