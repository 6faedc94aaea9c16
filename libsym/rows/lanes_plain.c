/* The passes for any processor. */
#define WIDTH 4
#define FN(name) name##_plain
#include "lanes.h"
