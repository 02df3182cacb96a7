#include "eagle_cuda/draft.h"
