#pragma once
// A self-test case: launches that must end in silence with the right numbers, or with a planted bug reported.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "simt/emulator.h"

namespace simt::selftest {

enum class Builds { kBoth, kChecked };  // kChecked: the fast build would see nothing, crash or hang

struct Case {
  const char* name;
  const char* kind;  // of the report that must come; "race": any race; "x or y": either; "": none may
  bool (*run)();     // whether the numbers are right; throws what was found
  Builds builds = Builds::kBoth;
  const char* skip = nullptr;  // why it cannot run here
};

std::vector<Case> block_cases();
std::vector<Case> grid_cases();
std::vector<Case> flag_cases();
std::vector<Case> memory_cases();
std::vector<Case> convergence_cases();
std::vector<Case> warp_number_cases();
std::vector<Case> number_cases();
std::vector<Case> float_type_cases();
std::vector<Case> traffic_cases();
std::vector<Case> async_copy_cases();
std::vector<Case> bulk_copy_cases();
std::vector<Case> far_stage_cases();
std::vector<Case> matrix_cases();
std::vector<Case> product_cases();
std::vector<Case> persistent_cases();

// One op under the emulator.
inline void emulate(std::vector<Region> regions, const std::function<void()>& launches) {
  Memory memory("selftest", std::move(regions));
  launches();
  memory.finish();
}

// Memory of a kernel: begins a 128-byte line, so that traffic is the same in every run.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count, T value = {})
      : count_(count),
        data_(static_cast<T*>(std::aligned_alloc(128, (count * sizeof(T) + 127) / 128 * 128)), std::free) {
    for (size_t i = 0; i < count; ++i) data_.get()[i] = value;
  }
  T* data() { return data_.get(); }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return data_.get()[i]; }

  Region in(const char* name) { return simt::in(name, data(), int64_t(count_)); }
  Region out(const char* name) { return simt::out(name, data(), int64_t(count_)); }
  Region inout(const char* name) { return simt::inout(name, data(), int64_t(count_)); }

 private:
  size_t count_;
  std::unique_ptr<T, void (*)(void*)> data_;
};

// 0, 1, 2, ...
inline Buffer<int32_t> counting(size_t count) {
  Buffer<int32_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = int32_t(i);
  return values;
}

}  // namespace simt::selftest
