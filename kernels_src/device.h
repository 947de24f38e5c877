/*
  device.h: everything that a kernel needs from the machine: thread indices, barriers, warp collectives, rounding-exact
  arithmetic, conversions, matrix fragments, memory access. Intrinsics and inline PTX stand here and nowhere else, so that
  a second implementation of this one file runs the same kernels elsewhere. Nothing about experts or tokens belongs here.

  Names: f32_* are single IEEE operations that the compiler may not fuse; half2 and bf162 are two 16-bit floats in one
  32-bit word, the first in the low half.
*/
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define KERNEL(name, max_threads, type) KERNEL_SHARING(name, max_threads, 1, type)
/* Registers are kept low enough for `blocks` blocks to share a multiprocessor. */
#define KERNEL_SHARING(name, max_threads, blocks, type) \
    extern "C" __global__ void __launch_bounds__(max_threads, blocks) name(const __grid_constant__ type a)
/* Arrays in shared memory are declared by this alone and used by index, or by the shared_* functions below. */
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
/* One array of u32 beside them, as large as the launch says: SHARED_BYTES, a constant of the kernel's, more than the others could
   have. */
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u32 name[]
/* The same, aligned as warpgroup_multiply wants it; then without other arrays beside it. */
#define DYNAMIC_SHARED_FOR_PRODUCTS(name) extern __shared__ __align__(1024) u32 name[]

/* Words that a SHARED u32 array needs to be used as an object of a type that isn't ours; and the array as one. */
#define SHARED_WORDS(type) ((u32)(sizeof(type) + 3) / 4)
#define SHARED_AS(type, array) (*(type *)(array))

struct __align__(16) u32x4 { u32 v[4]; };
struct __align__(8) u32x2 { u32 v[2]; };

/* ---- where am I ---- */
DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_threads() { return blockDim.x; }
DEVICE u32 block_index_x() { return blockIdx.x; }
DEVICE u32 block_index_y() { return blockIdx.y; }
DEVICE u32 grid_blocks_x() { return gridDim.x; }
DEVICE u32 grid_blocks_y() { return gridDim.y; }
DEVICE u32 lane_index() { return threadIdx.x & 31u; }
DEVICE u32 warp_index() { return threadIdx.x >> 5; }

/* ---- barriers, and the order between kernels ---- */
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
/* A barrier of some warps alone: `threads` of the block, whole warps, which all name the same `id` of 1 to 15. */
DEVICE void block_barrier_named(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
/* Takes part in such a barrier without waiting at it: what this warp has written is there for those who wait. */
DEVICE void block_barrier_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

/* Waits until the kernels before this one in the stream have finished and their writes are visible. Every block calls it
   before it reads what they wrote, writes anything, or ends: only so is the kernel before them finished too when this one
   is. What a kernel further back wrote may be read earlier, by load_fresh_4, if the one before this has waited for it before it let this
   one start. Nothing where the GPU has no dependent launch. */
DEVICE void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* Lets the next kernel start its blocks; it still waits as above for what this one writes. */
DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- warp collectives: all 32 lanes take part ---- */
DEVICE u32 warp_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }
DEVICE u32 warp_min(u32 v) { return __reduce_min_sync(0xffffffffu, v); }
DEVICE u32 warp_add(u32 v) { return __reduce_add_sync(0xffffffffu, v); }
DEVICE u32 warp_ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
DEVICE u32 warp_match(u32 v) { return __match_any_sync(0xffffffffu, v); }
DEVICE u32 warp_shuffle(u32 v, u32 lane) { return __shfl_sync(0xffffffffu, v, (int)lane); }
DEVICE u32 warp_shuffle_xor(u32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, (int)mask); }
DEVICE u32 warp_shuffle_up(u32 v, u32 delta) { return __shfl_up_sync(0xffffffffu, v, delta); }

/* ---- bits ---- */
DEVICE u32 popcount(u32 v) { return (u32)__popc(v); }
DEVICE u32 f32_bits(float f) { return __float_as_uint(f); }
DEVICE float f32_from_bits(u32 u) { return __uint_as_float(u); }
/* (a & mask) | bits in one instruction: the compiler makes two of it where both are constants. */
DEVICE u32 and_or(u32 a, u32 mask, u32 bits) { u32 d; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits)); return d; }
/* (a | b) & mask in one instruction. */
DEVICE u32 or_and(u32 a, u32 b, u32 mask) { u32 d; asm("lop3.b32 %0, %1, %2, %3, 0xa8;" : "=r"(d) : "r"(a), "r"(b), "r"(mask)); return d; }
/* The four bytes of the result are chosen by the four hex digits of `selector` from the bytes of a (0-3) and b (4-7). */
DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
/* A constant that has a register, by being unknown to the compiler: an instruction takes one constant, and to move another one costs as much as it does. */
DEVICE u32 in_register(u32 constant) {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return constant + (thread >> 16);
}

/* count + (a > b) for a given ~b, by the carry of a sum: half of what a comparison and its use take. */
DEVICE u32 count_above(u32 count, u32 a, u32 not_b) {
    asm("{ .reg .u32 t; add.cc.u32 t, %1, %2; addc.u32 %0, %0, 0; }" : "+r"(count) : "r"(a), "r"(not_b));
    return count;
}
/* The same for numbers of two words. */
DEVICE u32 count_above_2(u32 count, u32 a_high, u32 a_low, u32 not_b_high, u32 not_b_low) {
    asm("{ .reg .u32 t; add.cc.u32 t, %2, %4; addc.cc.u32 t, %1, %3; addc.u32 %0, %0, 0; }" : "+r"(count) : "r"(a_high), "r"(a_low), "r"(not_b_high), "r"(not_b_low));
    return count;
}

/* ---- exact single operations ---- */
DEVICE float f32_add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float f32_mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE float f32_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float f32_div(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float f32_sqrt(float a) { return __fsqrt_rn(a); }
DEVICE float f32_reciprocal(float a) { return __frcp_rn(a); } /* the bits of f32_div(1, a), in fewer instructions */

/* The larger and the smaller; b where a is NaN. */
DEVICE float f32_max(float a, float b) { return fmaxf(a, b); }
DEVICE float f32_min(float a, float b) { return fminf(a, b); }

/* ---- 16-bit floats ---- */
DEVICE float f16_to_f32(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE u16 f32_to_f16(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
DEVICE float bf16_to_f32(u16 h) { return f32_from_bits((u32)h << 16); }
DEVICE u16 f32_to_bf16(float f) { u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
DEVICE u32 f32_to_half2(float lo, float hi) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
DEVICE u32 f32_to_bf162(float lo, float hi) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
DEVICE u32 half2_sub(u32 a, u32 b) { u32 d; asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEVICE u32 half2_fma(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
DEVICE u32 bf162_fma(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }

/* ---- matrix fragments: c[16 x 8] += a[16 x 16] * b[16 x 8], products exact, sums in f32 ----
   With lane = 4 * g + t: a[0] is row g, a[1] row g + 8, both at k = 2t, 2t + 1; a[2], a[3] the same rows at k + 8.
   b[0] is column g at k = 2t, 2t + 1; b[1] at k + 8. c[0], c[1] are row g, columns 2t, 2t + 1; c[2], c[3] row g + 8. */
DEVICE void matrix_multiply_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void matrix_multiply_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* The same without a sum to begin with: c = a * b. */
DEVICE void matrix_product_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
DEVICE void matrix_product_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/* ---- global memory ---- */
/* For weights: read once, by nobody else, never written while a kernel runs; not kept in L1. Where WEIGHT_LOADS_STAY is defined, the compiler
   doesn't move them over barriers, which it is free to do otherwise. */
#ifdef WEIGHT_LOADS_STAY
#define WEIGHT_LOAD "ld.global.L1::no_allocate"
#define WEIGHT_LOAD_CLOBBERS "memory"
#else
#define WEIGHT_LOAD "ld.global.nc.L1::no_allocate"
#define WEIGHT_LOAD_CLOBBERS
#endif
DEVICE u32x4 load_weights_16(const void *p) {
    u32x4 d;
    asm volatile(WEIGHT_LOAD ".v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(d.v[0]), "=r"(d.v[1]), "=r"(d.v[2]), "=r"(d.v[3]) : "l"(p) : WEIGHT_LOAD_CLOBBERS);
    return d;
}
DEVICE u32x2 load_weights_8(const void *p) {
    u32x2 d;
    asm volatile(WEIGHT_LOAD ".v2.u32 {%0,%1}, [%2];" : "=r"(d.v[0]), "=r"(d.v[1]) : "l"(p) : WEIGHT_LOAD_CLOBBERS);
    return d;
}
DEVICE u32 load_weights_4(const void *p) {
    u32 d;
    asm volatile(WEIGHT_LOAD ".u32 %0, [%1];" : "=r"(d) : "l"(p) : WEIGHT_LOAD_CLOBBERS);
    return d;
}
/* Brings up to PREFETCH_BYTES bytes of weights from p on, aligned to 16, into L2 for a kernel after this one; of `left` bytes
   only whole 16. */
#define PREFETCH_BYTES 4096u
DEVICE void prefetch_weights(const void *p, u64 left) {
    const u32 size = left < PREFETCH_BYTES ? (u32)left & ~15u : PREFETCH_BYTES;
#if __CUDA_ARCH__ >= 900
    if (size) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(size));
#else
    for (u32 at = 0; at < size; at += 128) asm volatile("prefetch.global.L2 [%0];" :: "l"((const u8 *)p + at));
#endif
}
/* For what a kernel before this one wrote, and everything else: ordinary loads. */
DEVICE u32x4 load_16(const void *p) { return *(const u32x4 *)p; }
DEVICE u32x2 load_8(const void *p) { return *(const u32x2 *)p; }
DEVICE u32 load_4(const void *p) { return *(const u32 *)p; }
DEVICE u16 load_2(const void *p) { return *(const u16 *)p; }
DEVICE u8 load_1(const void *p) { return *(const u8 *)p; }
/* For what a kernel further back wrote, read before the one before this has been waited for: from L2, since L1 may hold what
   was there earlier. */
DEVICE u32 load_fresh_4(const void *p) {
    u32 d;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(d) : "l"(p) : "memory");
    return d;
}
DEVICE void store_16(void *p, u32x4 v) { *(u32x4 *)p = v; }
DEVICE void store_8(void *p, u32x2 v) { *(u32x2 *)p = v; }
/* Atomic among all blocks of the device, and orders nothing else. */
DEVICE void global_atomic_add_64(long long *p, long long v) { atomicAdd((u64 *)p, (u64)v); }

/* ---- shared memory ---- */
/* Words i to i + 3 of a SHARED int or u32 array; i is a multiple of 4. */
#define shared_load_4(array, i) (*(const int4 *)&(array)[i])
/* Words i and i + 1; i is even. */
#define shared_load_2(array, i) (*(const int2 *)&(array)[i])
/* Words i and i + 1, or i to i + 3, of a SHARED u32 array; i is a multiple of 2 or 4. */
#define shared_store_2(array, i, value) (*(u32x2 *)&(array)[i] = (value))
#define shared_store_4(array, i, value) (*(u32x4 *)&(array)[i] = (value))
/* Four 8 x 8 matrices of 16-bit numbers from a SHARED u32 array: lane 8m + r names the first word, a multiple of 4, of row r of
   matrix m. d[m] of lane 4g + t is elements 2t and 2t + 1 of row g of matrix m. All 32 lanes take part. */
#define shared_load_matrices(array, i, d) shared_load_matrices_from(&(array)[i], d)
DEVICE void shared_load_matrices_from(const u32 *shared, u32 (&d)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"((u32)__cvta_generic_to_shared(shared)) : "memory");
}
/* Adds to element i of a SHARED int or u32 array, and returns what was there before. Orders nothing else. */
#define shared_atomic_add(array, i, v) atomicAdd(&(array)[i], v)
/* Sets bits of element i of a SHARED u32 array, likewise. */
#define shared_atomic_or(array, i, v) atomicOr(&(array)[i], v)

/* A word of a SHARED u32 array whose address is worked out once, where the compiler would do it at each use; and words from there on,
   whose numbers add up to a multiple of 2 or 4 where so many are taken at once. */
struct shared_place { u32 address; };
#define shared_place_of(array, i) shared_place_at(&(array)[i])
DEVICE shared_place shared_place_at(const u32 *word) {
    shared_place place;
    asm volatile("mov.u32 %0, %1;" : "=r"(place.address) : "r"((u32)__cvta_generic_to_shared(word)));
    return place;
}
/* So many words further on. */
DEVICE shared_place shared_place_after(const shared_place &place, u32 i) { return {place.address + i * 4}; }
DEVICE u32 shared_load_from(const shared_place &from, u32 i) {
    u32 d;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(from.address + i * 4) : "memory");
    return d;
}
DEVICE u32x2 shared_load_2_from(const shared_place &from, u32 i) {
    u32x2 d;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(d.v[0]), "=r"(d.v[1]) : "r"(from.address + i * 4) : "memory");
    return d;
}
DEVICE u32x4 shared_load_4_from(const shared_place &from, u32 i) {
    u32x4 d;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(d.v[0]), "=r"(d.v[1]), "=r"(d.v[2]), "=r"(d.v[3]) : "r"(from.address + i * 4) : "memory");
    return d;
}
DEVICE void shared_store_to(const shared_place &to, u32 i, u32 v) { asm volatile("st.shared.u32 [%0], %1;" :: "r"(to.address + i * 4), "r"(v) : "memory"); }
DEVICE void shared_store_2_to(const shared_place &to, u32 i, u32x2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" :: "r"(to.address + i * 4), "r"(v.v[0]), "r"(v.v[1]) : "memory");
}

/* ---- copies from global to shared memory that go on while the thread does ----
   A thread starts copies, and closes a group of them by a commit. copy_async_wait<N> waits until all groups of this thread
   but its N latest have landed. What landed is the thread's own write: others need a barrier after the wait. Nobody may
   touch the destination before. */
/* 16 bytes to word i and on from a place, of which only the first `size` are read; the others become 0. Or 4 bytes, if `wanted`. Both
   ends are aligned to as many bytes. The 16 aren't kept in L1. Those of copy_async_line_16 belong to whole lines of 128 bytes that are wanted: L2 brings the rest. */
DEVICE void copy_async_16(const shared_place &to, u32 i, const void *p, u32 size) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to.address + i * 4), "l"(p), "r"(size) : "memory");
}
DEVICE void copy_async_line_16(const shared_place &to, u32 i, const void *p, u32 size) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to.address + i * 4), "l"(p), "r"(size) : "memory");
}
DEVICE void copy_async_4(const shared_place &to, u32 i, const void *p, bool wanted) { /* without a branch */
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4; }"
        :: "r"(to.address + i * 4), "l"(p), "r"((u32)wanted) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

/* ---- barriers in shared memory, and copies by the bulk engine: compute capability 9.0 and newer ----
   A barrier is two words of a SHARED u32 array, at an even place. shared_barrier_start, by one thread and before a barrier of the block, says how many arrivals
   end each of its phases; shared_barrier_wait waits for the end of the phase of this parity: 0 for the first, 1 for the second, 0 again. What those who
   arrived did before is then there. A thread that arrives by shared_barrier_expect makes the phase wait for so many bytes, too, which copies bring:
   whole 16 bytes from global memory, both ends aligned to 16. Then they are there for all who wait, and until then nobody touches them; what was there
   has been read before a barrier that whoever copies has waited at. */
#if __CUDA_ARCH__ >= 900
/* True in one lane of the warp, all of whose lanes are there: what that one does alone, the compiler then works out once for all. */
DEVICE bool elect_lane() {
    u32 chosen;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen) :: "memory");
    return chosen != 0;
}
DEVICE void shared_barrier_start(const shared_place &barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;" :: "r"(barrier.address), "r"(arrivals) : "memory");
}
DEVICE void shared_barrier_arrive(const shared_place &barrier, u32 i) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier.address + i * 4) : "memory");
}
DEVICE void shared_barrier_expect(const shared_place &barrier, u32 i, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier.address + i * 4), "r"(bytes) : "memory");
}
DEVICE void shared_barrier_wait(const shared_place &barrier, u32 i, u32 parity) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" :: "r"(barrier.address + i * 4), "r"(parity) : "memory");
}
DEVICE void copy_bulk(const shared_place &to, u32 i, const void *p, u32 bytes, const shared_place &barrier, u32 barrier_i) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to.address + i * 4), "l"(p), "r"(bytes), "r"(barrier.address + barrier_i * 4) : "memory");
}
#endif

/* ---- products by four warps together, a warpgroup, from shared memory: real architecture sm_90a alone ----
   c[64 x N] += a[64 x 16] * b[16 x N], products exact, sums in f32. `a` has 64 weight rows, `b` N rows of activations, each row 64 inputs
   in 128 bytes of a DYNAMIC_SHARED_FOR_PRODUCTS array, where chunk c of 16 bytes lies at place c ^ (row % 8); `a` and `b` name the first word of
   the first row, a multiple of 256 (1024 bytes), plus 8 for each 16 inputs. Warp w of the four has rows 16w to 16w + 15 of c, and of those
   lane 4g + t c[j][0], c[j][1]: row g, columns 8j + 2t and 8j + 2t + 1; c[j][2], c[j][3]: row g + 8.
   They go on while the warps do: warpgroup_begin before the first after anything else that touched c, warpgroup_commit closes a group,
   warpgroup_wait<n> waits for all but the n latest groups, and until then nobody touches c or the shared memory. What any thread has written there, also by
   asynchronous copies, is multiplied after a barrier and, by those who multiply, shared_visible_to_products. */
#if __CUDA_ARCH_FEAT_SM90_ALL
DEVICE void shared_visible_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
/* Registers of a thread from here on: fewer, or more when other warps have given theirs away; a multiple of 8. */
template <u32 N> DEVICE void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }
template <u32 N> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }

#define WARPGROUP_REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WARPGROUP_REGISTERS_32 WARPGROUP_REGISTERS_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WARPGROUP_REGISTERS_48 WARPGROUP_REGISTERS_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WARPGROUP_REGISTERS_64 WARPGROUP_REGISTERS_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WARPGROUP_REGISTERS_80 WARPGROUP_REGISTERS_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WARPGROUP_REGISTERS_96 WARPGROUP_REGISTERS_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WARPGROUP_REGISTERS_112 WARPGROUP_REGISTERS_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WARPGROUP_REGISTERS_128 WARPGROUP_REGISTERS_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WARPGROUP_REGISTERS_144 WARPGROUP_REGISTERS_128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WARPGROUP_REGISTERS_160 WARPGROUP_REGISTERS_144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WARPGROUP_SUMS(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3]), "+f"(c[j + 1][0]), "+f"(c[j + 1][1]), "+f"(c[j + 1][2]), "+f"(c[j + 1][3])
#define WARPGROUP_SUMS_16 WARPGROUP_SUMS(0)
#define WARPGROUP_SUMS_32 WARPGROUP_SUMS_16, WARPGROUP_SUMS(2)
#define WARPGROUP_SUMS_48 WARPGROUP_SUMS_32, WARPGROUP_SUMS(4)
#define WARPGROUP_SUMS_64 WARPGROUP_SUMS_48, WARPGROUP_SUMS(6)
#define WARPGROUP_SUMS_80 WARPGROUP_SUMS_64, WARPGROUP_SUMS(8)
#define WARPGROUP_SUMS_96 WARPGROUP_SUMS_80, WARPGROUP_SUMS(10)
#define WARPGROUP_SUMS_112 WARPGROUP_SUMS_96, WARPGROUP_SUMS(12)
#define WARPGROUP_SUMS_128 WARPGROUP_SUMS_112, WARPGROUP_SUMS(14)
#define WARPGROUP_SUMS_144 WARPGROUP_SUMS_128, WARPGROUP_SUMS(16)
#define WARPGROUP_SUMS_160 WARPGROUP_SUMS_144, WARPGROUP_SUMS(18)
#define WARPGROUP_MULTIPLY(n, a_at, b_at)                                                                                      \
    if constexpr (N == n && MOST >= n / 8) {                                                                                    \
        if (F16) asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" WARPGROUP_REGISTERS_##n "}, %" #a_at ", %" #b_at ", 1, 1, 1, 0, 0;" : WARPGROUP_SUMS_##n : "l"(a), "l"(b)); \
        else asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WARPGROUP_REGISTERS_##n "}, %" #a_at ", %" #b_at ", 1, 1, 1, 0, 0;" : WARPGROUP_SUMS_##n : "l"(a), "l"(b)); \
    }
template <u32 N, bool F16, u32 MOST>
DEVICE void warpgroup_multiply_at(float (&c)[MOST][4], u64 a, u64 b) {
    WARPGROUP_MULTIPLY(16, 8, 9)
    WARPGROUP_MULTIPLY(32, 16, 17)
    WARPGROUP_MULTIPLY(48, 24, 25)
    WARPGROUP_MULTIPLY(64, 32, 33)
    WARPGROUP_MULTIPLY(80, 40, 41)
    WARPGROUP_MULTIPLY(96, 48, 49)
    WARPGROUP_MULTIPLY(112, 56, 57)
    WARPGROUP_MULTIPLY(128, 64, 65)
    WARPGROUP_MULTIPLY(144, 72, 73)
    WARPGROUP_MULTIPLY(160, 80, 81)
}
/* Rows of 128 bytes whose chunks are permuted so, in groups of 8 that are 1024 bytes apart. */
DEVICE u64 warpgroup_descriptor(const u32 *shared) {
    return (u64)(((u32)__cvta_generic_to_shared(shared) & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
#define warpgroup_multiply(N, F16, c, array, a, b) warpgroup_multiply_at<N, F16>(c, warpgroup_descriptor(&(array)[a]), warpgroup_descriptor(&(array)[b]))
#endif

/* An 8 x 8 matrix of 16-bit numbers, of which lane 4g + t has elements 2t and 2t + 1 of row g, transposed. All 32 lanes take part. */
DEVICE u32 matrix_transpose(u32 a) { u32 d; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a)); return d; }
