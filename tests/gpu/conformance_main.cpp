// Runs every case and prints `name: ok, checksum`, or what differs; exit status 1 if anything does. Linked
// once over a GPU and once over the emulator: equal lines are equal bits. With the argument `planted`, the
// cases that must differ.
#include <cinttypes>
#include <cstdio>
#include <exception>
#include <string_view>

#include "conformance.h"

namespace {

// Small numbers, whole range, and floats of ordinary size in turn.
std::vector<uint32_t> inputs() {
  std::vector<uint32_t> words(conformance::kWords);
  uint64_t state = 1;
  for (size_t i = 0; i < words.size(); ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const auto random = static_cast<uint32_t>(state >> 32);
    words[i] = i / 32 % 3 == 0   ? random % 1000
               : i / 32 % 3 == 1 ? random
                                 : 0x3f000000u + random % 0x02000000u;
  }
  return words;
}

uint64_t checksum(const std::vector<uint32_t>& words) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const uint32_t word : words) hash = (hash ^ word) * 0x100000001b3ull;
  return hash;
}

bool passes(const conformance::Case& c, const std::vector<uint32_t>& in) {
  std::vector<uint32_t> out(in.size(), 0xdeadbeefu), expected(in.size(), 0xdeadbeefu);
  try {
    conformance::run(c, in, out);
  } catch (const std::exception& error) {
    std::printf("%s: %s\n", c.name, error.what());
    return false;
  }
  c.expected(in.data(), expected.data());
  for (size_t i = 0; i < out.size(); ++i)
    if (out[i] != expected[i]) {
      std::printf("%s: word %zu: expected %08" PRIx32 ", got %08" PRIx32 "\n", c.name, i, expected[i],
                  out[i]);
      return false;
    }
  std::printf("%s: ok, %016" PRIx64 "\n", c.name, checksum(out));
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace conformance;
  const std::vector<uint32_t> in = inputs();
  std::vector<std::vector<Case>> all{memory_cases(), bulk_cases(),   grid_cases(),
                                     matrix_cases(), purity_cases(), collective_cases()};
  if (argc > 1 && argv[1] == std::string_view("planted")) all = {planted_cases()};
  bool good = true;
  for (const std::vector<Case>& cases : all)
    for (const Case& c : cases) good &= passes(c, in);
  return good ? 0 : 1;
}
