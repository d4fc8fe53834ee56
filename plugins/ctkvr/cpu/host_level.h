// Which instructions beyond the library's levels this processor runs. Defined in host_level.cpp.
#pragma once

#include "../../shared/kernel.h"

// Best HostLevel here, AMX included.
KVSEEK_HIDDEN int kvseek_ctkvr_best_level();

// out: int32_t[2], the best level, and the one that AUTOMATIC stands for.
KVSEEK_PUBLIC void kvseek_ctkvr_host_level(void* out);
