#include "simt/memory.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "simt/checker.h"
#include "simt/machine.h"
#include "simt/report.h"

namespace simt {

namespace {

std::mutex one_op_at_a_time;
std::atomic<std::thread::id> holder;
std::vector<Region> regions;
std::vector<memory::Extent> extents;  // by address
const memory::Extent* last_found = nullptr;
std::map<std::string, uint64_t> ops;
std::mutex ops_mutex;

uint64_t begin_of(const Region& r) { return reinterpret_cast<uint64_t>(r.data); }

std::vector<memory::Extent> extents_of(std::vector<Region> sorted) {
  std::erase_if(sorted, [](const Region& r) { return r.bytes == 0; });
  std::sort(sorted.begin(), sorted.end(),
            [](const Region& a, const Region& b) { return begin_of(a) < begin_of(b); });
  std::vector<memory::Extent> result;
  for (const Region& r : sorted) {
    const uint64_t begin = begin_of(r), end = begin + r.bytes;
    const bool writable = r.access != Access::kIn, initialised = r.access != Access::kOut;
    if (!result.empty() && begin < result.back().end) {
      memory::Extent& shared = result.back();
      shared.end = std::max(shared.end, end);
      shared.writable |= writable;
      shared.initialised |= initialised;
    } else {
      result.push_back({begin, end, writable, initialised});
    }
  }
  return result;
}

}  // namespace

// ---- the op that runs -------------------------------------------------------------------------------------

Memory::Memory(const char* op, std::vector<Region> op_regions) {
  if (holder == std::this_thread::get_id())
    throw std::logic_error(std::string(op) + ": an op under the emulator must not run inside another");
  std::unique_lock turn(one_op_at_a_time);
  clear_reports();
  running.aborted = false;
  regions = std::move(op_regions);
  extents = extents_of(regions);
  checker::begin_op(extents);
  {
    std::lock_guard guard(ops_mutex);
    ++ops[op];
  }
  holder = std::this_thread::get_id();
  turn.release();  // until the op is done
}

Memory::~Memory() {
  checker::end_op(extents);
  last_found = nullptr;
  extents.clear();
  regions.clear();
  holder = std::thread::id();
  one_op_at_a_time.unlock();
}

void Memory::finish() {
  if (!reports().empty()) throw std::runtime_error(reports_text());
}

uint64_t launches(const std::string& op) {
  std::lock_guard guard(ops_mutex);
  const auto found = ops.find(op);
  return found == ops.end() ? 0 : found->second;
}

// ---- by address -------------------------------------------------------------------------------------------

namespace memory {

const Extent* find(uint64_t address) {
  if (last_found && address >= last_found->begin && address < last_found->end) return last_found;
  const auto behind = std::upper_bound(extents.begin(), extents.end(), address,
                                       [](uint64_t a, const Extent& e) { return a < e.begin; });
  if (behind == extents.begin() || address >= (behind - 1)->end) return nullptr;
  return last_found = &*(behind - 1);
}

std::string place(uint64_t address) {
  const Region* nearest = nullptr;
  int64_t nearest_distance = 0;
  for (const Region& r : regions) {
    if (r.bytes == 0) continue;
    const uint64_t begin = begin_of(r), end = begin + r.bytes;
    const std::string size = " of " + std::to_string(r.bytes);
    if (address >= begin && address < end)
      return std::string(r.name) + " + " + std::to_string(address - begin) + " bytes" + size;
    const int64_t distance = address < begin ? int64_t(address - begin) : int64_t(address - end);
    if (!nearest || std::abs(distance) < std::abs(nearest_distance)) {
      nearest = &r;
      nearest_distance = distance;
    }
  }
  if (!nearest) return "memory of no region (none is registered)";
  if (std::abs(nearest_distance) > int64_t(1) << 20) return "memory of no region";
  return std::to_string(nearest_distance < 0 ? -nearest_distance : nearest_distance) + " bytes " +
         (nearest_distance < 0 ? "before " : "behind the end of ") + nearest->name + " (" +
         std::to_string(nearest->bytes) + " bytes)";
}

}  // namespace memory

}  // namespace simt
