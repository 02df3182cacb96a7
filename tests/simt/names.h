#pragma once
// How threads and numbers are written in reports.
#include <string>

#include "simt/machine.h"

namespace simt {

std::string name(const Thread& thread);                    // "thread (3,0,0) of block (1,0,0)"
std::string thread_name(uint32_t block, uint32_t linear);  // by number, in the launch that runs
std::string block_name(const Block& block);                // "block (1,0,0)"
std::string warp_name(const Warp& warp);                   // "warp 2 of block (1,0,0)"
std::string hex(uint32_t lanes);                           // "0x0000ffff"

}  // namespace simt
