// Cases under the emulator.
#include "conformance.h"
#include "simt/emulator.h"

namespace conformance {

void run(const Case& c, const std::vector<uint32_t>& in, std::vector<uint32_t>& out) {
  const auto count = static_cast<int64_t>(in.size());
  simt::Memory memory("conformance",
                      {simt::in("in", in.data(), count), simt::inout("out", out.data(), count)});
  c.launch(in.data(), out.data(), nullptr);
  memory.finish();
}

}  // namespace conformance
