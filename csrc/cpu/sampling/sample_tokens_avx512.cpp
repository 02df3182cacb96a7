#include "cpu/sampling/row_impl.h"

namespace eagle::cpu {

const RowKernels kRowKernelsAvx512 = kTable;

}  // namespace eagle::cpu
