/* moe_route.c: the implementation as a file of its own, for the targets that compile it: a static or a shared library. */
#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"
