/*
  The conversions of 16-bit floats, all 65536 of them: widened by each of the two, then narrowed again.
*/
#include "device.h"
struct sample_args { u32 *from_f16, *from_bf16; u16 *to_f16, *to_bf16; u32 *packed; };

KERNEL(sample, 256, sample_args) {
    const u32 i = block_index_x() * block_threads() + thread_index();
    const float f16 = f16_to_f32((u16)i), bf16 = bf16_to_f32((u16)i);
    a.from_f16[i] = f32_bits(f16);
    a.from_bf16[i] = f32_bits(bf16);
    a.to_f16[i] = f32_to_f16(f16);
    a.to_bf16[i] = f32_to_bf16(bf16);
    a.packed[i] = block_index_y() == 0 ? f32_to_half2(f16, bf16) : f32_to_bf162(f16, bf16);
}
