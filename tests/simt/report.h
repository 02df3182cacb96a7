#pragma once
// Findings of the emulator: collected by address while a launch runs, turned into file and line when read.
#include <string>
#include <vector>

#include "simt/emulator.h"

namespace simt {

// One finding. `pc` is the return address of the call that noticed it, `other_pc` that of the earlier access
// it conflicts with; either may be null. Findings of one kind at the same two places are one report with a
// count; the message of the first one stays.
void report(const char* kind, const void* pc, const void* other_pc, const std::string& message);

// As report(), but forgotten if both addresses turn out to be one source line: the compiler may have made two
// copies of one call.
void report_unless_same_line(const char* kind, const void* pc, const void* other_pc,
                             const std::string& message);

// Stands for the source line of a return address within a message; looked up when the message is read.
std::string mention(const void* pc);

void clear_reports();
std::string reports_text();  // every report, a paragraph each

// File and line with the chain of inlined calls, innermost first: "scan.cu:41 < scan.cu:77"; without
// addr2line or debug information, module and offset.
std::vector<std::string> source_lines(const std::vector<const void*>& return_addresses);

}  // namespace simt
