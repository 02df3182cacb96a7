#include "eagle_cuda/verify.h"
