/*
  memory.c: device memory of the emulated driver: the table of allocations, copies and fills, and what a dependent launch sees
  before it waits.
*/
#include "driver.h"

#include <stdlib.h>
#include <string.h>

#define MAX_SNAPSHOT_BYTES ((size_t)64 << 20) /* more device memory than this isn't shown as it was */
#define POISON 0xa5
#define FIRST_ALIGNMENT 256u

/* ---- device memory ---- */
static size_t allocation_after(const void *address) { /* index of the first allocation that starts after it */
    size_t low = 0, high = driver.num_allocations;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if ((uintptr_t)driver.allocations[middle].address <= (uintptr_t)address) low = middle + 1;
        else high = middle;
    }
    return low;
}

int is_device_memory(const void *address, size_t size) {
    const size_t i = allocation_after(address);
    size_t offset;
    if (!i) return 0;
    offset = (uintptr_t)address - (uintptr_t)driver.allocations[i - 1].address;
    return offset <= driver.allocations[i - 1].size && size <= driver.allocations[i - 1].size - offset;
}

static void forget_snapshot(allocation *a) {
    free(a->old);
    free(a->before);
    a->old = a->before = NULL;
}

/* Everything submitted so far has finished: nothing can overlap what follows. */
void chain_end(void) {
    for (size_t i = 0; i < driver.num_allocations; i++) forget_snapshot(&driver.allocations[i]);
    driver.chain_active = 0;
}

/* ---- what a dependent launch sees before it waits ----
   A kernel under dependent launch may start while the one before it still runs, or even one further back where that one
   let it start before it had waited itself. So until a block waits, it is shown memory as it was before those kernels. */
void snapshot(void) {
    for (size_t i = 0; i < driver.num_allocations; i++) {
        allocation *a = &driver.allocations[i];
        a->before = driver.device_bytes <= MAX_SNAPSHOT_BYTES ? (char *)malloc(a->size) : NULL;
        if (a->before) memcpy(a->before, a->address, a->size);
    }
}

void settle_snapshot(int keep_old) {
    for (size_t i = 0; i < driver.num_allocations; i++) {
        allocation *a = &driver.allocations[i];
        if (keep_old && a->old) {
            free(a->before);
        } else {
            free(a->old);
            a->old = a->before;
        }
        a->before = NULL;
    }
}

void forget_changes(void) {
    for (size_t i = 0; i < driver.num_changes; i++) free(driver.changes[i].now);
    driver.num_changes = driver.changed_bytes = 0;
}

static int add_change(char *address, const char *old, size_t size) {
    change *c;
    if (driver.num_changes == driver.changes_capacity) {
        const size_t capacity = driver.changes_capacity ? 2 * driver.changes_capacity : 64;
        change *grown = (change *)realloc(driver.changes, capacity * sizeof *grown);
        if (!grown) return 0;
        driver.changes = grown;
        driver.changes_capacity = capacity;
    }
    c = &driver.changes[driver.num_changes];
    c->now = (char *)malloc(size);
    if (!c->now) return 0;
    c->address = address;
    c->old = old;
    c->size = size;
    driver.num_changes++;
    driver.changed_bytes += size;
    return 1;
}

void find_changes(void) {
    const size_t step = 256;
    forget_changes();
    for (size_t i = 0; i < driver.num_allocations; i++) {
        const allocation *a = &driver.allocations[i];
        size_t start = 0, end = 0; /* of the span of differing steps so far */
        if (!a->old) continue;
        for (size_t at = 0; at < a->size; at += step) {
            const size_t size = a->size - at < step ? a->size - at : step;
            if (!memcmp(a->address + at, a->old + at, size)) continue;
            if (end != at) {
                if (end > start && !add_change(a->address + start, a->old + start, end - start)) return;
                start = at;
            }
            end = at + size;
        }
        if (end > start && !add_change(a->address + start, a->old + start, end - start)) return;
    }
    driver.show_budget = (size_t)32 << 20;
}

int show_old_memory(void) {
    if (!driver.num_changes || driver.show_budget < driver.changed_bytes) return 0;
    driver.show_budget -= driver.changed_bytes;
    for (size_t i = 0; i < driver.num_changes; i++) {
        const change *c = &driver.changes[i];
        memcpy(c->now, c->address, c->size);
        memcpy(c->address, c->old, c->size);
    }
    return 1;
}

int hide_old_memory(void) {
    int untouched = 1;
    for (size_t i = 0; i < driver.num_changes; i++) {
        const change *c = &driver.changes[i];
        if (memcmp(c->address, c->old, c->size)) untouched = 0;
        memcpy(c->address, c->now, c->size);
    }
    return untouched;
}

/* ---- allocating, copies, fills ---- */
EXPORT int cuMemAlloc_v2(device_address *address, size_t size) {
    void *memory = NULL;
    size_t i;
    int result;
    lock();
    result = not_ready();
    if (!result && (!address || !size)) result = INVALID_VALUE;
    if (!result) result = capture_forbids();
    if (result) return unlock(result);
    if (driver.num_allocations == driver.allocations_capacity) {
        const size_t capacity = driver.allocations_capacity ? 2 * driver.allocations_capacity : 64;
        allocation *grown = (allocation *)realloc(driver.allocations, capacity * sizeof *grown);
        if (!grown) return unlock(OUT_OF_MEMORY);
        driver.allocations = grown;
        driver.allocations_capacity = capacity;
    }
    if (posix_memalign(&memory, FIRST_ALIGNMENT, size)) return unlock(OUT_OF_MEMORY);
    memset(memory, POISON, size);
    i = allocation_after(memory);
    memmove(&driver.allocations[i + 1], &driver.allocations[i], (driver.num_allocations - i) * sizeof *driver.allocations);
    memset(&driver.allocations[i], 0, sizeof driver.allocations[i]);
    driver.allocations[i].address = (char *)memory;
    driver.allocations[i].size = size;
    driver.num_allocations++;
    driver.device_bytes += size;
    *address = (device_address)(uintptr_t)memory;
    return unlock(CUDA_SUCCESS);
}

EXPORT int cuMemFree_v2(device_address address) {
    size_t i;
    int result;
    lock();
    result = not_ready();
    if (!result) result = capture_forbids();
    if (result || !address) return unlock(result);
    i = allocation_after((void *)(uintptr_t)address);
    if (!i || (uintptr_t)driver.allocations[i - 1].address != address) return unlock(INVALID_VALUE);
    i--;
    chain_end();
    driver.device_bytes -= driver.allocations[i].size;
    free(driver.allocations[i].address);
    driver.num_allocations--;
    memmove(&driver.allocations[i], &driver.allocations[i + 1], (driver.num_allocations - i) * sizeof *driver.allocations);
    return unlock(CUDA_SUCCESS);
}

static operation copy_operation(const void *to, const void *from, size_t size) {
    operation o;
    memset(&o, 0, sizeof o);
    o.kind = COPY;
    memcpy(&o.to, &to, sizeof to);
    o.from = from;
    o.size = size;
    return o;
}

/* Ranges of device memory must be that; host memory is AddressSanitizer's concern. */
static int transfer(device_address to, device_address from, int to_device, int from_device, size_t size, const void *s, int async) {
    void *to_memory = (void *)(uintptr_t)to;
    const void *from_memory = (const void *)(uintptr_t)from;
    const operation o = copy_operation(to_memory, from_memory, size);
    int result;
    lock();
    result = not_ready();
    if (!result && ((to_device && !is_device_memory(to_memory, size)) || (from_device && !is_device_memory(from_memory, size))))
        result = INVALID_VALUE;
    if (!result && !async) result = capture_forbids();
    if (!result) result = submit(&o, s);
    if (!result && !async) result = synchronise();
    return unlock(result);
}

EXPORT int cuMemcpyHtoD_v2(device_address to, const void *from, size_t size) {
    return transfer(to, (uintptr_t)from, 1, 0, size, NULL, 0);
}
EXPORT int cuMemcpyDtoH_v2(void *to, device_address from, size_t size) {
    return transfer((uintptr_t)to, from, 0, 1, size, NULL, 0);
}
EXPORT int cuMemcpyDtoD_v2(device_address to, device_address from, size_t size) {
    return transfer(to, from, 1, 1, size, NULL, 0);
}
EXPORT int cuMemcpyHtoDAsync_v2(device_address to, const void *from, size_t size, const void *s) {
    return transfer(to, (uintptr_t)from, 1, 0, size, s, 1);
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, device_address from, size_t size, const void *s) {
    return transfer((uintptr_t)to, from, 0, 1, size, s, 1);
}
EXPORT int cuMemcpyDtoDAsync_v2(device_address to, device_address from, size_t size, const void *s) {
    return transfer(to, from, 1, 1, size, s, 1);
}

static int fill(device_address to, unsigned value, unsigned value_size, size_t count, const void *s, int async) {
    operation o;
    int result;
    memset(&o, 0, sizeof o);
    o.kind = FILL;
    o.to = (void *)(uintptr_t)to;
    o.size = count * value_size;
    o.value = value;
    o.value_size = value_size;
    lock();
    result = not_ready();
    if (!result && (to % value_size || !is_device_memory(o.to, o.size))) result = INVALID_VALUE;
    if (!result && !async) result = capture_forbids();
    if (!result) result = submit(&o, s);
    return unlock(result);
}

EXPORT int cuMemsetD8_v2(device_address to, unsigned char value, size_t count) { return fill(to, value, 1, count, NULL, 0); }
EXPORT int cuMemsetD32_v2(device_address to, unsigned value, size_t count) { return fill(to, value, 4, count, NULL, 0); }
EXPORT int cuMemsetD8Async(device_address to, unsigned char value, size_t count, const void *s) {
    return fill(to, value, 1, count, s, 1);
}
EXPORT int cuMemsetD32Async(device_address to, unsigned value, size_t count, const void *s) {
    return fill(to, value, 4, count, s, 1);
}
