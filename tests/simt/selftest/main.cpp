// The emulator's self-tests, one line of JSON per case:
//
//   selftest_fast|selftest_checked all|<case> [seed] [preempt]
//   selftest_fast|selftest_checked --list
//
// `right`: whether the numbers are; null where the launch was given up. What a case must do stands in its own
// line; tests/test_simt.py compares.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "simt/report.h"
#include "simt/selftest/case.h"

extern "C" const char* simt_counters();

namespace simt::selftest {
namespace {

std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (auto cases : {block_cases, grid_cases, flag_cases, memory_cases, convergence_cases, warp_number_cases,
                     number_cases, float_type_cases, traffic_cases, async_copy_cases, bulk_copy_cases,
                     far_stage_cases, matrix_cases, product_cases, persistent_cases})
    for (const Case& c : cases()) all.push_back(c);
  return all;
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    if (c == '\n')
      json += "\\n";
    else
      json += c;
  }
  return json + "\"";
}

void run(const Case& c, const Options& chosen) {
  std::string right = "null", error;
  options() = chosen;
  clear_reports();
  counters() = {};
  if (!c.skip) {
    try {
      right = c.run() ? "true" : "false";
    } catch (const std::runtime_error& caught) {
      error = caught.what();
    }
  }
  std::string found;
  for (const Report& r : reports())
    found += (found.empty() ? "" : ", ") + ("{\"kind\": " + quoted(r.kind)) +
             ", \"message\": " + quoted(r.message) + ", \"count\": " + std::to_string(r.count) + "}";
  std::printf(
      "{\"case\": %s, \"kind\": %s, \"skip\": %s, \"right\": %s, \"error\": %s, \"reports\": [%s], "
      "\"counters\": %s}\n",
      quoted(c.name).c_str(), quoted(c.kind).c_str(), quoted(c.skip ? c.skip : "").c_str(), right.c_str(),
      quoted(error).c_str(), found.c_str(), simt_counters());
  std::fflush(stdout);  // what a crash leaves behind names the next case
}

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  if (wanted.empty()) {
    std::fprintf(stderr, "usage: %s all|<case> [seed] [preempt], or %s --list\n", argv[0], argv[0]);
    return 2;
  }
  Options chosen;
  if (argc > 2) chosen.seed = std::strtoull(argv[2], nullptr, 10);
  if (argc > 3) chosen.preempt = std::atoi(argv[3]);
  bool any = false;
  for (const Case& c : all_cases()) {
    if (c.builds == Builds::kChecked && !checked()) continue;
    if (wanted != "all" && wanted != "--list" && wanted != c.name) continue;
    any = true;
    if (wanted == "--list")
      std::printf("%s\n", c.name);
    else
      run(c, chosen);
  }
  if (!any) std::fprintf(stderr, "no case %s in this build\n", wanted.c_str());
  return any ? 0 : 2;
}

}  // namespace
}  // namespace simt::selftest

int main(int argc, char** argv) { return simt::selftest::main(argc, argv); }
