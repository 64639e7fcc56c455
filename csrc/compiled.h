// What Python asks of the operations in graphs.
#pragma once

#include <cstdint>

namespace overflowstat {

// How many module calls these have kept in this process: the time that they tell.
int64_t calls_kept();

}  // namespace overflowstat
