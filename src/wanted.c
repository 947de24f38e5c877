/*
  wanted.c: the variants that a layer needs, made side by side: NVRTC compiles in several threads as fast as in one, and a layer
  has several variants. The threads exist only while a layer is created that has something to compile: reading from the cache
  isn't worth one. Which variants these are is decided in layer.c; how one is made, in variant.c.
*/
#include "internal.h"

#define MOER_TEAM_MAX 7 /* helpers; each compilation takes some 40 MB */

struct moer_team {
    moe_route_context *context; /* whose mutex guards the rest */
    moer_wanted *wanted;
    uint32_t next;              /* the first that nobody has taken yet */
    moe_route_status status;    /* of the last failure; nothing is taken after one */
    uint32_t num_helpers;       /* only the thread that creates the layer looks at these */
    moer_thread helpers[MOER_TEAM_MAX];
    int grown;
};

static moe_route_status moer_wanted_add(moe_route_context *context, moer_wanted *wanted, const moer_family *family, const char *defines,
                                        const moer_variant **variant) {
    if (wanted->count == MOER_MAX_LAYER_VARIANTS)
        return moer_fail(context, MOE_ROUTE_ERROR_UNSUPPORTED, "layer: it needs more than %u kernel variants", (unsigned)MOER_MAX_LAYER_VARIANTS);
    wanted->items[wanted->count].family = family;
    wanted->items[wanted->count].variant = variant;
    moer_text_set(wanted->items[wanted->count].defines, sizeof wanted->items[0].defines, defines);
    wanted->count++;
    return MOE_ROUTE_OK;
}

static void moer_team_work(moer_team *team, moer_team *grows) {
    moe_route_context *context = team->context;
    moe_route_status status = MOE_ROUTE_OK;
    for (;;) {
        uint32_t i;
        moer_mutex_lock(&context->mutex);
        if (status != MOE_ROUTE_OK) team->status = status;
        i = team->status == MOE_ROUTE_OK && team->next < team->wanted->count ? team->next++ : team->wanted->count;
        moer_mutex_unlock(&context->mutex);
        if (i == team->wanted->count) return;
        status = moer_variant_get(context, team->wanted->items[i].family, team->wanted->items[i].defines, grows, team->wanted->items[i].variant);
    }
}

static void moer_team_help(void *user) { moer_team_work((moer_team *)user, NULL); }

static void moer_team_grow(moer_team *team) {
    uint32_t left, processors = moer_processors();
    if (team->grown) return;
    team->grown = 1;
    moer_mutex_lock(&team->context->mutex);
    left = team->wanted->count - team->next;
    moer_mutex_unlock(&team->context->mutex);
    while (team->num_helpers < left && team->num_helpers + 1 < processors && team->num_helpers < MOER_TEAM_MAX) {
        if (!moer_thread_start(&team->helpers[team->num_helpers], moer_team_help, team)) return; /* then with fewer */
        team->num_helpers++;
    }
}

static moe_route_status moer_wanted_make(moe_route_context *context, moer_wanted *wanted) {
    moer_team team;
    uint32_t i;
    memset(&team, 0, sizeof team);
    team.context = context;
    team.wanted = wanted;
    moer_team_work(&team, &team);
    for (i = 0; i < team.num_helpers; i++) moer_thread_join(&team.helpers[i]);
    return team.status;
}
