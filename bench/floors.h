/*
  floors.h: what a GPU can't do faster, measured in the run that is compared with it: an empty kernel as one node of a graph,
  and the read of given chunks of memory by plain 16-byte loads. The two kernels are PTX text, which the driver compiles:
  no compiler is needed. Include examples/gpu.h first.
*/
#ifndef BENCH_FLOORS_H
#define BENCH_FLOORS_H

/* read_chunks: thread i of all reads vectors i, i + threads, ... of the chunks' vectors, four at a time. Chunk c starts at
   address chunks[c] and has 2^shift vectors of 16 bytes. What was read decides on a write that doesn't happen. */
static const char floors_ptx[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry empty() { ret; }\n"
    ".visible .entry read_chunks(.param .u64 p_chunks, .param .u32 p_total, .param .u32 p_shift, .param .u64 p_out) {\n"
    "  .reg .pred %load0, %load1, %load2, %load3, %go, %write;\n"
    "  .reg .u32 %i0, %i1, %i2, %i3, %stride, %total, %shift, %mask, %c, %v, %t, %sum;\n"
    "  .reg .u32 %x<16>;\n"
    "  .reg .u64 %chunks, %out, %a, %o, %b0, %b1, %b2, %b3;\n"
    "  ld.param.u64 %chunks, [p_chunks]; ld.param.u32 %total, [p_total]; ld.param.u32 %shift, [p_shift]; ld.param.u64 %out, [p_out];\n"
    "  mov.u32 %t, %ctaid.x; mov.u32 %v, %ntid.x; mov.u32 %c, %tid.x; mad.lo.u32 %i0, %t, %v, %c;\n"
    "  mov.u32 %t, %nctaid.x; mul.lo.u32 %stride, %t, %v;\n"
    "  mov.u32 %t, 1; shl.b32 %mask, %t, %shift; sub.u32 %mask, %mask, 1; mov.u32 %sum, 0;\n"
    "again:\n"
    "  setp.lt.u32 %load0, %i0, %total; @!%load0 bra done;\n"
    "  add.u32 %i1, %i0, %stride; add.u32 %i2, %i1, %stride; add.u32 %i3, %i2, %stride;\n"
    "  setp.lt.u32 %load1, %i1, %total; setp.lt.u32 %load2, %i2, %total; setp.lt.u32 %load3, %i3, %total;\n"
#define FLOORS_ADDRESS(n) \
    "  shr.u32 %c, %i" n ", %shift; and.b32 %v, %i" n ", %mask; mul.wide.u32 %o, %c, 8; add.u64 %a, %chunks, %o;\n" \
    "  @%load" n " ld.global.u64 %b" n ", [%a]; mul.wide.u32 %o, %v, 16; @%load" n " add.u64 %b" n ", %b" n ", %o;\n"
#define FLOORS_LOAD(n, a, b, c, d) \
    "  mov.u32 %x" a ", 0; mov.u32 %x" b ", 0; mov.u32 %x" c ", 0; mov.u32 %x" d ", 0;\n" \
    "  @%load" n " ld.global.cs.v4.u32 {%x" a ", %x" b ", %x" c ", %x" d "}, [%b" n "];\n"
#define FLOORS_SUM(a, b, c, d) "  xor.b32 %sum, %sum, %x" a "; xor.b32 %sum, %sum, %x" b "; xor.b32 %sum, %sum, %x" c "; xor.b32 %sum, %sum, %x" d ";\n"
    FLOORS_ADDRESS("0") FLOORS_ADDRESS("1") FLOORS_ADDRESS("2") FLOORS_ADDRESS("3")
    FLOORS_LOAD("0", "0", "1", "2", "3") FLOORS_LOAD("1", "4", "5", "6", "7") FLOORS_LOAD("2", "8", "9", "10", "11") FLOORS_LOAD("3", "12", "13", "14", "15")
    FLOORS_SUM("0", "1", "2", "3") FLOORS_SUM("4", "5", "6", "7") FLOORS_SUM("8", "9", "10", "11") FLOORS_SUM("12", "13", "14", "15")
    "  add.u32 %i0, %i3, %stride; bra again;\n"
    "done:\n"
    "  setp.eq.u32 %write, %sum, 305419896; @%write st.global.u32 [%out], %sum;\n"
    "  ret;\n}\n";
#undef FLOORS_ADDRESS
#undef FLOORS_LOAD
#undef FLOORS_SUM

typedef struct floors {
    gpu_module module;
    gpu_kernel empty, read_chunks;
    gpu_address out;
} floors;

/* 0, or a CUDA error. */
GPU_FUNCTION int floors_open(floors *f, gpu_device *gpu) {
    int result = gpu_module_load(gpu, &f->module, floors_ptx);
    if (!result) result = gpu_module_kernel(gpu, f->module, "empty", &f->empty);
    if (!result) result = gpu_module_kernel(gpu, f->module, "read_chunks", &f->read_chunks);
    if (!result) result = gpu_alloc(gpu, &f->out, 4);
    return result;
}

GPU_FUNCTION void floors_close(floors *f, gpu_device *gpu) {
    gpu_free(gpu, f->out);
    gpu_module_unload(gpu, f->module);
}

GPU_FUNCTION int floors_empty(const floors *f, gpu_device *gpu, gpu_stream stream) {
    return gpu_launch(gpu, f->empty, 1, 32, stream, NULL);
}

/* Reads `count` chunks of 16 << shift bytes; their addresses are at `chunks`. 528 blocks of 256 threads read fastest on an H200. */
GPU_FUNCTION int floors_read(const floors *f, gpu_device *gpu, gpu_address chunks, uint32_t count, uint32_t shift, gpu_stream stream) {
    gpu_address list = chunks, out = f->out;
    uint32_t total = count << shift, bits = shift;
    void *arguments[4];
    arguments[0] = &list;
    arguments[1] = &total;
    arguments[2] = &bits;
    arguments[3] = &out;
    return gpu_launch(gpu, f->read_chunks, 528, 256, stream, arguments);
}

#endif /* BENCH_FLOORS_H */
