#include "simt/traffic.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <tuple>
#include <unordered_map>

#include "simt/emulator.h"
#include "simt/report.h"

namespace simt {
namespace traffic {
namespace {

constexpr int kLanes = 32;
constexpr int kBanks = 32;
constexpr uint64_t kSectorBytes = 32;
constexpr uint32_t kMaxRequestBytes = 16;  // per lane; a longer range of shared memory is several

// One instruction of one warp: the lanes that take part, in order.
struct Request {
  const void* pc;
  uint32_t size;
  bool write, shared;
  int count = 0;
  std::array<uint64_t, kLanes> address;
  std::array<uint8_t, kLanes> lane;

  explicit Request(const Access& access)
      : pc(access.pc), size(access.size), write(access.write), shared(access.shared) {}
  void add(int lane_index, uint64_t lane_address) {
    lane[count] = static_cast<uint8_t>(lane_index);
    address[count++] = lane_address;
  }
};

struct Cost {
  uint64_t units;  // sectors, or wavefronts
  uint64_t ideal;
};

// ---- global memory: 32-byte sectors --------------------------------------------------------------------

Cost sectors_of(const Request& request) {
  std::array<uint64_t, kLanes * 2> sectors;  // at most 16 bytes: at most two sectors a lane
  size_t n = 0;
  bool ascending = true;
  for (int i = 0; i < request.count; ++i) {
    const uint64_t last = (request.address[i] + request.size - 1) / kSectorBytes;
    for (uint64_t sector = request.address[i] / kSectorBytes; sector <= last; ++sector) {
      if (n && sectors[n - 1] == sector) continue;
      if (n && sectors[n - 1] > sector) ascending = false;
      sectors[n++] = sector;
    }
  }
  if (!ascending) {
    std::sort(sectors.begin(), sectors.begin() + n);
    n = static_cast<size_t>(std::unique(sectors.begin(), sectors.begin() + n) - sectors.begin());
  }
  const uint64_t packed = (uint64_t(request.size) * request.count + kSectorBytes - 1) / kSectorBytes;
  return {n, std::min<uint64_t>(n, packed)};
}

// A bulk copy is one request, however long.
Cost sectors_of_ranges(const Request& request) {
  Cost cost{0, 0};
  for (int i = 0; i < request.count; ++i) {
    const uint64_t first = request.address[i] / kSectorBytes;
    cost.units += (request.address[i] + request.size - 1) / kSectorBytes - first + 1;
    cost.ideal += (request.size + kSectorBytes - 1) / kSectorBytes;
  }
  return cost;
}

// ---- shared memory: wavefronts -------------------------------------------------------------------------

// Distinct words of the busiest bank: every bank gives one word a wavefront, to as many lanes as want it.
uint64_t wavefronts_of(uint32_t* words, size_t n) {
  std::array<uint32_t, kBanks> word_of_bank;
  uint32_t used = 0;
  bool conflict = false;
  for (size_t i = 0; i < n && !conflict; ++i) {
    const uint32_t bank = words[i] % kBanks;
    conflict = used >> bank & 1 && word_of_bank[bank] != words[i];
    used |= 1u << bank;
    word_of_bank[bank] = words[i];
  }
  if (!conflict) return 1;
  std::sort(words, words + n);
  n = static_cast<size_t>(std::unique(words, words + n) - words);
  std::array<uint64_t, kBanks> waves{};
  for (size_t i = 0; i < n; ++i) ++waves[words[i] % kBanks];
  return *std::max_element(waves.begin(), waves.end());
}

// 32 lanes of up to 4 bytes go together, 16 of 8, 8 of 16.
Cost wavefronts_of(const Request& request) {
  const int phase_lanes = request.size <= 4 ? 32 : request.size <= 8 ? 16 : 8;
  Cost cost{0, 0};
  for (int i = 0; i < request.count;) {
    std::array<uint32_t, kLanes * 5> words;  // 16 bytes at any address: five words
    size_t n = 0;
    for (const int phase = request.lane[i] / phase_lanes;
         i < request.count && request.lane[i] / phase_lanes == phase; ++i) {
      const uint64_t last = (request.address[i] + request.size - 1) / 4;
      for (uint64_t word = request.address[i] / 4; word <= last; ++word)
        words[n++] = static_cast<uint32_t>(word);
    }
    cost.units += wavefronts_of(words.data(), n);
    ++cost.ideal;
  }
  return cost;
}

// ---- sums ----------------------------------------------------------------------------------------------

struct Site {
  uint64_t requests, bytes, units, ideal;
};
using SiteKey = std::tuple<const void*, bool, bool>;  // address, write, shared
struct SiteHash {
  size_t operator()(const SiteKey& key) const {
    return reinterpret_cast<size_t>(std::get<0>(key)) * 4 + std::get<1>(key) * 2 + std::get<2>(key);
  }
};
std::unordered_map<SiteKey, Site, SiteHash> sites;

void add(const Request& request) {
  if (request.shared && request.size > kMaxRequestBytes) {
    Request part = request;
    for (uint32_t done = 0; done < request.size; done += kMaxRequestBytes) {
      part.size = std::min(kMaxRequestBytes, request.size - done);
      for (int i = 0; i < request.count; ++i) part.address[i] = request.address[i] + done;
      add(part);
    }
    return;
  }
  const uint64_t bytes = uint64_t(request.size) * request.count;
  const Cost cost = request.shared                    ? wavefronts_of(request)
                    : request.size > kMaxRequestBytes ? sectors_of_ranges(request)
                                                      : sectors_of(request);
  Counters& sum = counters();
  if (request.shared) {
    (request.write ? sum.shared_store_requests : sum.shared_load_requests) += 1;
    (request.write ? sum.shared_store_waves : sum.shared_load_waves) += cost.units;
    (request.write ? sum.shared_store_ideal : sum.shared_load_ideal) += cost.ideal;
  } else {
    (request.write ? sum.global_store_requests : sum.global_load_requests) += 1;
    (request.write ? sum.global_store_sectors : sum.global_load_sectors) += cost.units;
    (request.write ? sum.global_store_bytes : sum.global_load_bytes) += bytes;
  }
  Site& site = sites[{request.pc, request.write, request.shared}];
  site.requests += 1;
  site.bytes += bytes;
  site.units += cost.units;
  site.ideal += cost.ideal;
}

bool same_instruction(const Access& a, const Access& b) {
  return a.pc == b.pc && a.size == b.size && a.write == b.write && a.shared == b.shared;
}

// Lanes that took different ways: requests are matched by instruction and by how often a lane had met it
// before.
struct Occurrence {
  const void* pc;
  uint32_t index, size;
  bool write, shared;
  bool operator==(const Occurrence&) const = default;
};
struct OccurrenceHash {
  size_t operator()(const Occurrence& o) const {
    return (reinterpret_cast<size_t>(o.pc) * 31 + o.index) * 64 + o.size * 4 + o.write * 2 + o.shared;
  }
};

void account_diverged(const std::vector<Access>* const lanes[kLanes]) {
  std::vector<Request> requests;
  std::unordered_map<Occurrence, size_t, OccurrenceHash> request_of;
  std::unordered_map<Occurrence, uint32_t, OccurrenceHash> met;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!lanes[lane]) continue;
    met.clear();
    for (const Access& access : *lanes[lane]) {
      Occurrence key{access.pc, 0, access.size, access.write, access.shared};
      key.index = ++met[key];
      const auto [entry, is_new] = request_of.try_emplace(key, requests.size());
      if (is_new) requests.emplace_back(access);
      requests[entry->second].add(lane, access.address);
    }
  }
  for (const Request& request : requests) add(request);
}

}  // namespace

void account(const std::vector<Access>* const lanes[kLanes]) {
  const std::vector<Access>* first = nullptr;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!lanes[lane] || lanes[lane]->empty()) continue;
    if (!first) first = lanes[lane];
    if (!std::equal(first->begin(), first->end(), lanes[lane]->begin(), lanes[lane]->end(), same_instruction))
      return account_diverged(lanes);
  }
  if (!first) return;
  for (size_t i = 0; i < first->size(); ++i) {
    Request request((*first)[i]);
    for (int lane = 0; lane < kLanes; ++lane)
      if (lanes[lane] && !lanes[lane]->empty()) request.add(lane, (*lanes[lane])[i].address);
    add(request);
  }
}

}  // namespace traffic

void clear_traffic() { traffic::sites.clear(); }

std::string traffic_table() {
  using traffic::Site;
  std::vector<const void*> pcs;
  for (const auto& [key, site] : traffic::sites) pcs.push_back(std::get<0>(key));
  const std::vector<std::string> lines = source_lines(pcs);

  // An unrolled loop has many addresses on one line.
  std::map<std::tuple<bool, bool, std::string>, Site> by_line;
  size_t index = 0;
  for (const auto& [key, site] : traffic::sites) {
    Site& sum = by_line[{std::get<2>(key), std::get<1>(key), lines[index++]}];
    sum.requests += site.requests;
    sum.bytes += site.bytes;
    sum.units += site.units;
    sum.ideal += site.ideal;
  }
  std::vector<std::pair<std::tuple<bool, bool, std::string>, Site>> rows(by_line.begin(), by_line.end());
  std::stable_sort(rows.begin(), rows.end(),
                   [](const auto& a, const auto& b) { return a.second.units > b.second.units; });

  std::string text =
      "memory  access   requests        bytes  sectors or waves   ideal  per request  source line\n";
  for (const auto& [key, site] : rows) {
    const auto& [shared, write, line] = key;
    char row[160];
    std::snprintf(row, sizeof row, "%-6s  %-6s %10llu %12llu %17llu %7llu %12.2f  ",
                  shared ? "shared" : "global", write ? "store" : "load",
                  static_cast<unsigned long long>(site.requests), static_cast<unsigned long long>(site.bytes),
                  static_cast<unsigned long long>(site.units), static_cast<unsigned long long>(site.ideal),
                  double(site.units) / double(site.requests));
    text += row + line + (site.units > site.ideal ? "  <- above the ideal\n" : "\n");
  }
  return text;
}

}  // namespace simt
