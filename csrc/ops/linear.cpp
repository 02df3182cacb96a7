#include "eagle_cuda/linear.h"
