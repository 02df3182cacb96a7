#include "cpu/sampling/row_impl.h"

namespace eagle::cpu {

const RowKernels kRowKernelsAvx2 = kTable;

}  // namespace eagle::cpu
