/* first_unit.c: the header included plainly first, and its implementation after system headers. */
#include "moe_route.h"

#include <stdio.h>
#include <string.h>

#define MOE_ROUTE_IMPLEMENTATION
#include "moe_route.h"

#ifdef __cplusplus
extern "C"
#endif
const char *second_unit(void);

int main(void) {
    puts(second_unit());
    return strcmp(second_unit(), "OK") == 0 ? 0 : 1;
}
