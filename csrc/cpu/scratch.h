#pragma once
// Grow-only scratch memory of the calling thread, for CPU kernels. `Slot` is a tag type: every use has its
// own buffer, so nested uses cannot collide. Contents are undefined on return.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace eagle::cpu {

template <class Slot>
inline void* scratch_bytes(int64_t bytes) {
  struct Buffer {
    void* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffer;
  if (bytes > buffer.size) {
    std::free(buffer.data);
    buffer.size = (bytes + bytes / 2 + 63) / 64 * 64;
    buffer.data = std::aligned_alloc(64, static_cast<size_t>(buffer.size));
    if (!buffer.data) {
      buffer.size = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.data;
}

template <class T, class Slot>
inline T* scratch(int64_t count) {
  return static_cast<T*>(scratch_bytes<Slot>(count * static_cast<int64_t>(sizeof(T))));
}

}  // namespace eagle::cpu
