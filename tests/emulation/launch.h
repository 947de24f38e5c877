/*
  launch.h: what the machine (machine.c) offers to the emulated driver (modules.c): running one launch, and the record of
  errors.
*/
#ifndef EMULATION_LAUNCH_H
#define EMULATION_LAUNCH_H

#include <stddef.h>
#include <stdint.h>

typedef struct emulation_launch {
    const char *name;
    void (*kernel)(const void *arguments);
    const void *arguments;
    unsigned grid_x, grid_y, threads, dynamic_bytes;
    int dependent; /* launched with programmatic stream serialization */
    /* With a dependent launch, and unless NULL: shows the memory as it was before the kernels that may still run, and
       shows it as it is, for the time until a block waits. Hiding returns 0 when the block wrote in between. */
    int (*show_old_memory)(void);
    int (*hide_old_memory)(void);
    /* Whether `size` bytes at `address` are device memory. */
    int (*is_device_memory)(const void *address, size_t size);
} emulation_launch;

typedef struct emulation_result {
    int failed;
    int early;             /* a block let the next kernel start before it had waited itself */
    unsigned shared_bytes; /* the most shared memory that a block used */
} emulation_result;

struct emulation_machine;
struct emulation_machine *emulation_machine_of_process(void);

/* Runs all blocks, one after another. */
emulation_result emulation_run(const emulation_launch *launch, uint64_t seed);

/* Counts an error, keeps its text and prints it to stderr. */
void emulation_report(const char *format, ...) __attribute__((format(printf, 1, 2)));
unsigned emulation_error_count(void);
const char *emulation_error_text(void); /* "" when there was none */

#endif
