/* second_unit.c: a second translation unit of a program: the declarations alone, used twice. */
#include "moe_route.h"
#include "moe_route.h"

#ifdef __cplusplus
extern "C"
#endif
const char *second_unit(void);

const char *second_unit(void) { return moe_route_status_name(MOE_ROUTE_OK); }
