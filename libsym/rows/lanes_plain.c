/* The passes for any processor. */
#define LANES_NAME(name) name##_plain
#include "lanes.h"
