#include "simt/checker.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "simt/emulator.h"
#include "simt/names.h"
#include "simt/order.h"
#include "simt/report.h"
#include "simt/shadow.h"

extern "C" __attribute__((visibility("hidden")))
const char __ehdr_start[];  // of the file this code is part of

namespace simt::checker {

namespace {

constexpr uint64_t kWord = 4;

// Cells of each block's shared memory, by slot: as many as any block may need, of which only those touched
// take memory.
std::vector<Cell*> shared_cells;

uint64_t first_word(const memory::Extent& extent) { return extent.begin / kWord; }
size_t cell_bytes(const memory::Extent& extent) {
  return ((extent.end + kWord - 1) / kWord - first_word(extent)) * sizeof(Cell);
}

Cell* map_cells(size_t bytes) {
  void* cells =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (cells == MAP_FAILED) throw std::bad_alloc();
  return static_cast<Cell*>(cells);
}

uint32_t place_of(const void* pc) { return uint32_t(static_cast<const char*>(pc) - __ehdr_start); }
const void* code_at(uint32_t place) { return __ehdr_start + place; }

// The access at hand, and what is said if something is wrong with it.
class Check {
 public:
  Check(Thread& thread, const Touch& touch) : thread_(thread), touch_(touch) {}

  // Of the word's bytes in `mask`. False after a finding: one per access is enough.
  bool word(Cell& cell, uint32_t mask, bool initialised) {
    const Epoch epoch(thread_.clock.now, thread_.slot, touch_.atomic, mask);
    const bool reads = !touch_.write || touch_.modify;
    if (reads && !initialised && (mask & ~cell.written)) return say("uninitialised read");
    return touch_.write ? write(cell, epoch) : read(cell, epoch);
  }

 private:
  bool read(Cell& cell, const Epoch& epoch) {
    if (epoch == cell.reads[0] && touch_.path == Path::kCoherent) return true;
    for (const Epoch& earlier : cell.writes) {
      if (conflict(earlier, epoch))
        return race("race read-after-write", "written", earlier, cell.write_place);
      if (touch_.path == Path::kReadOnly && overlap(earlier, epoch) && !earlier_launch(earlier))
        return say("read-only load of what the launch writes", code_at(cell.write_place));
    }
    if (touch_.starts) return true;
    if (touch_.path == Path::kReadOnly) mark_read_only(cell, epoch);
    const int oldest = ordered(cell.reads[0], thread_) ? 0 : 1;
    // Atomic reads race with less: they do not take the place of a plain one.
    if (epoch.atomic() && !cell.reads[oldest].atomic() && !ordered(cell.reads[oldest], thread_)) return true;
    cell.reads[oldest] = epoch;
    cell.read_places[oldest] = place_of(touch_.pc);
    return true;
  }

  bool write(Cell& cell, const Epoch& epoch) {
    for (const Epoch& earlier : cell.writes)
      if (conflict(earlier, epoch))
        return race("race write-after-write", "written", earlier, cell.write_place);
    for (int i = 0; i < 2; ++i)
      if (conflict(cell.reads[i], epoch))
        return race("race write-after-read", "read", cell.reads[i], cell.read_places[i]);
    if (touch_.atomic && !ordered(cell.writes[0], thread_)) cell.writes[2] = cell.writes[0];
    if (epoch.bytes() & 3) cell.writes[0] = epoch;
    if (epoch.bytes() & 12) cell.writes[1] = epoch;
    cell.write_place = place_of(touch_.pc);
    cell.written |= epoch.bytes();
    const Epoch read_only = last_read_only(cell);
    if (overlap(read_only, epoch) && !earlier_launch(read_only))
      return say("read-only load of what the launch writes", code_at(cell.read_only_at));
    return true;
  }

  static Epoch last_read_only(const Cell& cell) { return {cell.read_only_time, 0, false, cell.read_only}; }
  void mark_read_only(Cell& cell, const Epoch& epoch) const {
    if (earlier_launch(last_read_only(cell))) cell.read_only = 0;
    cell.read_only |= uint8_t(epoch.bytes());
    cell.read_only_time = epoch.time();
    cell.read_only_at = place_of(touch_.pc);
  }

  static bool overlap(const Epoch& a, const Epoch& b) { return a.bytes() & b.bytes(); }
  bool conflict(const Epoch& earlier, const Epoch& now) const {
    return overlap(earlier, now) && !(earlier.atomic() && now.atomic()) && !ordered(earlier, thread_);
  }

  std::string what() const {
    return std::to_string(touch_.size) + " bytes at " + place(thread_, touch_.address) + " by " +
           name(thread_);
  }
  bool say(const char* kind, const void* other = nullptr) const {
    Unobserved guard;
    report(kind, touch_.pc, other, what());
    return false;
  }
  bool race(const char* kind, const char* done, const Epoch& earlier, uint32_t other) const {
    Unobserved guard;
    report(kind, touch_.pc, code_at(other),
           what() + ", " + done + " before by " + accessor(earlier) + ", not ordered");
    return false;
  }

  Thread& thread_;
  const Touch& touch_;
};

void touch_cells(Thread& thread, const Touch& touch, Cell* cells, uint64_t offset, bool initialised) {
  Check check(thread, touch);
  const uint64_t end = offset + touch.size;
  for (uint64_t word = offset / kWord; word * kWord < end; ++word) {
    const uint64_t begin = word * kWord;
    const uint32_t skipped = offset > begin ? uint32_t(offset - begin) : 0;
    const uint32_t touched = uint32_t(std::min(end - begin, kWord));
    const uint32_t mask = (1u << touched) - (1u << skipped);
    if (!check.word(cells[word], mask, initialised)) return;
  }
}

// The word's last writer must stand behind a fence.proxy.async for a copy that `thread` starts.
bool shown(const Cell& cell, const Thread& thread) {
  for (const Epoch& write : cell.writes)
    if (write.bytes() && !shown_to_proxy(write, thread)) return false;
  return true;
}

}  // namespace

void begin_op(std::vector<memory::Extent>& extents) {
  if (!checked()) return;
  restart_time();
  for (memory::Extent& extent : extents)
    if (extent.writable) extent.cells = map_cells(cell_bytes(extent));
}

void end_op(std::vector<memory::Extent>& extents) {
  for (memory::Extent& extent : extents)
    if (extent.cells) munmap(extent.cells, cell_bytes(extent));
}

void begin_wave() {
  if (!checked()) return;
  begin_wave_clocks();
  const size_t words = (running.shared_bytes + kWord - 1) / kWord;
  while (shared_cells.size() < running.resident)
    shared_cells.push_back(map_cells(kSharedBytes / kWord * sizeof(Cell)));
  for (uint32_t slot = 0; slot < running.resident; ++slot)
    std::memset(static_cast<void*>(shared_cells[slot]), 0, words * sizeof(Cell));
}

void write_by_host(const memory::Extent& extent, uint64_t address, uint64_t bytes) {
  if (!extent.cells) return;
  for (uint64_t byte = address; byte < address + bytes; ++byte)
    extent.cells[byte / kWord - first_word(extent)].written |= uint8_t(1u << byte % kWord);
}

void touch_global(Thread& thread, const Touch& touch, const memory::Extent& extent) {
  touch_cells(thread, touch, extent.cells, touch.address - first_word(extent) * kWord, extent.initialised);
}

void touch_shared(Thread& thread, const Touch& touch) {
  const uint64_t offset = touch.address - reinterpret_cast<uint64_t>(thread.block->shared);
  touch_cells(thread, touch, shared_cells[thread.home().slot], offset, false);
}

void touch_by_proxy(Thread& thread, const Touch& touch) {
  if (!checked()) return;
  const Cell* cells;
  uint64_t offset;
  if (in_shared(thread, touch.address)) {
    cells = shared_cells[thread.home().slot];
    offset = touch.address - reinterpret_cast<uint64_t>(thread.block->shared);
  } else {
    const memory::Extent* extent = memory::find(touch.address);
    if (!extent || !extent->cells) return;
    cells = extent->cells;
    offset = touch.address - first_word(*extent) * kWord;
  }
  for (uint64_t word = offset / kWord; word * kWord < offset + touch.size; ++word) {
    if (shown(cells[word], thread)) continue;
    Unobserved guard;
    report("missing fence.proxy.async", touch.pc, code_at(cells[word].write_place),
           "a bulk copy of " + std::to_string(touch.size) + " bytes " + (touch.write ? "to " : "from ") +
               place(thread, touch.address) + " started by " + name(thread) +
               " need not see what was written there");
    return;
  }
}

void land(const Block& block, uint64_t address, uint32_t size, const Epoch& landed, const void* pc) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(block.shared);
  for (uint64_t word = offset / kWord; word * kWord < offset + size; ++word) {
    Cell& cell = shared_cells[block.slot][word];
    cell = {};
    cell.writes[0] = cell.writes[1] = landed;
    cell.write_place = place_of(pc);
    cell.written = 15;
  }
}

void end_read(uint64_t address, uint32_t size, const Epoch& landed, const void* pc) {
  const memory::Extent* extent = memory::find(address);
  if (!extent || !extent->cells) return;
  const uint64_t offset = address - first_word(*extent) * kWord;
  for (uint64_t word = offset / kWord; word * kWord < offset + size; ++word) {
    Cell& cell = extent->cells[word];
    const int older = cell.reads[0].time() <= cell.reads[1].time() ? 0 : 1;
    cell.reads[older] = landed;
    cell.read_places[older] = place_of(pc);
  }
}

}  // namespace simt::checker
