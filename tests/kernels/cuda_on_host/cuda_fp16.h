// float16 on the host.
#pragma once

#include <cstdint>

struct __half {
  uint16_t bits;
};
