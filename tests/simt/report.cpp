#include "simt/report.h"

#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string_view>
#include <tuple>

namespace simt {
namespace {

struct Finding {
  std::string kind, message;
  const void *pc, *other_pc;
  uint64_t count;
  bool lines_must_differ;
};
std::vector<Finding> findings;
std::map<std::tuple<std::string, const void*, const void*>, size_t> finding_of;
std::vector<Report> texts;  // of `findings`, when last asked for

// ---- from an address to a place in a module ------------------------------------------------------------

struct Place {
  std::string module;    // path of the file, empty if unknown
  uintptr_t offset = 0;  // what addr2line wants
};

// Executables linked to a fixed address are looked up by address, everything else by distance from its base.
bool has_fixed_address(const std::string& path) {
  Elf64_Ehdr header{};
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&header), sizeof header);
  return header.e_type == ET_EXEC;
}

Place place_of(const void* pc) {
  Dl_info info{};
  if (!dladdr(pc, &info) || !info.dli_fname) return {"", reinterpret_cast<uintptr_t>(pc)};
  std::string path = info.dli_fname;
  if (access(path.c_str(), R_OK) != 0) path = "/proc/self/exe";  // the program itself, named as it was called
  const auto base = has_fixed_address(path) ? 0 : reinterpret_cast<uintptr_t>(info.dli_fbase);
  return {path, reinterpret_cast<uintptr_t>(pc) - 1 - base};  // -1: a return address may begin the next line
}

std::string hex(uintptr_t value) {
  char text[2 + 2 * sizeof value + 1];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string module_and_offset(const Place& place) {
  return place.module.substr(place.module.rfind('/') + 1) + "+" + hex(place.offset);
}

// ---- from there to file and line -----------------------------------------------------------------------

std::string quoted(const std::string& word) {
  std::string text = "'";
  for (char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

// The emulator's own headers say nothing about a kernel.
bool tells_something(std::string_view line) {
  return !line.starts_with("??") && line.find("/simt/include/") == std::string_view::npos;
}

// One process for all addresses of a module: starting it and reading the debug information is what costs.
void ask_addr2line(const std::string& module, const std::vector<uintptr_t>& offsets,
                   std::map<uintptr_t, std::string>& chains) {
  std::string command = "addr2line -a -i -e " + quoted(module);
  for (uintptr_t offset : offsets) command += " " + hex(offset);
  FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (!pipe) return;
  char buffer[4096];
  std::string* chain = nullptr;
  while (std::fgets(buffer, sizeof buffer, pipe)) {
    std::string line(buffer, std::strcspn(buffer, " \n"));  // what follows a space is "(discriminator 2)"
    if (line.starts_with("0x"))
      chain = &chains[std::stoull(line, nullptr, 16)];
    else if (chain && tells_something(line))
      *chain += (chain->empty() ? "" : " < ") + line.substr(line.rfind('/') + 1);
  }
  pclose(pipe);
}

std::map<const void*, std::string>& known_lines() {
  static std::map<const void*, std::string> lines;
  return lines;
}

void look_up(const std::vector<const void*>& pcs) {
  auto& known = known_lines();
  std::map<std::string, std::map<uintptr_t, std::vector<const void*>>> wanted;  // module, offset, addresses
  for (const void* pc : pcs)
    if (!known.contains(pc)) {
      const Place place = place_of(pc);
      known[pc] = module_and_offset(place);
      if (!place.module.empty()) wanted[place.module][place.offset].push_back(pc);
    }
  for (const auto& [module, addresses] : wanted) {
    std::vector<uintptr_t> offsets;
    for (const auto& entry : addresses) offsets.push_back(entry.first);
    std::map<uintptr_t, std::string> chains;
    constexpr size_t kAtOnce = 1000;  // a command line has a limit
    for (size_t begin = 0; begin < offsets.size(); begin += kAtOnce)
      ask_addr2line(module,
                    {offsets.begin() + begin, offsets.begin() + std::min(begin + kAtOnce, offsets.size())},
                    chains);
    for (const auto& [offset, chain] : chains)
      if (auto found = addresses.find(offset); !chain.empty() && found != addresses.end())
        for (const void* pc : found->second) known[pc] = chain;
  }
}

// ---- mentions: "\1", the address in hexadecimal, "\2" --------------------------------------------------

template <class Visit>
void for_each_mention(const std::string& text, Visit visit) {
  for (size_t begin = text.find('\1'); begin != std::string::npos; begin = text.find('\1', begin + 1)) {
    const size_t end = text.find('\2', begin);
    if (end == std::string::npos) return;
    visit(begin, end + 1,
          reinterpret_cast<const void*>(std::stoull(text.substr(begin + 1, end - begin - 1), nullptr, 16)));
  }
}

std::string with_lines(const std::string& text) {
  std::string result;
  size_t done = 0;
  for_each_mention(text, [&](size_t begin, size_t end, const void* pc) {
    result += text.substr(done, begin - done) + known_lines().at(pc);
    done = end;
  });
  return result + text.substr(done);
}

void add(const char* kind, const void* pc, const void* other_pc, const std::string& message,
         bool lines_must_differ) {
  const auto [entry, is_new] = finding_of.try_emplace({kind, pc, other_pc}, findings.size());
  if (is_new) findings.push_back({kind, message, pc, other_pc, 0, lines_must_differ});
  ++findings[entry->second].count;
}

}  // namespace

std::vector<std::string> source_lines(const std::vector<const void*>& return_addresses) {
  look_up(return_addresses);
  std::vector<std::string> lines;
  for (const void* pc : return_addresses) lines.push_back(known_lines().at(pc));
  return lines;
}

std::string mention(const void* pc) { return "\1" + hex(reinterpret_cast<uintptr_t>(pc)) + "\2"; }

void report(const char* kind, const void* pc, const void* other_pc, const std::string& message) {
  add(kind, pc, other_pc, message, false);
}

void report_unless_same_line(const char* kind, const void* pc, const void* other_pc,
                             const std::string& message) {
  add(kind, pc, other_pc, message, true);
}

void clear_reports() {
  findings.clear();
  finding_of.clear();
  texts.clear();
}

const std::vector<Report>& reports() {
  std::vector<const void*> pcs;
  for (const Finding& finding : findings) {
    for (const void* pc : {finding.pc, finding.other_pc})
      if (pc) pcs.push_back(pc);
    for_each_mention(finding.message, [&](size_t, size_t, const void* pc) { pcs.push_back(pc); });
  }
  look_up(pcs);

  // An unrolled loop has many addresses on one line: those are one report.
  texts.clear();
  std::map<std::pair<std::string, std::string>, size_t> text_of;
  for (const Finding& finding : findings) {
    if (finding.lines_must_differ && known_lines().at(finding.pc) == known_lines().at(finding.other_pc))
      continue;
    std::string where;
    if (finding.pc) where = "at " + known_lines().at(finding.pc);
    if (finding.other_pc) where += ", earlier access at " + known_lines().at(finding.other_pc);
    const auto [entry, is_new] = text_of.try_emplace({finding.kind, where}, texts.size());
    if (is_new) texts.push_back({finding.kind, where + ": " + with_lines(finding.message), 0});
    texts[entry->second].count += finding.count;
  }
  return texts;
}

std::string reports_text() {
  constexpr size_t kMost = 30;  // one planted bug seldom shows at more places
  std::string text;
  const auto& all = reports();
  for (size_t i = 0; i < all.size() && i < kMost; ++i)
    text += "[" + all[i].kind + "] x" + std::to_string(all[i].count) + " " + all[i].message + "\n";
  if (all.size() > kMost) text += "... and " + std::to_string(all.size() - kMost) + " more\n";
  return text;
}

}  // namespace simt
