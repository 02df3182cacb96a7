#include "eagle_cuda/tree.h"
