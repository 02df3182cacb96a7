#pragma once
// Fibers: every thread of a launch is one, all on the OS thread that launched. x86-64 only.
#include <cstddef>

namespace simt {

// Saves the registers that a callee must keep on the running stack and its pointer in *from; continues at
// `to`.
extern "C" __attribute__((visibility("hidden"))) void simt_switch_context(void** from, void* to);

// Stacks of one mapping, kept from launch to launch. No guard pages (a mapping each would exceed what the
// kernel allows for tens of thousands of fibers): a canary at the low end of each tells of an overflow.
class Stacks {
 public:
  static constexpr size_t kBytes = 64 * 1024;

  void reserve(size_t count);
  char* low(size_t index) const { return base_ + index * kBytes; }
  // A context that enters `entry` when first switched to.
  void* prepare(size_t index, void (*entry)()) const;
  bool intact(size_t index) const;

 private:
  char* base_ = nullptr;
  size_t count_ = 0;
};

}  // namespace simt
