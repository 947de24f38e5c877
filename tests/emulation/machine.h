/*
  machine.h: what a compiled kernel and the machine that runs it know of each other. A kernel is a shared library that
  calls the machine only through this table, so that the translation unit of a kernel needs no header of the system and
  compiles fast. Valid C and C++.
*/
#ifndef EMULATION_MACHINE_H
#define EMULATION_MACHINE_H

/* Warp collectives. */
enum {
    EMULATION_MAX,
    EMULATION_MIN,
    EMULATION_BALLOT,
    EMULATION_MATCH,
    EMULATION_SHUFFLE,
    EMULATION_SHUFFLE_XOR,
    EMULATION_SHUFFLE_UP,
    EMULATION_WARP_BARRIER,
    EMULATION_MATRIX_F16,
    EMULATION_MATRIX_BF16
};

/* Accesses to shared memory. */
enum { EMULATION_READ, EMULATION_WRITE, EMULATION_ATOMIC };

/* Accesses to one element: of each warp the latest. */
typedef struct emulation_access {
    const char *file; /* of the latest */
    int line;
    unsigned latest;  /* its warp */
    unsigned block;   /* the rest is void for other blocks; 0: none */
    unsigned warps;   /* a bit for each warp that has been here */
    unsigned clock[32];      /* of each of these: how many barriers of any kind it had passed, plus 1 */
    unsigned char lane[32];  /* and its lane; 32: more than one, at this clock */
} emulation_access;

typedef struct emulation_element {
    emulation_access write, atomic, read; /* the others since the write */
    unsigned in_flight;                   /* the block in which an asynchronous copy to here hasn't been waited for */
} emulation_element;

/* One SHARED array, or the DYNAMIC_SHARED one. */
typedef struct emulation_array {
    const char *name;
    emulation_element *elements;
    unsigned count, element_size;
    unsigned dynamic; /* its bytes are those of the launch */
    unsigned block; /* the last block that touched it */
} emulation_array;

typedef struct emulation_matrix { /* a lane's part of a matrix multiplication */
    float *c;
    const unsigned *a;
    unsigned b[2];
} emulation_matrix;

typedef struct emulation_machine {
    unsigned thread_index, block_threads, block_index_x, block_index_y, grid_blocks_x, grid_blocks_y;
    unsigned (*collective)(int operation, unsigned value, unsigned argument, const char *file, int line);
    void (*matrix_multiply)(int operation, const emulation_matrix *matrix, const char *file, int line);
    void (*block_barrier)(const char *file, int line);
    void (*block_barrier_named)(unsigned id, unsigned threads, const char *file, int line);
    void (*block_barrier_arrive)(unsigned id, unsigned threads, const char *file, int line);
    void (*wait_for_previous_kernels)(const char *file, int line);
    void (*let_next_kernel_start)(void);
    void (*shared_access)(emulation_array *array, long long index, int access, const char *file, int line);
    void (*shared_vector)(emulation_array *array, long long index, unsigned count, int access, const char *file, int line);
    void (*copy_async)(emulation_array *array, void *data, long long index, const void *from, unsigned bytes, unsigned size, const char *file, int line);
    void (*copy_async_commit)(void);
    void (*copy_async_wait)(int groups);
    void (*shared_barrier_start)(emulation_array *array, long long index, unsigned arrivals, const char *file, int line);
    void (*shared_barrier_arrive)(emulation_array *array, long long index, unsigned bytes, const char *file, int line);
    void (*shared_barrier_wait)(emulation_array *array, long long index, unsigned parity, const char *file, int line);
    void (*copy_bulk)(emulation_array *array, void *data, long long index, const void *from, unsigned bytes, emulation_array *barrier, long long barrier_index, const char *file, int line);
    void (*global_access)(const void *address, unsigned size, const char *file, int line);
} emulation_machine;

/* Every kernel library exports `emulation_attach`, `emulation_target`, and for each kernel NAME the function NAME and
   NAME_kernel. */
typedef struct emulation_kernel {
    unsigned argument_size, max_threads;
} emulation_kernel;

typedef struct emulation_target_info {
    unsigned target; /* 90 for sm_90 */
    unsigned is_ptx; /* 1: runs on that and everything newer */
} emulation_target_info;

#endif
