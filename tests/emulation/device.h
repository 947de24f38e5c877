/*
  device.h: the emulated counterpart of kernels_src/device.h: the same names and meanings, in plain C++ over the machine
  of machine.c. The emulated NVRTC puts it in that file's place. Whatever is added there is added here too.

  Calls that the machine has to report about take the place they are called from by default arguments.
*/
#pragma once /* the stand-ins for CUB include it, too */
#include "machine.h"
#include "numbers.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static emulation_machine *emulation;

extern "C" {
void emulation_attach(emulation_machine *machine);
void emulation_attach(emulation_machine *machine) { emulation = machine; }
extern const emulation_target_info emulation_target;
const emulation_target_info emulation_target = {EMULATION_TARGET, EMULATION_IS_PTX};
}

#define EMULATION_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMULATION_INLINE static inline __attribute__((always_inline))

#define DEVICE static inline
#define KERNEL_SHARING(name, max_threads, blocks, type) KERNEL(name, max_threads, type)
#define KERNEL(name, max_threads, type)                                \
    extern "C" {                                                       \
    void name(const type &a);                                          \
    extern const emulation_kernel name##_kernel;                       \
    const emulation_kernel name##_kernel = {sizeof(type), max_threads}; \
    }                                                                  \
    void name(const type &a)

struct alignas(16) u32x4 { u32 v[4]; };
struct alignas(8) u32x2 { u32 v[2]; };

/* ---- where am I ---- */
EMULATION_INLINE u32 thread_index() { return emulation->thread_index; }
EMULATION_INLINE u32 block_threads() { return emulation->block_threads; }
EMULATION_INLINE u32 block_index_x() { return emulation->block_index_x; }
EMULATION_INLINE u32 block_index_y() { return emulation->block_index_y; }
EMULATION_INLINE u32 grid_blocks_x() { return emulation->grid_blocks_x; }
EMULATION_INLINE u32 grid_blocks_y() { return emulation->grid_blocks_y; }
EMULATION_INLINE u32 lane_index() { return emulation->thread_index & 31u; }
EMULATION_INLINE u32 warp_index() { return emulation->thread_index >> 5; }

/* ---- barriers, and the order between kernels ---- */
EMULATION_INLINE void block_barrier(EMULATION_PLACE) { emulation->block_barrier(file, line); }
EMULATION_INLINE void block_barrier_named(u32 id, u32 threads, EMULATION_PLACE) {
    emulation->block_barrier_named(id, threads, file, line);
}
EMULATION_INLINE void block_barrier_arrive(u32 id, u32 threads, EMULATION_PLACE) {
    emulation->block_barrier_arrive(id, threads, file, line);
}
EMULATION_INLINE void warp_barrier(EMULATION_PLACE) { emulation->collective(EMULATION_WARP_BARRIER, 0, 0, file, line); }
EMULATION_INLINE void wait_for_previous_kernels(EMULATION_PLACE) { emulation->wait_for_previous_kernels(file, line); }
EMULATION_INLINE void let_next_kernel_start() { emulation->let_next_kernel_start(); }

/* ---- warp collectives ---- */
EMULATION_INLINE u32 warp_max(u32 v, EMULATION_PLACE) { return emulation->collective(EMULATION_MAX, v, 0, file, line); }
EMULATION_INLINE u32 warp_min(u32 v, EMULATION_PLACE) { return emulation->collective(EMULATION_MIN, v, 0, file, line); }
EMULATION_INLINE u32 warp_ballot(bool p, EMULATION_PLACE) { return emulation->collective(EMULATION_BALLOT, p, 0, file, line); }
EMULATION_INLINE u32 warp_match(u32 v, EMULATION_PLACE) { return emulation->collective(EMULATION_MATCH, v, 0, file, line); }
EMULATION_INLINE u32 warp_shuffle(u32 v, u32 lane, EMULATION_PLACE) {
    return emulation->collective(EMULATION_SHUFFLE, v, lane, file, line);
}
EMULATION_INLINE u32 warp_shuffle_xor(u32 v, u32 mask, EMULATION_PLACE) {
    return emulation->collective(EMULATION_SHUFFLE_XOR, v, mask, file, line);
}
EMULATION_INLINE u32 warp_shuffle_up(u32 v, u32 delta, EMULATION_PLACE) {
    return emulation->collective(EMULATION_SHUFFLE_UP, v, delta, file, line);
}

EMULATION_INLINE u32 warp_add(u32 v, EMULATION_PLACE) {
    for (u32 mask = 16; mask; mask >>= 1) v += emulation->collective(EMULATION_SHUFFLE_XOR, v, mask, file, line);
    return v;
}

/* ---- bits ---- */
EMULATION_INLINE u32 and_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }
EMULATION_INLINE u32 or_and(u32 a, u32 b, u32 mask) { return (a | b) & mask; }
EMULATION_INLINE u32 popcount(u32 v) { return (u32)__builtin_popcount(v); }
EMULATION_INLINE u32 f32_bits(float f) { return emulation_bits(f); }
EMULATION_INLINE float f32_from_bits(u32 u) { return emulation_float(u); }
EMULATION_INLINE u32 count_above(u32 count, u32 a, u32 not_b) { return count + (a > ~not_b); }
EMULATION_INLINE u32 count_above_2(u32 count, u32 a_high, u32 a_low, u32 not_b_high, u32 not_b_low) {
    return count + (((u64)a_high << 32 | a_low) > ~((u64)not_b_high << 32 | not_b_low));
}
DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (u32 i = 0; i < 4; i++) result |= (u32)(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
    return result;
}
DEVICE u32 in_register(u32 constant) { return constant; }

/* ---- exact single operations ---- */
EMULATION_INLINE float f32_add(float a, float b) { return a + b; }
EMULATION_INLINE float f32_mul(float a, float b) { return a * b; }
EMULATION_INLINE float f32_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMULATION_INLINE float f32_div(float a, float b) { return a / b; }
EMULATION_INLINE float f32_max(float a, float b) { return a > b ? a : b; }
EMULATION_INLINE float f32_min(float a, float b) { return a < b ? a : b; }
EMULATION_INLINE float f32_sqrt(float a) { return __builtin_sqrtf(a); }
EMULATION_INLINE float f32_reciprocal(float a) { return 1.0f / a; }

/* ---- 16-bit floats ---- */
DEVICE float f16_to_f32(u16 h) { return emulation_f16_to_f32(h); }
DEVICE u16 f32_to_f16(float f) { return emulation_f32_to_f16(f); }
DEVICE float bf16_to_f32(u16 h) { return emulation_bf16_to_f32(h); }
DEVICE u16 f32_to_bf16(float f) { return emulation_f32_to_bf16(f); }
DEVICE u32 f32_to_half2(float lo, float hi) { return emulation_pack(emulation_f32_to_f16(lo), emulation_f32_to_f16(hi)); }
DEVICE u32 f32_to_bf162(float lo, float hi) { return emulation_pack(emulation_f32_to_bf16(lo), emulation_f32_to_bf16(hi)); }
DEVICE u32 half2_sub(u32 a, u32 b) {
    return emulation_pack(emulation_f16_sub(emulation_low(a), emulation_low(b)),
                          emulation_f16_sub(emulation_high(a), emulation_high(b)));
}
DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
    return emulation_pack(emulation_f16_fma(emulation_low(a), emulation_low(b), emulation_low(c)),
                          emulation_f16_fma(emulation_high(a), emulation_high(b), emulation_high(c)));
}
DEVICE u32 bf162_fma(u32 a, u32 b, u32 c) {
    return emulation_pack(emulation_bf16_fma(emulation_low(a), emulation_low(b), emulation_low(c)),
                          emulation_bf16_fma(emulation_high(a), emulation_high(b), emulation_high(c)));
}

/* ---- matrix fragments ---- */
EMULATION_INLINE void matrix_multiply_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATION_PLACE) {
    const emulation_matrix matrix = {c, a, {b0, b1}};
    emulation->matrix_multiply(EMULATION_MATRIX_F16, &matrix, file, line);
}
EMULATION_INLINE void matrix_multiply_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATION_PLACE) {
    const emulation_matrix matrix = {c, a, {b0, b1}};
    emulation->matrix_multiply(EMULATION_MATRIX_BF16, &matrix, file, line);
}

EMULATION_INLINE void matrix_product_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATION_PLACE) {
    c[0] = c[1] = c[2] = c[3] = 0.0f;
    const emulation_matrix matrix = {c, a, {b0, b1}};
    emulation->matrix_multiply(EMULATION_MATRIX_F16, &matrix, file, line);
}
EMULATION_INLINE void matrix_product_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATION_PLACE) {
    c[0] = c[1] = c[2] = c[3] = 0.0f;
    const emulation_matrix matrix = {c, a, {b0, b1}};
    emulation->matrix_multiply(EMULATION_MATRIX_BF16, &matrix, file, line);
}
EMULATION_INLINE u32 matrix_transpose(u32 a, EMULATION_PLACE) {
    const u32 g = lane_index() >> 2, t = lane_index() & 3;
    const u32 first = emulation->collective(EMULATION_SHUFFLE, a, t * 8 + g / 2, file, line);
    const u32 second = emulation->collective(EMULATION_SHUFFLE, a, t * 8 + 4 + g / 2, file, line);
    return g % 2 ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
}

/* ---- global memory ---- */
template <class T>
EMULATION_INLINE T emulation_load(const void *p, const char *file, int line) {
    emulation->global_access(p, sizeof(T), file, line);
    return *(const T *)p;
}
EMULATION_INLINE u32x4 load_weights_16(const void *p, EMULATION_PLACE) { return emulation_load<u32x4>(p, file, line); }
EMULATION_INLINE u32x2 load_weights_8(const void *p, EMULATION_PLACE) { return emulation_load<u32x2>(p, file, line); }
EMULATION_INLINE u32 load_weights_4(const void *p, EMULATION_PLACE) { return emulation_load<u32>(p, file, line); }
#define PREFETCH_BYTES 4096u
EMULATION_INLINE void prefetch_weights(const void *p, u64 left, EMULATION_PLACE) {
    const u32 size = left < PREFETCH_BYTES ? (u32)left & ~15u : PREFETCH_BYTES;
    if (size) emulation_load<u32x4>(p, file, line);
    if (size) emulation_load<u32x4>((const u8 *)p + size - 16, file, line);
}
EMULATION_INLINE u32x4 load_16(const void *p, EMULATION_PLACE) { return emulation_load<u32x4>(p, file, line); }
EMULATION_INLINE u32x2 load_8(const void *p, EMULATION_PLACE) { return emulation_load<u32x2>(p, file, line); }
EMULATION_INLINE u32 load_fresh_4(const void *p, EMULATION_PLACE) { return emulation_load<u32>(p, file, line); }
EMULATION_INLINE u32 load_4(const void *p, EMULATION_PLACE) { return emulation_load<u32>(p, file, line); }
EMULATION_INLINE u16 load_2(const void *p, EMULATION_PLACE) { return emulation_load<u16>(p, file, line); }
EMULATION_INLINE u8 load_1(const void *p, EMULATION_PLACE) { return emulation_load<u8>(p, file, line); }

template <class T>
EMULATION_INLINE void emulation_store(void *p, T value, const char *file, int line) {
    emulation->global_access(p, sizeof(T), file, line);
    *(T *)p = value;
}
EMULATION_INLINE void store_16(void *p, u32x4 value, EMULATION_PLACE) { emulation_store(p, value, file, line); }
EMULATION_INLINE void store_8(void *p, u32x2 value, EMULATION_PLACE) { emulation_store(p, value, file, line); }
EMULATION_INLINE void global_atomic_add_64(long long *p, long long value, EMULATION_PLACE) {
    emulation->global_access(p, sizeof *p, file, line);
    *p = (long long)((u64)*p + (u64)value);
}

/* ---- products by four warps together ----
   A product is done where it is waited for, and its reads are told to the machine there and where it begins: so both what isn't
   there yet and what is overwritten too early is found. */
struct emulation_product {
    float (*c)[4];
    emulation_array *array;
    const u32 *data;
    u32 columns, a, b, group;
    bool f16;
};
enum { EMULATION_MAX_PRODUCTS = 256 };
static struct {
    emulation_product products[EMULATION_MAX_PRODUCTS];
    u32 count, groups; /* groups: committed */
} emulation_products[1024];

/* Where chunk 0 or 1 of row r is, from the first word of the rows, plus 8 for each 16 inputs. */
EMULATION_INLINE u32 emulation_row_word(u32 first, u32 r, u32 chunk) {
    return first / 32 * 32 + r * 32 + ((first % 32 / 4 + chunk) ^ (r & 7)) * 4;
}
/* The reads of a warp, shared out among its lanes. */
DEVICE void emulation_product_reads(const emulation_product &p, const char *file, int line) {
    for (u32 chunk = 0; chunk < 2; chunk++) {
        if (lane_index() < 16) emulation->shared_vector(p.array, emulation_row_word(p.a, (warp_index() & 3) * 16 + lane_index(), chunk), 4, EMULATION_READ, file, line);
        for (u32 r = lane_index(); r < p.columns; r += 32) emulation->shared_vector(p.array, emulation_row_word(p.b, r, chunk), 4, EMULATION_READ, file, line);
    }
}
DEVICE float emulation_product_value(const emulation_product &p, u32 first, u32 r, u32 k) {
    const u32 word = p.data[emulation_row_word(first, r, k / 8) + k % 8 / 2];
    const u16 half = k % 2 ? emulation_high(word) : emulation_low(word);
    return p.f16 ? emulation_f16_to_f32(half) : emulation_bf16_to_f32(half);
}
DEVICE void emulation_multiply(const emulation_product &p, const char *file, int line) {
    const u32 g = lane_index() >> 2, t = lane_index() & 3;
    double a[2][16];
    emulation_product_reads(p, file, line);
    for (u32 half = 0; half < 2; half++)
        for (u32 k = 0; k < 16; k++) a[half][k] = emulation_product_value(p, p.a, (warp_index() & 3) * 16 + half * 8 + g, k);
    for (u32 column = 0; column < p.columns; column++) {
        if (column % 8 / 2 != t) continue;
        double sum[2] = {p.c[column / 8][column % 2], p.c[column / 8][2 + column % 2]};
        for (u32 k = 0; k < 16; k++) {
            const double b = emulation_product_value(p, p.b, column, k);
            sum[0] += a[0][k] * b;
            sum[1] += a[1][k] * b;
        }
        p.c[column / 8][column % 2] = (float)sum[0];
        p.c[column / 8][2 + column % 2] = (float)sum[1];
    }
}
EMULATION_INLINE void shared_visible_to_products() {}
EMULATION_INLINE void warpgroup_begin(EMULATION_PLACE) { emulation->collective(EMULATION_SHUFFLE, 0, 0, file, line); }
EMULATION_INLINE void warpgroup_commit(EMULATION_PLACE) {
    auto &mine = emulation_products[emulation->thread_index];
    emulation->collective(EMULATION_SHUFFLE, 0, 0, file, line);
    for (u32 i = 0; i < mine.count; i++)
        if (mine.products[i].group == 0) mine.products[i].group = mine.groups + 1;
    mine.groups++;
}
template <int N>
EMULATION_INLINE void warpgroup_wait(EMULATION_PLACE) {
    auto &mine = emulation_products[emulation->thread_index];
    u32 left = 0;
    emulation->collective(EMULATION_SHUFFLE, 0, 0, file, line);
    for (u32 i = 0; i < mine.count; i++) {
        const emulation_product product = mine.products[i];
        if (product.group != 0 && product.group + N <= mine.groups) emulation_multiply(product, file, line);
        else mine.products[left++] = product;
    }
    mine.count = left;
    if (left == 0) mine.groups = 0;
}
template <u32 N> EMULATION_INLINE void release_registers() {}
template <u32 N> EMULATION_INLINE void take_registers() {}

/* ---- shared memory ----
   Blocks run one at a time, so an array is a static one. Indexing gives a stand-in for the element, which tells the machine
   of each read and write. */
#define EMULATION_MEMBER __attribute__((always_inline)) inline

struct emulation_index { /* any integer, and the place where it is used as an index */
    long long value;
    const char *file;
    int line;
    template <class T>
    EMULATION_MEMBER emulation_index(const T &index, EMULATION_PLACE) : value((long long)index), file(file), line(line) {}
};

template <class T>
struct emulation_reference {
    emulation_array *array;
    T *data;
    emulation_index index;

    EMULATION_MEMBER operator T() const {
        emulation->shared_access(array, index.value, EMULATION_READ, index.file, index.line);
        return data[index.value];
    }
    EMULATION_MEMBER const emulation_reference &operator=(T value) const {
        emulation->shared_access(array, index.value, EMULATION_WRITE, index.file, index.line);
        data[index.value] = value;
        return *this;
    }
    EMULATION_MEMBER const emulation_reference &operator=(const emulation_reference &other) const { return *this = (T)other; }
    EMULATION_MEMBER const emulation_reference &operator+=(T value) const { return *this = (T)((T)*this + value); }
    EMULATION_MEMBER const emulation_reference &operator-=(T value) const { return *this = (T)((T)*this - value); }
    EMULATION_MEMBER const emulation_reference &operator*=(T value) const { return *this = (T)((T)*this * value); }
    EMULATION_MEMBER const emulation_reference &operator|=(T value) const { return *this = (T)((T)*this | value); }
    EMULATION_MEMBER const emulation_reference &operator&=(T value) const { return *this = (T)((T)*this & value); }
    EMULATION_MEMBER const emulation_reference &operator^=(T value) const { return *this = (T)((T)*this ^ value); }
    EMULATION_MEMBER T add_atomically(T value) const {
        static_assert((T)0.5f == 0 && sizeof(T) == 4, "shared_atomic_add is for int and u32");
        emulation->shared_access(array, index.value, EMULATION_ATOMIC, index.file, index.line);
        const T before = data[index.value];
        data[index.value] = (T)((u32)before + (u32)value);
        return before;
    }
    EMULATION_MEMBER T or_atomically(T value) const {
        static_assert((T)0.5f == 0 && sizeof(T) == 4, "shared_atomic_or is for u32");
        emulation->shared_access(array, index.value, EMULATION_ATOMIC, index.file, index.line);
        const T before = data[index.value];
        data[index.value] = before | value;
        return before;
    }
};

struct emulation_int4 { int x, y, z, w; };
struct emulation_int2 { int x, y; };

template <class T>
struct emulation_shared {
    emulation_array *array;
    T *data;

    EMULATION_MEMBER emulation_reference<T> operator[](emulation_index index) const { return {array, data, index}; }
    EMULATION_MEMBER emulation_int4 four(emulation_index index) const {
        static_assert(sizeof(T) == 4, "shared_load_4 is for elements of 4 bytes");
        emulation_int4 result;
        emulation->shared_vector(array, index.value, 4, EMULATION_READ, index.file, index.line);
        __builtin_memcpy(&result, data + index.value, sizeof result);
        return result;
    }
    template <u32 N, class V>
    EMULATION_MEMBER void store(emulation_index index, V value) const {
        static_assert(sizeof(T) == 4, "shared_store_2 and shared_store_4 are for elements of 4 bytes");
        emulation->shared_vector(array, index.value, N, EMULATION_WRITE, index.file, index.line);
        __builtin_memcpy(data + index.value, &value, sizeof value);
    }
    EMULATION_MEMBER void load_matrices(emulation_index index, u32 (&d)[4]) const { /* each lane reads the whole row that holds its elements */
        static_assert(sizeof(T) == 4, "shared_load_matrices is for elements of 4 bytes");
        for (u32 m = 0; m < 4; m++) {
            const u32 row = emulation->collective(EMULATION_SHUFFLE, (u32)index.value, m * 8 + lane_index() / 4, index.file, index.line);
            emulation->shared_vector(array, row, 4, EMULATION_READ, index.file, index.line);
            d[m] = data[row + lane_index() % 4];
        }
    }
    template <u32 N, bool F16, u32 MOST>
    EMULATION_MEMBER void warpgroup_product(float (&c)[MOST][4], emulation_index a, emulation_index b) const {
        static_assert(sizeof(T) == 4 && N % 16 == 0 && N <= MOST * 8, "sums for each column");
        auto &mine = emulation_products[emulation->thread_index];
        emulation->collective(EMULATION_SHUFFLE, 0, 0, a.file, a.line);
        const emulation_product product = {c, array, data, N, (u32)a.value, (u32)b.value, 0, F16};
        emulation_product_reads(product, a.file, a.line);
        if (mine.count == EMULATION_MAX_PRODUCTS) __builtin_trap();
        mine.products[mine.count++] = product;
    }
    EMULATION_MEMBER emulation_int2 two(emulation_index index) const {
        static_assert(sizeof(T) == 4, "shared_load_2 is for elements of 4 bytes");
        emulation_int2 result;
        emulation->shared_vector(array, index.value, 2, EMULATION_READ, index.file, index.line);
        __builtin_memcpy(&result, data + index.value, sizeof result);
        return result;
    }
    EMULATION_MEMBER void copy_async(u32 bytes, emulation_index index, const void *p, u32 size) const {
        static_assert(4 % sizeof(T) == 0, "copies are for whole elements");
        emulation->copy_async(array, data, index.value, p, bytes, size, index.file, index.line);
    }
};

#define SHARED(type, name, count) EMULATION_SHARED(type, name, count, 0)
#define DYNAMIC_SHARED(name) EMULATION_SHARED(u32, name, SHARED_BYTES / 4, 1)
#define DYNAMIC_SHARED_FOR_PRODUCTS(name) DYNAMIC_SHARED(name)
#define EMULATION_SHARED(type, name, count, dynamic)                                                                  \
    static type name##_data[count];                                                                                   \
    static emulation_element name##_elements[count];                                                                  \
    static emulation_array name##_array = {#name, name##_elements, (u32)(sizeof name##_data / sizeof(type)), sizeof(type), dynamic, 0}; \
    const emulation_shared<type> name = {&name##_array, name##_data}

/* The types that stand in for those of CUB say how many words they take, and reach them through the machine as well. */
#define SHARED_WORDS(type) (type::words)
#define SHARED_AS(type, words) (type{(words).array, (words).data})

#define shared_load_4(array, i) ((array).four(i))
#define shared_load_2(array, i) ((array).two(i))
#define shared_store_2(array, i, value) ((array).template store<2>(i, value))
#define shared_store_4(array, i, value) ((array).template store<4>(i, value))
#define shared_load_matrices(array, i, d) ((array).load_matrices(i, d))
#define warpgroup_multiply(N, F16, c, array, a, b) ((array).template warpgroup_product<N, F16>(c, a, b))
#define shared_atomic_add(array, i, value) ((array)[i].add_atomically(value))
#define shared_atomic_or(array, i, value) ((array)[i].or_atomically(value))

/* An array, and where in it. */
struct shared_place {
    emulation_shared<u32> array;
    u32 index;
};
#define shared_place_of(array, i) (shared_place{(array), (u32)(i)})
EMULATION_INLINE shared_place shared_place_after(const shared_place &place, u32 i) { return {place.array, place.index + i}; }
EMULATION_INLINE u32 shared_load_from(const shared_place &from, u32 i, EMULATION_PLACE) { return from.array[emulation_index(from.index + i, file, line)]; }
EMULATION_INLINE u32x2 shared_load_2_from(const shared_place &from, u32 i, EMULATION_PLACE) {
    const emulation_int2 d = from.array.two(emulation_index(from.index + i, file, line));
    return {{(u32)d.x, (u32)d.y}};
}
EMULATION_INLINE u32x4 shared_load_4_from(const shared_place &from, u32 i, EMULATION_PLACE) {
    const emulation_int4 d = from.array.four(emulation_index(from.index + i, file, line));
    return {{(u32)d.x, (u32)d.y, (u32)d.z, (u32)d.w}};
}
EMULATION_INLINE void shared_store_to(const shared_place &to, u32 i, u32 v, EMULATION_PLACE) { to.array[emulation_index(to.index + i, file, line)] = v; }
EMULATION_INLINE void shared_store_2_to(const shared_place &to, u32 i, u32x2 v, EMULATION_PLACE) { to.array.store<2>(emulation_index(to.index + i, file, line), v); }

/* ---- copies from global to shared memory that go on while the thread does ---- */
EMULATION_INLINE void copy_async_16(const shared_place &to, u32 i, const void *p, u32 size, EMULATION_PLACE) { to.array.copy_async(16, emulation_index(to.index + i, file, line), p, size); }
#define copy_async_line_16 copy_async_16
EMULATION_INLINE void copy_async_4(const shared_place &to, u32 i, const void *p, bool wanted, EMULATION_PLACE) {
    if (wanted) to.array.copy_async(4, emulation_index(to.index + i, file, line), p, 4);
}

/* ---- barriers in shared memory, and copies by the bulk engine ---- */
EMULATION_INLINE bool elect_lane(EMULATION_PLACE) {
    warp_barrier(file, line);
    return lane_index() == 0;
}
EMULATION_INLINE void shared_barrier_start(const shared_place &barrier, u32 arrivals, EMULATION_PLACE) { emulation->shared_barrier_start(barrier.array.array, barrier.index, arrivals, file, line); }
EMULATION_INLINE void shared_barrier_arrive(const shared_place &barrier, u32 i, EMULATION_PLACE) { emulation->shared_barrier_arrive(barrier.array.array, barrier.index + i, 0, file, line); }
EMULATION_INLINE void shared_barrier_wait(const shared_place &barrier, u32 i, u32 parity, EMULATION_PLACE) { emulation->shared_barrier_wait(barrier.array.array, barrier.index + i, parity, file, line); }
EMULATION_INLINE void shared_barrier_expect(const shared_place &barrier, u32 i, u32 bytes, EMULATION_PLACE) {
    emulation->shared_barrier_arrive(barrier.array.array, barrier.index + i, bytes, file, line);
}
EMULATION_INLINE void copy_bulk(const shared_place &to, u32 i, const void *p, u32 bytes, const shared_place &barrier, u32 barrier_i, EMULATION_PLACE) {
    emulation->copy_bulk(to.array.array, to.array.data, to.index + i, p, bytes, barrier.array.array, barrier.index + barrier_i, file, line);
}

EMULATION_INLINE void copy_async_commit() { emulation->copy_async_commit(); }
template <int N>
EMULATION_INLINE void copy_async_wait() {
    static_assert(N >= 0, "a number of groups");
    emulation->copy_async_wait(N);
}
