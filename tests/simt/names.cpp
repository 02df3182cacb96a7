#include "simt/names.h"

#include <cstdio>

namespace simt {

namespace {

uint3 index_of(uint32_t number, const dim3& extent) {
  return {number % extent.x, number / extent.x % extent.y, number / extent.x / extent.y};
}

std::string text(const uint3& i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

}  // namespace

std::string thread_name(uint32_t block, uint32_t linear) {
  return "thread " + text(index_of(linear, block_dimensions)) + " of block " +
         text(index_of(block, grid_dimensions));
}

std::string name(const Thread& thread) { return thread_name(thread.home().number, thread.linear); }

std::string block_name(const Block& block) { return "block " + text(block.index); }

std::string warp_name(const Warp& warp) {
  return "warp " + std::to_string(warp.index) + " of " + block_name(*warp.block);
}

std::string hex(uint32_t lanes) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, "0x%08x", lanes);
  return buffer;
}

}  // namespace simt
