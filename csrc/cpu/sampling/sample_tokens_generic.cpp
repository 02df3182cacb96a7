#include "cpu/sampling/row_impl.h"

namespace eagle::cpu {

const RowKernels kRowKernelsGeneric = kTable;

}  // namespace eagle::cpu
