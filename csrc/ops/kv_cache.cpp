#include "eagle_cuda/kv_cache.h"
