#include "eagle_cuda/sampling.h"
