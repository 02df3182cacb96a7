#include "eagle_cuda/attention.h"
