#pragma once
// The workspace of an emulated call.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "simt/emulator.h"

namespace eagle::simulated {

// The caller's, where one is given, whose size and alignment the op checks; else one for the call. What the
// call writes into it must lie within the bytes that it said it needs.
class Workspace {
 public:
  Workspace(void* given, int64_t given_bytes, int64_t needed)
      : given_(given_bytes > 0 ? given : nullptr),
        bytes_(given_ ? given_bytes : needed),
        needed_(needed),
        own_(given_ ? 0 : static_cast<size_t>(needed / kLine + 1)) {}
  void* data() { return given_ ? given_ : own_.data(); }
  int64_t bytes() const { return bytes_; }
  simt::Region region() {
    return simt::bytes("workspace", data(), std::min(bytes_, needed_), simt::Access::kOut);
  }

 private:
  static constexpr int64_t kLine = 128;
  struct alignas(kLine) Line {
    std::byte bytes[kLine];
  };

  void* given_;
  int64_t bytes_, needed_;
  std::vector<Line> own_;
};

}  // namespace eagle::simulated
