/*
  placement.h: which physical expert serves an expert. Which of those are local is the maps' business.

  Constants: where an expert map [E, MAP_COLUMNS] is given, MAP_COLUMNS and PLACED_EXPERTS: identity and skip experts, from
  there on, are nowhere.
*/
#ifndef MAP_COLUMNS
#define MAP_COLUMNS 0
#endif

/* The physical expert that serves expert `id` of a token: the token takes its turn among the replicas. 0xffffffff when
   there is none. */
DEVICE u32 physical_expert(const int *expert_map, u32 id, u32 token) {
#if MAP_COLUMNS
    if (id >= PLACED_EXPERTS) return 0xffffffffu;
    const int *replicas = expert_map + id * MAP_COLUMNS;
    u32 count = 0;
#pragma unroll 1
    while (count < MAP_COLUMNS && replicas[count] >= 0) count++;
    return count ? (u32)replicas[token % count] : 0xffffffffu;
#else
    return id;
#endif
}
