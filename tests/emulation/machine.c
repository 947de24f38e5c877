/*
  machine.c: the machine that kernels run on: the threads of a block as fibers of one host thread, warp collectives,
  barriers, and the checks on shared memory. Memory, streams and launches belong in driver.c.

  A fiber runs until it meets a collective or a barrier, or until it is preempted at some access to memory. The next one is
  drawn at random from those that can run. As every wait is known to the machine, a thread that waits for something that
  can't come is found at once.
*/
#include "launch.h"
#include "machine.h"
#include "numbers.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_THREADS 1024u
#define MAX_WARPS (MAX_THREADS / 32)
#define STACK_SIZE ((size_t)128 * 1024)
#define MAX_SHARED_BYTES 49152u
#define SEVERAL 32 /* in place of a lane or a warp */

/* Present when the process runs under AddressSanitizer. */
void __sanitizer_start_switch_fiber(void **fake_stack, const void *bottom, size_t size) __attribute__((weak));
void __sanitizer_finish_switch_fiber(void *fake_stack, const void **bottom, size_t *size) __attribute__((weak));
void __asan_unpoison_memory_region(const volatile void *address, size_t size) __attribute__((weak));

/* ---- context switch ---- */
#if defined(__x86_64__)
typedef void *context;
/* Pushes the registers that a function preserves, keeps the stack pointer in *save, and continues at `load`. */
void emulation_switch(void **save, void *load);
__asm__(".text\n"
        ".type emulation_switch, @function\n"
        "emulation_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size emulation_switch, . - emulation_switch\n");

static void context_make(context *made, char *stack, void (*entry)(void)) {
    void **top = (void **)(void *)(stack + STACK_SIZE);
    *--top = NULL; /* what the entry would return to; and an odd slot, as after a call */
    memcpy(--top, &entry, sizeof entry);
    for (int i = 0; i < 6; i++) *--top = NULL;
    *made = top;
}

static void context_switch(context *save, context *load) { emulation_switch(save, *load); }
#else
#include <ucontext.h>
typedef ucontext_t context;

static void context_make(context *made, char *stack, void (*entry)(void)) {
    getcontext(made);
    made->uc_stack.ss_sp = stack;
    made->uc_stack.ss_size = STACK_SIZE;
    made->uc_link = NULL;
    makecontext(made, entry, 0);
}

static void context_switch(context *save, context *load) { swapcontext(save, load); }
#endif

/* ---- state ---- */
enum { RUNNABLE, AT_COLLECTIVE, AT_BARRIER, AT_WAIT, ENDED };

typedef struct thread {
    context context;
    char *stack;
    void *fake_stack; /* AddressSanitizer's, while another fiber runs */
    int state;
    const char *file; /* where it waits */
    int line;
    int operation;
    unsigned value, argument, result;
    const emulation_matrix *matrix;
} thread;

typedef struct warp {
    unsigned runnable;   /* a bit for each lane */
    unsigned collective; /* lanes that wait at a collective */
    unsigned barrier;    /* lanes that wait at a block barrier */
    unsigned ended;
    unsigned epoch;      /* warp barriers passed */
} warp;

static emulation_machine machine;

static struct {
    const emulation_launch *launch;
    thread threads[MAX_THREADS];
    warp warps[MAX_WARPS];
    thread *current;
    context outside;              /* the host's own stack */
    const void *outside_bottom;
    size_t outside_size;
    void *outside_fake_stack;
    int from_outside;
    unsigned runnable_warps, num_warps, num_barrier, num_ended, num_wait;
    unsigned last_warp, stickiness, preemption_interval, until_preemption;
    int failed;
    int waited;                   /* a thread of this block has waited for the kernels before */
    int old_memory;               /* the block sees memory as it was before them */
    int early;
    unsigned block_serial, block_epoch, first_epoch, shared_bytes, most_shared_bytes;
    uint64_t random;
} m;

static struct {
    unsigned count;
    char text[1024];
} errors;

void emulation_report(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(errors.text, sizeof errors.text, format, arguments);
    va_end(arguments);
    errors.count++;
    fprintf(stderr, "emulation: %s\n", errors.text);
}

unsigned emulation_error_count(void) { return errors.count; }
const char *emulation_error_text(void) { return errors.text; }

static uint64_t draw(void) { /* xorshift64* */
    m.random ^= m.random >> 12;
    m.random ^= m.random << 25;
    m.random ^= m.random >> 27;
    return (m.random * 0x2545f4914f6cdd1dull) >> 32;
}

/* One of the set bits; `bits` isn't 0. */
static unsigned draw_bit(unsigned bits) {
    const unsigned turn = (unsigned)draw() & 31;
    const unsigned turned = turn ? bits >> turn | bits << (32 - turn) : bits;
    return ((unsigned)__builtin_ctz(turned) + turn) & 31;
}

static unsigned index_of(const thread *t) { return (unsigned)(t - m.threads); }

/* ---- scheduling ---- */
static void make_runnable(thread *t) {
    const unsigned i = index_of(t);
    t->state = RUNNABLE;
    m.warps[i / 32].runnable |= 1u << i % 32;
    m.runnable_warps |= 1u << i / 32;
}

static void make_waiting(thread *t, int state, const char *file, int line) {
    const unsigned i = index_of(t);
    warp *w = &m.warps[i / 32];
    t->state = state;
    t->file = file;
    t->line = line;
    w->runnable &= ~(1u << i % 32);
    if (!w->runnable) m.runnable_warps &= ~(1u << i / 32);
}

static void hide_old_memory(void);

/* The thread that runs next; NULL when the block is done or has failed. */
static thread *pick(void) {
    unsigned w;
    if (m.failed) return NULL;
    if (!m.runnable_warps && m.num_wait) { /* nothing more can happen before the kernels in front are done */
        hide_old_memory();
        for (unsigned i = 0; i < machine.block_threads; i++)
            if (m.threads[i].state == AT_WAIT) make_runnable(&m.threads[i]);
        m.num_wait = 0;
    }
    if (!m.runnable_warps) return NULL;
    w = m.last_warp;
    if (!(m.runnable_warps >> w & 1) || draw() % m.stickiness == 0) w = m.last_warp = draw_bit(m.runnable_warps);
    return &m.threads[w * 32 + draw_bit(m.warps[w].runnable)];
}

static void start_switch(void **fake_stack, const void *bottom, size_t size) {
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(fake_stack, bottom, size);
}

static void finish_switch(void *fake_stack, const void **bottom, size_t *size) {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, bottom, size);
}

/* Lets another thread run; returns when this one is picked again, which never happens to one that has ended. */
static void leave(int for_good) {
    thread *from = m.current, *next = pick();
    if (next == from) return;
    m.current = next;
    start_switch(for_good ? NULL : &from->fake_stack, next ? next->stack : m.outside_bottom, next ? STACK_SIZE : m.outside_size);
    if (next) {
        machine.thread_index = index_of(next);
        context_switch(&from->context, &next->context);
    } else {
        context_switch(&from->context, &m.outside);
    }
    finish_switch(from->fake_stack, NULL, NULL);
}

static void preempt(void) {
    if (--m.until_preemption) return;
    m.until_preemption = 1 + (unsigned)draw() % m.preemption_interval;
    leave(0);
}

/* ---- errors of kernels ---- */
__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    const unsigned i = index_of(m.current);
    char text[768];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    emulation_report("kernel %s block (%u,%u) warp %u lane %u: %s", m.launch->name, machine.block_index_x,
                     machine.block_index_y, i / 32, i % 32, text);
    m.failed = 1;
    leave(1);
    abort();
}

static const char *operation_name(int operation) {
    static const char *const names[] = {"warp_max",     "warp_min",         "warp_ballot",     "warp_match",
                                        "warp_shuffle", "warp_shuffle_xor", "warp_shuffle_up", "warp_barrier",
                                        "matrix_multiply_f16", "matrix_multiply_bf16"};
    return names[operation];
}

static const char *where(const thread *t) { return t->state == AT_BARRIER ? "block_barrier" : operation_name(t->operation); }

static thread *first_lane(unsigned warp_index, unsigned lanes) { return &m.threads[warp_index * 32 + (unsigned)__builtin_ctz(lanes)]; }

static int same_place(const thread *t, const char *file, int line) {
    return t->line == line && (t->file == file || !strcmp(t->file, file));
}

/* ---- warp collectives ---- */
static void matrix_multiply_warp(const thread *lanes, int operation) {
    double a[16][16], b[16][8];
    float (*convert)(unsigned short) = operation == EMULATION_MATRIX_F16 ? emulation_f16_to_f32 : emulation_bf16_to_f32;
    for (unsigned lane = 0; lane < 32; lane++) {
        const unsigned g = lane / 4, t = lane % 4;
        const emulation_matrix *part = lanes[lane].matrix;
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = g + i % 2 * 8, k = 2 * t + i / 2 * 8;
            a[row][k] = convert(emulation_low(part->a[i]));
            a[row][k + 1] = convert(emulation_high(part->a[i]));
        }
        for (unsigned i = 0; i < 2; i++) {
            const unsigned k = 2 * t + i * 8;
            b[k][g] = convert(emulation_low(part->b[i]));
            b[k + 1][g] = convert(emulation_high(part->b[i]));
        }
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            double sum = lanes[lane].matrix->c[i];
            for (unsigned k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
            lanes[lane].matrix->c[i] = (float)sum;
        }
    }
}

/* The results of a collective that all lanes have reached. */
static void complete_collective(thread *lanes, warp *w) {
    const int operation = lanes[0].operation;
    unsigned all = 0, most = 0, least = 0xffffffffu;
    for (unsigned i = 0; i < 32; i++) {
        if (lanes[i].value) all |= 1u << i;
        if (lanes[i].value > most) most = lanes[i].value;
        if (lanes[i].value < least) least = lanes[i].value;
    }
    for (unsigned i = 0; i < 32; i++) {
        thread *t = &lanes[i];
        unsigned source = i;
        switch (operation) {
        case EMULATION_MAX: t->result = most; continue;
        case EMULATION_MIN: t->result = least; continue;
        case EMULATION_BALLOT: t->result = all; continue;
        case EMULATION_MATCH:
            t->result = 0;
            for (unsigned j = 0; j < 32; j++)
                if (lanes[j].value == t->value) t->result |= 1u << j;
            continue;
        case EMULATION_SHUFFLE: source = t->argument & 31; break;
        case EMULATION_SHUFFLE_XOR: source = (i ^ t->argument) & 31; break;
        case EMULATION_SHUFFLE_UP: source = t->argument <= i ? i - t->argument : i; break;
        default: continue;
        }
        t->result = lanes[source].value;
    }
    if (operation == EMULATION_WARP_BARRIER) w->epoch++;
    if (operation == EMULATION_MATRIX_F16 || operation == EMULATION_MATRIX_BF16) matrix_multiply_warp(lanes, operation);
    w->collective = 0;
    for (unsigned i = 0; i < 32; i++) make_runnable(&lanes[i]);
}

static void arrive(int operation, const char *file, int line) {
    thread *t = m.current;
    const unsigned index = index_of(t), others_ended = m.warps[index / 32].ended;
    warp *w = &m.warps[index / 32];
    if (others_ended)
        fail("%s at %s:%d can't complete: lane %u has ended", operation_name(operation), file, line,
             (unsigned)__builtin_ctz(others_ended));
    if (w->barrier) {
        const thread *other = first_lane(index / 32, w->barrier);
        fail("%s at %s:%d can't complete: lane %u waits in block_barrier at %s:%d", operation_name(operation), file, line,
             index_of(other) % 32, other->file, other->line);
    }
    if (w->collective) {
        const thread *other = first_lane(index / 32, w->collective);
        if (other->operation != operation || !same_place(other, file, line))
            fail("%s at %s:%d while lane %u waits in %s at %s:%d", operation_name(operation), file, line, index_of(other) % 32,
                 operation_name(other->operation), other->file, other->line);
    }
    t->operation = operation;
    make_waiting(t, AT_COLLECTIVE, file, line);
    w->collective |= 1u << index % 32;
    if (w->collective == 0xffffffffu) complete_collective(&m.threads[index / 32 * 32], w);
    leave(0);
}

static unsigned collective(int operation, unsigned value, unsigned argument, const char *file, int line) {
    thread *t = m.current;
    t->value = value;
    t->argument = argument;
    arrive(operation, file, line);
    return t->result;
}

static void matrix_multiply(int operation, const emulation_matrix *matrix, const char *file, int line) {
    m.current->matrix = matrix;
    arrive(operation, file, line);
}

/* ---- barriers and ends ---- */
static void block_barrier(const char *file, int line) {
    thread *t = m.current;
    const unsigned index = index_of(t);
    warp *w = &m.warps[index / 32];
    if (m.num_ended) {
        unsigned i = 0;
        while (m.threads[i].state != ENDED) i++;
        fail("block_barrier at %s:%d can't complete: warp %u lane %u has ended", file, line, i / 32, i % 32);
    }
    if (w->collective) {
        const thread *other = first_lane(index / 32, w->collective);
        fail("block_barrier at %s:%d while lane %u waits in %s at %s:%d", file, line, index_of(other) % 32, where(other),
             other->file, other->line);
    }
    if (m.num_barrier) {
        unsigned i = 0;
        while (m.threads[i].state != AT_BARRIER) i++;
        if (!same_place(&m.threads[i], file, line))
            fail("block_barrier at %s:%d while warp %u lane %u waits in block_barrier at %s:%d", file, line, i / 32, i % 32,
                 m.threads[i].file, m.threads[i].line);
    }
    make_waiting(t, AT_BARRIER, file, line);
    w->barrier |= 1u << index % 32;
    if (++m.num_barrier == machine.block_threads) {
        m.num_barrier = 0;
        m.block_epoch++;
        for (unsigned i = 0; i < m.num_warps; i++) m.warps[i].barrier = 0;
        for (unsigned i = 0; i < machine.block_threads; i++) make_runnable(&m.threads[i]);
    }
    leave(0);
}

static void end_thread(void) {
    thread *t = m.current;
    const unsigned index = index_of(t);
    warp *w = &m.warps[index / 32];
    if (w->collective) {
        const thread *other = first_lane(index / 32, w->collective);
        fail("the thread ends while lane %u waits in %s at %s:%d", index_of(other) % 32, where(other), other->file, other->line);
    }
    if (m.num_barrier) {
        unsigned i = 0;
        while (m.threads[i].state != AT_BARRIER) i++;
        fail("the thread ends while warp %u lane %u waits in block_barrier at %s:%d", i / 32, i % 32, m.threads[i].file,
             m.threads[i].line);
    }
    make_waiting(t, ENDED, "", 0);
    w->ended |= 1u << index % 32;
    m.num_ended++;
    leave(1);
}

static void thread_entry(void) {
    const void *bottom;
    size_t size;
    finish_switch(NULL, &bottom, &size);
    if (m.from_outside) {
        m.outside_bottom = bottom;
        m.outside_size = size;
        m.from_outside = 0;
    }
    m.launch->kernel(m.launch->arguments);
    end_thread();
    abort();
}

/* ---- the order between kernels ---- */
static void hide_old_memory(void) {
    if (!m.old_memory) return;
    m.old_memory = 0;
    if (!m.launch->hide_old_memory())
        fail("the block wrote to memory of the kernels before it without waiting for them");
}

static void wait_for_previous_kernels(const char *file, int line) {
    if (!m.launch->dependent) return;
    m.waited = 1;
    if (!m.old_memory) return;
    make_waiting(m.current, AT_WAIT, file, line);
    m.num_wait++;
    leave(0);
}

static void let_next_kernel_start(void) {
    if (!m.launch->dependent || !m.waited) m.early = 1;
}

/* ---- memory ---- */
static void enter_array(emulation_array *array) {
    array->block = m.block_serial;
    m.shared_bytes += (array->count * array->element_size + 15) / 16 * 16;
    if (m.shared_bytes > m.most_shared_bytes) m.most_shared_bytes = m.shared_bytes;
    if (m.shared_bytes > MAX_SHARED_BYTES)
        fail("the block's shared arrays take %u bytes, the last of them %s; %u are allowed", m.shared_bytes, array->name,
             MAX_SHARED_BYTES);
}

/* Whether no barrier orders one of these accesses before what the current thread does now. */
static int unordered(const emulation_access *a, unsigned warp_index, unsigned lane) {
    if (a->block_epoch != m.block_epoch) return 0;
    if (a->warp != warp_index) return 1;
    return a->warp_epoch == m.warps[warp_index].epoch && a->lane != lane;
}

static void note(emulation_access *a, unsigned warp_index, unsigned lane, const char *file, int line) {
    if (a->block_epoch != m.block_epoch) {
        a->block_epoch = m.block_epoch;
        a->warp = (unsigned char)warp_index;
        a->lane = (unsigned char)lane;
    } else if (a->warp != warp_index) {
        a->warp = SEVERAL;
    } else if (a->warp_epoch != m.warps[warp_index].epoch) {
        a->lane = (unsigned char)lane;
    } else if (a->lane != lane) {
        a->lane = SEVERAL;
    }
    a->warp_epoch = m.warps[warp_index].epoch;
    a->file = file;
    a->line = line;
}

static const char *access_name(int access) {
    return access == EMULATION_READ ? "read" : access == EMULATION_WRITE ? "write" : "atomic addition";
}

static void check_order(const emulation_array *array, long long index, int access, const char *file, int line,
                        const emulation_access *other, int other_access) {
    const unsigned thread_index = index_of(m.current);
    char who[64];
    if (!unordered(other, thread_index / 32, thread_index % 32)) return;
    if (other->warp == SEVERAL) snprintf(who, sizeof who, "several warps");
    else if (other->lane == SEVERAL) snprintf(who, sizeof who, "several lanes of warp %u", other->warp);
    else snprintf(who, sizeof who, "warp %u lane %u", other->warp, other->lane);
    fail("race: %s of %s[%lld] at %s:%d and %s by %s at %s:%d, with no %s barrier between", access_name(access), array->name,
         index, file, line, access_name(other_access), who, other->file, other->line,
         other->warp == thread_index / 32 ? "warp" : "block");
}

static void check_element(emulation_array *array, long long index, int access, const char *file, int line) {
    emulation_element *element = &array->elements[index];
    const unsigned warp_index = index_of(m.current) / 32, lane = index_of(m.current) % 32;
    if (access != EMULATION_WRITE && element->write.block_epoch < m.first_epoch)
        fail("%s of %s[%lld] at %s:%d, which this block never wrote", access_name(access), array->name, index, file, line);
    check_order(array, index, access, file, line, &element->write, EMULATION_WRITE);
    if (access != EMULATION_ATOMIC) check_order(array, index, access, file, line, &element->atomic, EMULATION_ATOMIC);
    if (access != EMULATION_READ) check_order(array, index, access, file, line, &element->read, EMULATION_READ);
    note(access == EMULATION_READ ? &element->read : access == EMULATION_WRITE ? &element->write : &element->atomic, warp_index,
         lane, file, line);
}

static void check_bounds(emulation_array *array, long long index, unsigned count, const char *file, int line) {
    if (index < 0 || index + count > array->count)
        fail("%s[%lld] at %s:%d is outside the array of %u", array->name, index, file, line, array->count);
    if (array->block != m.block_serial) enter_array(array);
}

static void shared_access(emulation_array *array, long long index, int access, const char *file, int line) {
    preempt();
    check_bounds(array, index, 1, file, line);
    check_element(array, index, access, file, line);
}

static void shared_load_4(emulation_array *array, long long index, const char *file, int line) {
    preempt();
    if (index % 4) fail("shared_load_4 of %s[%lld] at %s:%d is misaligned: the index is no multiple of 4", array->name, index, file, line);
    check_bounds(array, index, 4, file, line);
    for (unsigned i = 0; i < 4; i++) check_element(array, index + i, EMULATION_READ, file, line);
}

static void global_access(const void *address, unsigned size, const char *file, int line) {
    preempt();
    if ((uintptr_t)address % size)
        fail("misaligned access to %u bytes at %p at %s:%d", size, address, file, line);
    if (!m.launch->is_device_memory(address, size))
        fail("access to %u bytes at %p at %s:%d is outside every allocation of device memory", size, address, file, line);
}

/* ---- blocks and launches ---- */
static int make_stacks(unsigned count) {
    const size_t guard = (size_t)sysconf(_SC_PAGESIZE);
    for (unsigned i = 0; i < count; i++) {
        if (m.threads[i].stack) continue;
        char *memory = (char *)mmap(NULL, STACK_SIZE + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE)) return 0;
        m.threads[i].stack = memory + guard;
    }
    return 1;
}

static void run_block(unsigned x, unsigned y) {
    const unsigned threads = m.launch->threads;
    static const unsigned stickiness[] = {1, 4, 32, 1000000}, intervals[] = {2, 8, 64, 1000000};
    machine.block_index_x = x;
    machine.block_index_y = y;
    m.block_serial++;
    m.first_epoch = ++m.block_epoch;
    m.shared_bytes = 0;
    m.failed = m.waited = 0;
    m.num_barrier = m.num_ended = m.num_wait = 0;
    m.stickiness = stickiness[draw() % 4];
    m.preemption_interval = intervals[draw() % 4];
    m.until_preemption = 1 + (unsigned)draw() % m.preemption_interval;
    m.last_warp = (unsigned)draw() % m.num_warps;
    for (unsigned i = 0; i < m.num_warps; i++) {
        m.warps[i].runnable = m.warps[i].collective = m.warps[i].barrier = m.warps[i].ended = 0;
    }
    for (unsigned i = 0; i < threads; i++) {
        context_make(&m.threads[i].context, m.threads[i].stack, thread_entry);
        m.threads[i].fake_stack = NULL;
        make_runnable(&m.threads[i]);
    }
    m.old_memory = m.launch->dependent && m.launch->show_old_memory && m.launch->show_old_memory();

    m.from_outside = 1;
    m.current = pick();
    machine.thread_index = index_of(m.current);
    start_switch(&m.outside_fake_stack, m.current->stack, STACK_SIZE);
    context_switch(&m.outside, &m.current->context);
    finish_switch(m.outside_fake_stack, NULL, NULL);

    if (m.old_memory) {
        m.old_memory = 0;
        m.launch->hide_old_memory();
    }
    if (!m.failed && m.num_ended != threads) {
        emulation_report("kernel %s block (%u,%u): deadlock", m.launch->name, x, y);
        m.failed = 1;
    }
    if (!m.failed && m.launch->dependent && !m.waited) {
        emulation_report("kernel %s block (%u,%u): the block ended without wait_for_previous_kernels, under dependent launch",
                         m.launch->name, x, y);
        m.failed = 1;
    }
    if (m.failed && __asan_unpoison_memory_region) /* frames that never returned */
        for (unsigned i = 0; i < threads; i++) __asan_unpoison_memory_region(m.threads[i].stack, STACK_SIZE);
}

struct emulation_machine *emulation_machine_of_process(void) {
    machine.collective = collective;
    machine.matrix_multiply = matrix_multiply;
    machine.block_barrier = block_barrier;
    machine.wait_for_previous_kernels = wait_for_previous_kernels;
    machine.let_next_kernel_start = let_next_kernel_start;
    machine.shared_access = shared_access;
    machine.shared_load_4 = shared_load_4;
    machine.global_access = global_access;
    return &machine;
}

emulation_result emulation_run(const emulation_launch *launch, uint64_t seed) {
    const unsigned blocks = launch->grid_x * launch->grid_y;
    unsigned *order = (unsigned *)malloc(sizeof *order * blocks);
    emulation_result result;
    memset(&result, 0, sizeof result);
    if (!order || !make_stacks(launch->threads)) {
        emulation_report("kernel %s: no memory to run it", launch->name);
        free(order);
        result.failed = 1;
        return result;
    }
    m.launch = launch;
    m.random = seed * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull;
    if (!m.random) m.random = 1;
    m.num_warps = launch->threads / 32;
    m.runnable_warps = 0;
    m.early = 0;
    m.most_shared_bytes = 0;
    machine.block_threads = launch->threads;
    machine.grid_blocks_x = launch->grid_x;
    machine.grid_blocks_y = launch->grid_y;
    for (unsigned i = 0; i < blocks; i++) { /* a random order */
        const unsigned j = (unsigned)(draw() % (i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    for (unsigned i = 0; i < blocks && !result.failed; i++) {
        run_block(order[i] % launch->grid_x, order[i] / launch->grid_x);
        result.failed = m.failed;
        m.runnable_warps = 0;
    }
    free(order);
    m.launch = NULL;
    result.early = m.early;
    result.shared_bytes = m.most_shared_bytes;
    return result;
}
