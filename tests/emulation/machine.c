/*
  machine.c: the machine that kernels run on: the threads of a block as fibers of one host thread, warp collectives,
  barriers, asynchronous copies, and the checks on shared memory. Memory, streams and launches belong to the driver: memory.c,
  streams.c, modules.c.

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
#define SEVERAL 32 /* in place of a lane */
#define NUM_NAMED_BARRIERS 16u
#define MAX_SHARED_BARRIERS 64

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
enum { RUNNABLE, AT_COLLECTIVE, AT_BARRIER, AT_NAMED_BARRIER, AT_SHARED_BARRIER, AT_WAIT, ENDED };

typedef struct copy { /* an asynchronous one that hasn't been waited for */
    emulation_array *array;
    char *to;
    long long index;
    unsigned group, size;
    char bytes[16];
    const char *file;
    int line;
} copy;

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
    copy *copies;
    unsigned num_copies, max_copies, num_groups; /* groups committed */
} thread;

typedef struct warp {
    unsigned runnable;   /* a bit for each lane */
    unsigned collective; /* lanes that wait at a collective */
    unsigned barrier;    /* lanes that wait at a block barrier or a named one */
    unsigned ended;
    unsigned known[MAX_WARPS]; /* accesses of each warp up to this clock are ordered before what this one does now. The
                                  warp's own clock is the one after its own entry */
} warp;

typedef struct named_barrier {
    unsigned threads; /* 0: nobody has come */
    unsigned warps;   /* a bit for each warp of which all lanes wait */
    unsigned arrived; /* likewise for those that came and went on */
    unsigned known[MAX_WARPS]; /* what those did, or knew of, when they came */
    const char *file; /* where the first thread came */
    int line;
} named_barrier;

typedef struct bulk_copy { /* one that hasn't landed */
    struct bulk_copy *next;
    emulation_array *array;
    char *to;
    long long index;
    unsigned size;
    char bytes[];
} bulk_copy;

typedef struct shared_barrier {
    emulation_array *array; /* where it is */
    long long index;
    unsigned arrivals, left; /* of a phase, and those that this one still waits for */
    unsigned phase;          /* how many have ended */
    long long bytes;         /* that were announced for this phase and haven't been copied */
    bulk_copy *copies, *landed; /* of this phase; of those that have ended, until somebody has waited */
    unsigned joint[MAX_WARPS], known[MAX_WARPS]; /* what those who arrived did, or knew of: in this phase, and up to its begin */
    const char *file;        /* of the latest arrival or copy */
    int line;
} shared_barrier;

static emulation_machine machine;

static struct {
    const emulation_launch *launch;
    thread threads[MAX_THREADS];
    warp warps[MAX_WARPS];
    named_barrier named[NUM_NAMED_BARRIERS];
    shared_barrier shared[MAX_SHARED_BARRIERS];
    unsigned num_shared;
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
    unsigned block_serial, shared_bytes, most_shared_bytes;
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
    static const char *const names[] = {"warp_max",         "warp_min",        "warp_ballot",  "warp_match",          "warp_shuffle",
                                        "warp_shuffle_xor", "warp_shuffle_up", "warp_barrier", "matrix_multiply_f16", "matrix_multiply_bf16"};
    return names[operation];
}

static const char *where(const thread *t) {
    switch (t->state) {
    case AT_BARRIER: return "block_barrier";
    case AT_NAMED_BARRIER: return "block_barrier_named";
    case AT_SHARED_BARRIER: return "shared_barrier_wait";
    case AT_WAIT: return "wait_for_previous_kernels";
    default: return operation_name(t->operation);
    }
}

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
    if (operation == EMULATION_WARP_BARRIER) w->known[w - m.warps]++;
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
        fail("%s at %s:%d can't complete: lane %u waits in %s at %s:%d", operation_name(operation), file, line,
             index_of(other) % 32, where(other), other->file, other->line);
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
/* Adds to `joint` what warp i has done so far or knows of. */
static void tell(unsigned i, unsigned (*joint)[MAX_WARPS]) {
    m.warps[i].known[i]++;
    for (unsigned j = 0; j < m.num_warps; j++)
        if (m.warps[i].known[j] > (*joint)[j]) (*joint)[j] = m.warps[i].known[j];
}

/* What any of these warps has done or knows of, and what `joint` holds, comes before whatever any of them does from now on. */
static void order_warps(unsigned warps, unsigned (*joint)[MAX_WARPS]) {
    for (unsigned i = 0; i < m.num_warps; i++)
        if (warps >> i & 1) tell(i, joint);
    for (unsigned i = 0; i < m.num_warps; i++)
        if (warps >> i & 1) memcpy(m.warps[i].known, *joint, sizeof *joint);
}

__attribute__((noreturn)) static void fail_beside_lane(const char *what, const char *file, int line, unsigned lanes) {
    const thread *other = first_lane(index_of(m.current) / 32, lanes);
    fail("%s at %s:%d while lane %u waits in %s at %s:%d", what, file, line, index_of(other) % 32, where(other), other->file,
         other->line);
}

/* Lets all lanes of these warps go on from a barrier. */
static void release_barrier(unsigned warps) {
    for (unsigned i = 0; i < machine.block_threads; i++)
        if (warps >> i / 32 & 1) make_runnable(&m.threads[i]);
    for (unsigned i = 0; i < m.num_warps; i++)
        if (warps >> i & 1) m.warps[i].barrier = 0;
}

/* All lanes of a warp come to barrier `id`; to wait there, or to go on. */
static void come_to_named_barrier(const char *name, int waits, unsigned id, unsigned threads, const char *file, int line) {
    thread *t = m.current;
    const unsigned index = index_of(t);
    warp *w = &m.warps[index / 32];
    named_barrier *b = &m.named[id % NUM_NAMED_BARRIERS];
    if (id < 1 || id >= NUM_NAMED_BARRIERS || !threads || threads % 32 || threads > machine.block_threads)
        fail("%s(%u, %u) at %s:%d: an id is 1 to 15, and the threads are whole warps of the block's %u threads", name, id, threads,
             file, line, machine.block_threads);
    if (w->ended) fail("%s at %s:%d can't complete: lane %u has ended", name, file, line, (unsigned)__builtin_ctz(w->ended));
    if (w->collective) fail_beside_lane(name, file, line, w->collective);
    if (w->barrier) {
        const thread *other = first_lane(index / 32, w->barrier);
        if (other->state != AT_NAMED_BARRIER || !same_place(other, file, line)) fail_beside_lane(name, file, line, w->barrier);
        if (other->value != id || other->argument != threads)
            fail("%s(%u, %u) at %s:%d while lane %u waits in (%u, %u)", name, id, threads, file, line, index_of(other) % 32,
                 other->value, other->argument);
    }
    if (!b->threads) {
        b->threads = threads;
        b->file = file;
        b->line = line;
    }
    if (b->threads != threads)
        fail("%s(%u, %u) at %s:%d while others wait there for %u threads at %s:%d", name, id, threads, file, line, b->threads,
             b->file, b->line);
    if (b->arrived >> index / 32 & 1)
        fail("%s(%u, %u) at %s:%d: the warp has come there before, and others haven't", name, id, threads, file, line);
    t->value = id;
    t->argument = threads;
    make_waiting(t, AT_NAMED_BARRIER, file, line);
    w->barrier |= 1u << index % 32;
    if (w->barrier == 0xffffffffu && waits) b->warps |= 1u << index / 32;
    if (w->barrier == 0xffffffffu && !waits) {
        tell(index / 32, &b->known);
        b->arrived |= 1u << index / 32;
        release_barrier(1u << index / 32);
    }
    if ((unsigned)__builtin_popcount(b->warps | b->arrived) * 32 == threads) {
        order_warps(b->warps, &b->known);
        release_barrier(b->warps);
        memset(b, 0, sizeof *b);
    }
    leave(0);
}

static void block_barrier_named(unsigned id, unsigned threads, const char *file, int line) {
    come_to_named_barrier("block_barrier_named", 1, id, threads, file, line);
}

static void block_barrier_arrive(unsigned id, unsigned threads, const char *file, int line) {
    come_to_named_barrier("block_barrier_arrive", 0, id, threads, file, line);
}

static void block_barrier(const char *file, int line) {
    thread *t = m.current;
    const unsigned index = index_of(t);
    warp *w = &m.warps[index / 32];
    if (m.num_ended) {
        unsigned i = 0;
        while (m.threads[i].state != ENDED) i++;
        fail("block_barrier at %s:%d can't complete: warp %u lane %u has ended", file, line, i / 32, i % 32);
    }
    if (w->collective) fail_beside_lane("block_barrier", file, line, w->collective);
    if (w->barrier && first_lane(index / 32, w->barrier)->state == AT_NAMED_BARRIER)
        fail_beside_lane("block_barrier", file, line, w->barrier);
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
        unsigned joint[MAX_WARPS] = {0};
        m.num_barrier = 0;
        order_warps(0xffffffffu, &joint);
        release_barrier(0xffffffffu);
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
    if (w->barrier && first_lane(index / 32, w->barrier)->state == AT_NAMED_BARRIER) {
        const thread *other = first_lane(index / 32, w->barrier);
        fail("the thread ends while lane %u waits in %s at %s:%d", index_of(other) % 32, where(other), other->file, other->line);
    }
    if (t->num_copies)
        fail("the thread ends without copy_async_wait for its copy at %s:%d", t->copies[0].file, t->copies[0].line);
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
    if (array->dynamic) {
        if (array->count * array->element_size != m.launch->dynamic_bytes)
            fail("the kernel is made for %u bytes of dynamic shared memory, and launched with %u", array->count * array->element_size, m.launch->dynamic_bytes);
        return;
    }
    m.shared_bytes += (array->count * array->element_size + 15) / 16 * 16;
    if (m.shared_bytes > m.most_shared_bytes) m.most_shared_bytes = m.shared_bytes;
    if (m.shared_bytes > MAX_SHARED_BYTES)
        fail("the block's shared arrays take %u bytes, the last of them %s; %u are allowed", m.shared_bytes, array->name,
             MAX_SHARED_BYTES);
}

/* The warps whose access no barrier orders before what the current thread does now. */
static unsigned unordered(const emulation_access *a, unsigned warp_index, unsigned lane) {
    unsigned found = 0;
    if (a->block != m.block_serial) return 0;
    for (unsigned rest = a->warps; rest; rest &= rest - 1) {
        const unsigned other = (unsigned)__builtin_ctz(rest);
        if (a->clock[other] <= m.warps[warp_index].known[other]) continue;
        if (other != warp_index || a->lane[other] != lane) found |= 1u << other;
    }
    return found;
}

static void note(emulation_access *a, unsigned warp_index, unsigned lane, const char *file, int line) {
    const unsigned clock = m.warps[warp_index].known[warp_index] + 1;
    if (a->block != m.block_serial) {
        a->block = m.block_serial;
        a->warps = 0;
    }
    if (!(a->warps >> warp_index & 1) || a->clock[warp_index] != clock) a->lane[warp_index] = (unsigned char)lane;
    else if (a->lane[warp_index] != lane) a->lane[warp_index] = SEVERAL;
    a->warps |= 1u << warp_index;
    a->clock[warp_index] = clock;
    a->latest = warp_index;
    a->file = file;
    a->line = line;
}

static const char *access_name(int access) {
    return access == EMULATION_READ ? "read" : access == EMULATION_WRITE ? "write" : "atomic addition";
}

static void check_order(const emulation_array *array, long long index, int access, const char *file, int line,
                        const emulation_access *other, int other_access) {
    const unsigned thread_index = index_of(m.current), warps = unordered(other, thread_index / 32, thread_index % 32);
    char who[64];
    unsigned first;
    if (!warps) return;
    first = (unsigned)__builtin_ctz(warps);
    if (warps & (warps - 1)) snprintf(who, sizeof who, "several warps");
    else if (other->lane[first] == SEVERAL) snprintf(who, sizeof who, "several lanes of warp %u", first);
    else snprintf(who, sizeof who, "warp %u lane %u", first, other->lane[first]);
    fail("race: %s of %s[%lld] at %s:%d and %s by %s %s %s:%d, with no %s barrier between", access_name(access), array->name,
         index, file, line, access_name(other_access), who, warps >> other->latest & 1 ? "at" : "before that at", other->file,
         other->line, warps == 1u << thread_index / 32 ? "warp" : "block");
}

static void check_element(emulation_array *array, long long index, int access, const char *file, int line) {
    emulation_element *element = &array->elements[index];
    const unsigned warp_index = index_of(m.current) / 32, lane = index_of(m.current) % 32;
    if (element->in_flight == m.block_serial) {
        const emulation_access *by = &element->write;
        fail("%s of %s[%lld] at %s:%d while warp %u lane %u hasn't waited for its asynchronous copy at %s:%d", access_name(access),
             array->name, index, file, line, by->latest, by->lane[by->latest], by->file, by->line);
    }
    if (access != EMULATION_WRITE && element->write.block != m.block_serial)
        fail("%s of %s[%lld] at %s:%d, which this block never wrote", access_name(access), array->name, index, file, line);
    check_order(array, index, access, file, line, &element->write, EMULATION_WRITE);
    if (access != EMULATION_ATOMIC) check_order(array, index, access, file, line, &element->atomic, EMULATION_ATOMIC);
    if (access != EMULATION_READ) check_order(array, index, access, file, line, &element->read, EMULATION_READ);
    if (access == EMULATION_WRITE) /* all that was here is ordered before */
        element->write.warps = element->atomic.warps = element->read.warps = 0;
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

static void shared_vector(emulation_array *array, long long index, unsigned count, int access, const char *file, int line) {
    preempt();
    if (index % count)
        fail("access to %u elements at %s[%lld] at %s:%d is misaligned: the index is no multiple of %u", count, array->name, index, file, line, count);
    check_bounds(array, index, count, file, line);
    for (unsigned i = 0; i < count; i++) check_element(array, index + i, access, file, line);
}

static void global_access(const void *address, unsigned size, const char *file, int line) {
    preempt();
    if ((uintptr_t)address % size)
        fail("misaligned access to %u bytes at %p at %s:%d", size, address, file, line);
    if (!m.launch->is_device_memory(address, size))
        fail("access to %u bytes at %p at %s:%d is outside every allocation of device memory", size, address, file, line);
}

/* The destination is in flight until the wait, which is when the bytes appear there. */
static void copy_async(emulation_array *array, void *data, long long index, const void *from, unsigned bytes, unsigned size, const char *file, int line) {
    const unsigned count = bytes / array->element_size;
    thread *t = m.current;
    copy *c;
    if (size > bytes) fail("copy_async_%u at %s:%d of %u bytes", bytes, file, line, size);
    if ((size_t)from % bytes) fail("copy_async_%u from %p at %s:%d is misaligned: the address is no multiple of %u", bytes, from, file, line, bytes);
    for (unsigned i = 0; i < size; i++) global_access((const char *)from + i, 1, file, line);
    if (index % count)
        fail("copy_async_%u to %s[%lld] at %s:%d is misaligned: the index is no multiple of %u",
             bytes, array->name, index, file, line, count);
    check_bounds(array, index, count, file, line);
    if (t->num_copies == t->max_copies) {
        const unsigned max_copies = t->max_copies ? 2 * t->max_copies : 16;
        copy *grown = (copy *)realloc(t->copies, sizeof *grown * max_copies);
        if (!grown) fail("no memory for another asynchronous copy at %s:%d", file, line);
        t->copies = grown;
        t->max_copies = max_copies;
    }
    c = &t->copies[t->num_copies++];
    c->array = array;
    c->to = (char *)data + index * array->element_size;
    c->index = index;
    c->group = t->num_groups;
    c->file = file;
    c->line = line;
    c->size = bytes;
    memset(c->bytes, 0, sizeof c->bytes);
    memcpy(c->bytes, from, size);
    for (unsigned i = 0; i < count; i++) {
        check_element(array, index + i, EMULATION_WRITE, file, line);
        array->elements[index + i].in_flight = m.block_serial;
    }
}

static void copy_async_commit(void) { m.current->num_groups++; }

static void copy_async_wait(int groups) {
    thread *t = m.current;
    unsigned left = 0;
    preempt();
    for (unsigned i = 0; i < t->num_copies; i++) {
        const copy *c = &t->copies[i];
        if (c->group + (unsigned)groups >= t->num_groups) {
            t->copies[left++] = *c;
            continue;
        }
        memcpy(c->to, c->bytes, c->size);
        for (unsigned j = 0; j < c->size / c->array->element_size; j++) {
            c->array->elements[c->index + j].in_flight = 0;
            check_element(c->array, c->index + j, EMULATION_WRITE, c->file, c->line);
        }
    }
    t->num_copies = left;
}

/* ---- blocks and launches ---- */
/* ---- barriers in shared memory, and copies that arrive at them ---- */
static shared_barrier *find_shared_barrier(const char *name, emulation_array *array, long long index, const char *file, int line) {
    preempt();
    check_bounds(array, index, 2, file, line);
    for (unsigned i = 0; i < m.num_shared; i++)
        if (m.shared[i].array == array && m.shared[i].index == index) {
            check_element(array, index, EMULATION_ATOMIC, file, line);
            return &m.shared[i];
        }
    fail("%s at %s:%d: no barrier was started at %s[%lld]", name, file, line, array->name, index);
}

static void shared_barrier_start(emulation_array *array, long long index, unsigned arrivals, const char *file, int line) {
    shared_barrier *b = &m.shared[m.num_shared];
    shared_vector(array, index, 2, EMULATION_WRITE, file, line);
    if (!arrivals) fail("shared_barrier_start at %s:%d for no arrivals", file, line);
    if (m.num_shared++ == MAX_SHARED_BARRIERS) fail("shared_barrier_start at %s:%d: more than %d barriers", file, line, MAX_SHARED_BARRIERS);
    memset(b, 0, sizeof *b);
    b->array = array;
    b->index = index;
    b->arrivals = b->left = arrivals;
}

/* A phase's end is seen: what was copied is there, and what those who arrived did comes before whatever the warp does from now on. */
static void see_phase(unsigned warp_index, shared_barrier *b) {
    for (bulk_copy *c = b->landed, *next; c; c = next) {
        next = c->next;
        memcpy(c->to, c->bytes, c->size);
        for (unsigned i = 0; i < c->size / c->array->element_size; i++) c->array->elements[c->index + i].in_flight = 0;
        free(c);
    }
    b->landed = NULL;
    for (unsigned i = 0; i < m.num_warps; i++)
        if (b->known[i] > m.warps[warp_index].known[i]) m.warps[warp_index].known[i] = b->known[i];
}

/* Where all have arrived and all bytes are there, the phase ends. */
static void end_phase(shared_barrier *b) {
    if (b->left || b->bytes) return;
    while (b->copies) {
        bulk_copy *c = b->copies;
        b->copies = c->next;
        c->next = b->landed;
        b->landed = c;
    }
    b->left = b->arrivals;
    memcpy(b->known, b->joint, sizeof b->known);
    b->phase++;
    for (unsigned i = 0; i < machine.block_threads; i++) {
        thread *t = &m.threads[i];
        if (t->state != AT_SHARED_BARRIER || t->value != (unsigned)(b - m.shared) || t->argument == (b->phase & 1)) continue;
        see_phase(i / 32, b);
        make_runnable(t);
    }
}

static void shared_barrier_arrive(emulation_array *array, long long index, unsigned bytes, const char *file, int line) {
    shared_barrier *b = find_shared_barrier("shared_barrier_arrive", array, index, file, line);
    tell(index_of(m.current) / 32, &b->joint);
    b->file = file;
    b->line = line;
    b->bytes += bytes;
    if (!b->left--) fail("shared_barrier_arrive at %s:%d: more arrivals than the %u of a phase, while copies are awaited", file, line, b->arrivals);
    end_phase(b);
}

static void shared_barrier_wait(emulation_array *array, long long index, unsigned parity, const char *file, int line) {
    shared_barrier *b = find_shared_barrier("shared_barrier_wait", array, index, file, line);
    if ((b->phase & 1) != parity) {
        see_phase(index_of(m.current) / 32, b);
        return;
    }
    m.current->value = (unsigned)(b - m.shared);
    m.current->argument = parity;
    make_waiting(m.current, AT_SHARED_BARRIER, file, line);
    leave(0);
}

static void copy_bulk(emulation_array *array, void *data, long long index, const void *from, unsigned bytes, emulation_array *barrier, long long barrier_index, const char *file, int line) {
    shared_barrier *b = find_shared_barrier("copy_bulk", barrier, barrier_index, file, line);
    bulk_copy *c = (bulk_copy *)malloc(sizeof *c + bytes);
    if (!c) fail("no memory for a copy at %s:%d", file, line);
    c->next = b->copies;
    b->copies = c;
    if (bytes % 16 || (size_t)from % 16 || index * array->element_size % 16)
        fail("copy_bulk of %u bytes from %p to %s[%lld] at %s:%d is misaligned: all three are multiples of 16", bytes, from, array->name, index, file, line);
    for (unsigned i = 0; i < bytes; i += 16) global_access((const char *)from + i, 16, file, line);
    check_bounds(array, index, bytes / array->element_size, file, line);
    c->array = array;
    c->index = index;
    c->size = bytes;
    c->to = (char *)data + index * array->element_size;
    memcpy(c->bytes, from, bytes);
    for (unsigned i = 0; i < bytes / array->element_size; i++) {
        check_element(array, index + i, EMULATION_WRITE, file, line);
        array->elements[index + i].in_flight = m.block_serial;
    }
    tell(index_of(m.current) / 32, &b->joint);
    b->file = file;
    b->line = line;
    b->bytes -= bytes;
    end_phase(b);
}

static void forget_copies(bulk_copy *c) {
    while (c) {
        bulk_copy *next = c->next;
        free(c);
        c = next;
    }
}

/* Forgets the block's barriers; returns one with a copy for which nobody has waited, or NULL. */
static const shared_barrier *end_shared_barriers(void) {
    const shared_barrier *unfinished = NULL;
    for (unsigned i = 0; i < m.num_shared && i < MAX_SHARED_BARRIERS; i++) {
        if (m.shared[i].bytes || m.shared[i].copies || m.shared[i].landed) unfinished = &m.shared[i];
        forget_copies(m.shared[i].copies);
        forget_copies(m.shared[i].landed);
    }
    m.num_shared = 0;
    return unfinished;
}

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
    m.shared_bytes = 0;
    m.failed = m.waited = 0;
    m.num_barrier = m.num_ended = m.num_wait = 0;
    m.stickiness = stickiness[draw() % 4];
    m.preemption_interval = intervals[draw() % 4];
    m.until_preemption = 1 + (unsigned)draw() % m.preemption_interval;
    m.last_warp = (unsigned)draw() % m.num_warps;
    for (unsigned i = 0; i < m.num_warps; i++) {
        m.warps[i].runnable = m.warps[i].collective = m.warps[i].barrier = m.warps[i].ended = 0;
        memset(m.warps[i].known, 0, sizeof m.warps[i].known);
    }
    memset(m.named, 0, sizeof m.named);
    for (unsigned i = 0; i < threads; i++) {
        context_make(&m.threads[i].context, m.threads[i].stack, thread_entry);
        m.threads[i].fake_stack = NULL;
        m.threads[i].num_copies = m.threads[i].num_groups = 0;
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
        unsigned i = 0;
        while (m.threads[i].state == ENDED) i++;
        emulation_report("kernel %s block (%u,%u) warp %u lane %u: deadlock: waits in %s at %s:%d", m.launch->name, x, y, i / 32,
                         i % 32, where(&m.threads[i]), m.threads[i].file, m.threads[i].line);
        m.failed = 1;
    }
    for (unsigned i = 0; i < NUM_NAMED_BARRIERS && !m.failed; i++)
        if (m.named[i].threads) {
            emulation_report("kernel %s block (%u,%u): the block ended while named barrier %u, reached at %s:%d, wanted more warps",
                             m.launch->name, x, y, i, m.named[i].file, m.named[i].line);
            m.failed = 1;
        }
    const shared_barrier *unfinished = end_shared_barriers();
    if (!m.failed && unfinished) {
        emulation_report("kernel %s block (%u,%u): the block ended while copies were under way to the barrier at %s[%lld], last at %s:%d", m.launch->name, x, y,
                         unfinished->array->name, unfinished->index, unfinished->file, unfinished->line);
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
    machine.block_barrier_named = block_barrier_named;
    machine.block_barrier_arrive = block_barrier_arrive;
    machine.wait_for_previous_kernels = wait_for_previous_kernels;
    machine.let_next_kernel_start = let_next_kernel_start;
    machine.shared_access = shared_access;
    machine.shared_vector = shared_vector;
    machine.copy_async = copy_async;
    machine.copy_async_commit = copy_async_commit;
    machine.copy_async_wait = copy_async_wait;
    machine.shared_barrier_start = shared_barrier_start;
    machine.shared_barrier_arrive = shared_barrier_arrive;
    machine.shared_barrier_wait = shared_barrier_wait;
    machine.copy_bulk = copy_bulk;
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
