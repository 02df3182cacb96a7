#include "simt/landing.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simt/checker.h"
#include "simt/mbarrier.h"
#include "simt/names.h"
#include "simt/order.h"
#include "simt/report.h"
#include "simt/scheduler.h"

namespace simt {

namespace landing {

// What lands together and is told to the barrier at once.
class Flight {
 public:
  Block* block;
  mbarrier::Mbarrier* barrier;
  bool counts_bytes;
  const void* pc;
  std::string starter;
  std::vector<std::pair<Piece, std::vector<unsigned char>>> pieces;
};

namespace {

constexpr uint64_t kUnit = 16;  // every copy's bytes and addresses are multiples of it

std::vector<std::unique_ptr<Flight>> flights;  // oldest first
std::vector<std::vector<uint8_t>> awaited;     // by block slot: how many copies land in each unit

uint8_t* units_of(const Block& block, uint64_t address) {
  if (awaited.size() <= block.slot) awaited.resize(block.slot + 1);
  std::vector<uint8_t>& units = awaited[block.slot];
  if (units.empty()) units.resize((kSharedBytes + kSharedSlack) / kUnit);
  return units.data() + (address - reinterpret_cast<uint64_t>(block.shared)) / kUnit;
}

void mark(const Block& block, const Piece& piece, int change) {
  uint8_t* unit = units_of(block, piece.to);
  for (uint64_t i = 0; i < piece.total / kUnit; ++i) unit[i] = uint8_t(unit[i] + change);
}

void land(size_t index) {
  Unobserved guard;
  const std::unique_ptr<Flight> flight = std::move(flights[index]);
  flights.erase(flights.begin() + std::ptrdiff_t(index));
  --in_flight;
  checker::Epoch landed;
  if (checked()) landed = checker::next_of_agent(*flight->block, flight->barrier->number);
  uint32_t bytes = 0;
  for (const auto& [piece, value] : flight->pieces) {
    mark(*flight->block, piece, -1);
    bytes += piece.total;
    if (std::memcmp(reinterpret_cast<const void*>(piece.from), value.data(), piece.bytes) != 0)
      report("source changed under a copy", piece.pc, nullptr,
             flight->starter + " copies " + std::to_string(piece.bytes) + " bytes");
    unsigned char* const to = reinterpret_cast<unsigned char*>(piece.to);
    std::memcpy(to, value.data(), piece.bytes);
    std::memset(to + piece.bytes, 0, piece.total - piece.bytes);
    if (!checked()) continue;
    checker::land(*flight->block, piece.to, piece.total, landed, piece.pc);
    if (flight->counts_bytes) checker::end_read(piece.from, piece.bytes, landed, piece.pc);
  }
  if (checked()) checker::arrive(landed, flight->barrier->gathered);
  note_progress();
  if (flight->counts_bytes)
    mbarrier::count_bytes(*flight->barrier, bytes);
  else
    mbarrier::count_arrival(*flight->barrier, flight->pc);
}

}  // namespace

void clear() {
  flights.clear();
  awaited.clear();
  in_flight = 0;
}

Flight& start(Thread& thread, const void* barrier, bool counts_bytes, const void* pc) {
  mbarrier::Mbarrier& at = mbarrier::find(thread, barrier, pc);
  ++in_flight;
  at.awaited = at.phase + 1;
  at.awaited_at = pc;
  flights.push_back(
      std::make_unique<Flight>(Flight{&thread.home(), &at, counts_bytes, pc, name(thread), {}}));
  return *flights.back();
}

void add(Flight& flight, const Piece& piece, const void* value) {
  const auto* const bytes = static_cast<const unsigned char*>(value);
  flight.pieces.emplace_back(piece, std::vector<unsigned char>(bytes, bytes + piece.bytes));
  mark(*flight.block, piece, 1);
  std::memset(reinterpret_cast<void*>(piece.to), 0xff, piece.total);
}

bool land_one(bool any) {
  std::vector<size_t> candidates;
  for (size_t i = 0; i < flights.size(); ++i)
    if (any || !flights[i]->barrier->waiters.empty()) candidates.push_back(i);
  if (candidates.empty()) return false;
  land(candidates[options().seed ? random_number() % candidates.size() : 0]);
  return true;
}

void touch(Thread& thread, const Touch& touch) {
  const uint64_t begin = touch.address / kUnit * kUnit, end = touch.address + touch.size;
  const Block& block = thread.home();
  bool found = false;
  for (uint64_t unit = begin; unit < end; unit += kUnit) found = found || *units_of(block, unit) != 0;
  if (!found) return;
  Unobserved guard;
  for (const auto& flight : flights)
    for (const auto& [piece, value] : flight->pieces)
      if (flight->block == &block && piece.to < end && begin < piece.to + piece.total) {
        report(
            touch.write ? "write to a copy in flight" : "read of a copy in flight", touch.pc, piece.pc,
            name(thread) + ", " + std::to_string(touch.size) + " bytes at " + place(thread, touch.address));
        return;
      }
}

void exit(Block& block, const Thread& last) {
  const auto left = std::stable_partition(flights.begin(), flights.end(),
                                          [&](const auto& flight) { return flight->block != &block; });
  const void* started = left == flights.end() ? mbarrier::unseen_copy(block) : (*left)->pc;
  if (!started) return;
  Unobserved guard;
  report(
      "exit with copies in flight", started, nullptr,
      "no thread of " + block_name(block) + " waited for their end; the last, " + name(last) + ", is done");
  in_flight -= uint64_t(flights.end() - left);
  flights.erase(left, flights.end());
}

}  // namespace landing

// ---- called by device code --------------------------------------------------------------------------------

void copy_bulk(void* to, const void* from, uint32_t bytes, void* barrier) {
  using namespace landing;
  Thread& me = self();
  const void* pc = __builtin_return_address(0);
  const Touch destination{reinterpret_cast<uint64_t>(to), bytes, true, false, pc};
  const Touch source{reinterpret_cast<uint64_t>(from), bytes, false, false, pc, Path::kCoherent, false, true};
  const auto refuse = [&](const char* kind, const Touch& touch) {
    {
      Unobserved guard;
      report(kind, pc, nullptr,
             std::to_string(bytes) + " bytes at " + place(me, touch.address) + " by " + name(me));
    }
    abort_launch();
  };
  if (!in_shared(me, destination.address)) refuse("copy to other than shared memory", destination);
  if ((destination.address | bytes) % kUnit || bytes == 0) refuse("misaligned access", destination);
  if (source.address % kUnit) refuse("misaligned access", source);
  mbarrier::Mbarrier& at = mbarrier::find(me, barrier, pc);
  if (checked() && !checker::shown_to_proxy(at.made, me)) {
    Unobserved guard;
    report("missing mbarrier_init_fence", pc, at.made_at,
           "the mbarrier at " + place(me, at.address) + " is named by a bulk copy of " + name(me));
  }
  checker::touch_by_proxy(me, destination);
  touch_shared(me, destination);
  checker::touch_by_proxy(me, source);
  touch_global(me, source);
  log_access(me, {source.address, pc, bytes, false, false});
  if (me.at_grid_barrier) counters().grid_asked_bytes += bytes;
  Flight& flight = start(me, barrier, true, pc);
  add(flight, {destination.address, source.address, bytes, bytes, pc}, from);
  maybe_preempt();
}

void fence_proxy_async() {
  if (checked()) checker::fence_proxy(self());
}

}  // namespace simt
