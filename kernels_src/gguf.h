/*
  gguf.h: weights in the blocks of GGUF files, in which codes and scales lie together: 32 values a block (Q4_0, Q4_1, Q5_0,
  Q5_1, Q8_0, IQ4_NL, MXFP4) or 256 (Q2_K to Q6_K, IQ4_XS). What a lane loads of a row in one step of tile.h, and how it
  becomes pairs of 16-bit floats. cpu_gguf.c states the same formats value by value.

  A step is 128 inputs: four blocks, or half a block. Blocks of most types are only aligned to 2 bytes, and lanes load
  nothing that isn't theirs: the accesses are as wide as a lane's piece and its alignment allow. In Q4_K and Q5_K that is 16
  bytes, half of which belongs to the neighbouring lane and is exchanged.

  Every code becomes an unsigned byte first, of which CODE_ZERO is taken away again when it becomes a float.
*/
#include "formats.h"

#define SMALL_BLOCKS (FORMAT != FORMAT_Q2_K && FORMAT != FORMAT_Q3_K && FORMAT != FORMAT_Q4_K && FORMAT != FORMAT_Q5_K && FORMAT != FORMAT_Q6_K && FORMAT != FORMAT_IQ4_XS)
#define BLOCK_VALUES (SMALL_BLOCKS ? 32 : 256)
#define LANE_VALUES 32
#define SUB_HAS_SCALE 1
#define SUB_HAS_MIN (FORMAT == FORMAT_Q4_1 || FORMAT == FORMAT_Q5_1 || FORMAT == FORMAT_Q2_K || FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K)
#define PAIR_ORDER PAIRS_OF_4

/* Bytes of a block; CODES, its nibbles (or bytes), and FIFTH_BITS, where they start; WORDS that a lane loads in a step, codes
   first, then scales; LANE_SUB, values of a lane that share a scale, and LANE_RUN, as in tile.h. */
#if FORMAT == FORMAT_Q4_0 || FORMAT == FORMAT_IQ4_NL
#define BLOCK_BYTES 18
#define CODES 2
#elif FORMAT == FORMAT_Q4_1
#define BLOCK_BYTES 20
#define CODES 4
#elif FORMAT == FORMAT_Q5_0
#define BLOCK_BYTES 22
#define FIFTH_BITS 2
#define CODES 6
#elif FORMAT == FORMAT_Q5_1
#define BLOCK_BYTES 24
#define FIFTH_BITS 4
#define CODES 8
#elif FORMAT == FORMAT_Q8_0
#define BLOCK_BYTES 34
#define CODES 2
#elif FORMAT == FORMAT_GGUF_MXFP4
#define BLOCK_BYTES 17
#define CODES 1
#elif FORMAT == FORMAT_Q2_K
#define BLOCK_BYTES 84
#elif FORMAT == FORMAT_Q3_K
#define BLOCK_BYTES 110
#elif FORMAT == FORMAT_Q4_K
#define BLOCK_BYTES 144
#define CODES 16
#elif FORMAT == FORMAT_Q5_K
#define BLOCK_BYTES 176
#define CODES 48
#elif FORMAT == FORMAT_Q6_K
#define BLOCK_BYTES 210
#elif FORMAT == FORMAT_IQ4_XS
#define BLOCK_BYTES 136
#define CODES 8
#endif

#define CODE_WORDS (FORMAT == FORMAT_Q8_0 ? 8 : FORMAT == FORMAT_Q2_K ? 2 : FORMAT == FORMAT_Q5_K || FORMAT == FORMAT_Q6_K ? 6 : FORMAT == FORMAT_Q5_0 || FORMAT == FORMAT_Q5_1 ? 8 : 4)
#define HEAD_WORDS (FORMAT == FORMAT_Q2_K || FORMAT == FORMAT_Q6_K ? 3 : FORMAT == FORMAT_IQ4_XS ? 2 : 4)
#define LANE_SUB (FORMAT == FORMAT_Q2_K || FORMAT == FORMAT_Q3_K || FORMAT == FORMAT_Q6_K ? 4 : 8)
#define LANE_RUN (FORMAT == FORMAT_Q8_0 || FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K ? 8 : 4)
#define SUBS (LANE_VALUES / LANE_SUB)
#define CHUNK_WORDS (CODE_WORDS + HEAD_WORDS)
#define ROW_HAS_SCALE 0

#define CODE_IS_8_BITS (FORMAT == FORMAT_Q8_0 || FORMAT == FORMAT_IQ4_NL || FORMAT == FORMAT_IQ4_XS)
#define CODE_ZERO (CODE_IS_8_BITS ? 128u : FORMAT == FORMAT_Q6_K ? 32u : FORMAT == FORMAT_Q5_0 || FORMAT == FORMAT_GGUF_MXFP4 ? 16u : FORMAT == FORMAT_Q4_0 ? 8u : FORMAT == FORMAT_Q3_K ? 4u : 0u)

/* As in packed.h: codes are multiplied as they are, or in the mantissa of 128, where no zero is to be taken away again, or where CODE_SUMS says that this is done by the
   sums of the activations. For subs of 16 these would take as many instructions as they save, and more registers. In bf16 there is always a zero, and the other use of those sums, minima, is
   left alone. */
#define CODES_MULTIPLY (TENSOR_CORES && (DECODE == DTYPE_F16 ? CODE_ZERO == 0 || (CODE_SUMS && LANE_SUB == 8) : CODE_SUMS && LANE_SUB == 8 && !CODE_IS_8_BITS && !SUB_HAS_MIN))
#define CODE_SCALE (CODES_MULTIPLY && DECODE == DTYPE_F16 ? 16777216.0f : 1.0f)
#define SUM_FACTOR (!CODES_MULTIPLY ? (DECODE == DTYPE_BF16 ? 0x3f80u : 0x3c00u) : DECODE == DTYPE_BF16 ? 0xc300u | CODE_ZERO : SUB_HAS_MIN ? 0x0001u : 0x8000u | CODE_ZERO)
/* Minima are integers times one number a block: tensor cores multiply them by the sums of the activations, where these are held. */
#define MINS_MULTIPLY (TENSOR_CORES && (FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K))
#define UPPER_CODES (CODES_MULTIPLY && FORMAT == FORMAT_Q4_K) /* in f16 */

#define ROW_BYTES ((u64)INNER / BLOCK_VALUES * BLOCK_BYTES)
/* What an address at a multiple of UNIT in a block is aligned to. */
#define BLOCK_ALIGN(UNIT) (((BLOCK_BYTES | (UNIT) | WEIGHT_ALIGN) & -(BLOCK_BYTES | (UNIT) | WEIGHT_ALIGN)))

struct weight_row { const u8 *data; };

DEVICE weight_row find_weight_row(const moer_weights_args &w, u32 expert, u64 row) {
    weight_row r;
    r.data = (const u8 *)w.data + ((u64)expert * ROWS + row) * ROW_BYTES;
    return r;
}

DEVICE weight_row row_after(const weight_row &row, u32 rows) {
    weight_row r;
    r.data = row.data + rows * ROW_BYTES;
    return r;
}
#define ROWS_ALIKE 1
#define CAN_COPY(parts) 0 /* few blocks are aligned for it */
#define STEPS_TOGETHER(parts) (NUM_STEPS % (parts) == 0)
#define SCALES_FILL_WORDS 0
#define STEP_SCALE_WORDS 0

/* A lane's part of a row's step. Blocks of 32: word i and head i belong to block i of the step; head holds the scale below
   and the minimum above; Q8_0 has two words a block, Q5_0 and Q5_1 a block's fifth bits in word 4 + i. */
struct weight_chunk { u32 word[CODE_WORDS], head[HEAD_WORDS]; };

DEVICE u32 lane_quarter() {
    const u32 t = lane_index() & 3;
    return FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K ? (t >> 1) | (t & 1) << 1 : t;
}

/* BYTES (1, 2 or 4) bytes of a block at a multiple of UNIT, which is known when compiled but for `more`, a multiple of 4. What is above 2 bytes in the word isn't cleared. */
template <u32 BYTES, u32 UNIT>
DEVICE u32 load_block(const u8 *block, u32 offset, u32 more) {
    u32 word[1];
    load_weights<BYTES, BLOCK_ALIGN(UNIT)>(word, block + offset + more, BYTES);
    return word[0];
}
DEVICE u32 block_of_step(u32 step) { return SMALL_BLOCKS ? step * 4 : step / 2; } /* the first */
DEVICE const u8 *block_of(const weight_row &row, u64 index) { return row.data + index * BLOCK_BYTES; }

#ifdef TILES_IN_SHARED
/* A row of a tile in shared memory: its block `first` is `skew` bytes, fewer than 4, and others, known when compiled, from a word. Likewise a block. */
struct shared_row {
    shared_place words;
    u32 skew, first, bytes;
};
struct shared_block {
    shared_place words;
    u32 skew, bytes;
};
DEVICE shared_block block_of(const shared_row &row, u32 index) { return {row.words, row.skew, row.bytes + (index - row.first) * BLOCK_BYTES}; }

/* What doesn't lie in one word is taken from two, the same one twice where it does. Places differ by what is known: few of them are had. */
template <u32 BYTES, u32 UNIT>
DEVICE u32 load_block(const shared_block &block, u32 offset, u32 more) {
    constexpr u32 ALIGN = BLOCK_ALIGN(UNIT);
    const u32 word = (block.bytes + offset) / 4, rest = (block.bytes + offset) % 4 + (ALIGN % 4 == 0 ? 0 : block.skew);
    const u32 first = shared_load_from(shared_place_after(block.words, more / 4 + rest / 4), word);
    if (BYTES == 1) return (first >> rest % 4 * 8) & 255u;
    if (BYTES <= ALIGN) return BYTES == 4 ? first : first >> rest % 4 * 8;
    return select_bytes(first, shared_load_from(shared_place_after(block.words, more / 4 + (rest + BYTES - 1) / 4), word), 0x3210u + 0x1111u * (rest % 4));
}
#endif

#if FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K
/* The lane's codes of half a block: it holds those of two subs in words 0 and 1, and of the others in 2 and 3, at once or when arrange_weight_chunk has exchanged them. */
DEVICE void load_codes(weight_chunk &c, const u8 *block, u32 half) {
    load_weights<16, BLOCK_ALIGN(16)>(c.word, block + CODES + half * 64 + (lane_index() & 3) * 16, 16);
}
DEVICE void load_head(weight_chunk &c, const u8 *block) { load_weights<16, BLOCK_ALIGN(16)>(c.head, block, 16); }
#ifdef TILES_IN_SHARED
DEVICE void load_codes(weight_chunk &c, const shared_block &block, u32 half) {
#pragma unroll
    for (u32 i = 0; i < 4; i += 2) {
        const u32x2 two = shared_load_2_from(shared_place_after(block.words, half * 16 + lane_quarter() * 2), (block.bytes + CODES) / 4 + i * 4);
        c.word[i] = two.v[0];
        c.word[i + 1] = two.v[1];
    }
}
DEVICE void load_head(weight_chunk &c, const shared_block &block) {
    const u32x4 four = shared_load_4_from(block.words, block.bytes / 4);
#pragma unroll
    for (u32 i = 0; i < 4; i++) c.head[i] = four.v[i];
}
#endif
#endif

template <class Row>
DEVICE weight_chunk load_chunk(const Row &row, u32 step, bool inner) {
    const u32 t = lane_index() & 3;
    weight_chunk c;
#if SMALL_BLOCKS
#pragma unroll
    for (u32 i = 0; i < CODE_WORDS; i++) c.word[i] = c.head[i % 4] = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (INNER % STEP != 0 && !inner && step * 4 + i >= INNER / 32) continue;
        const auto block = block_of(row, block_of_step(step) + i);
        c.head[i] = load_block<(FORMAT == FORMAT_GGUF_MXFP4 ? 1 : SUB_HAS_MIN ? 4 : 2), 16>(block, 0, 0);
#if FORMAT == FORMAT_Q8_0
        c.word[i * 2 + 0] = load_block<4, 2>(block, CODES, t * 8);
        c.word[i * 2 + 1] = load_block<4, 2>(block, CODES + 4, t * 8);
#else
        c.word[i] = load_block<4, (CODES | 4)>(block, CODES, t * 4);
#if FORMAT == FORMAT_Q5_0 || FORMAT == FORMAT_Q5_1
        c.word[4 + i] = load_block<4, FIFTH_BITS>(block, FIFTH_BITS, 0);
#endif
#endif
    }
#else
    const auto block = block_of(row, block_of_step(step));
    const u32 half = step % 2;
#if FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K
    load_codes(c, block, half);
    load_head(c, block);
#if FORMAT == FORMAT_Q5_K
    c.word[4] = load_block<4, 8>(block, 16, lane_quarter() * 8);
    c.word[5] = load_block<4, 4>(block, 20, lane_quarter() * 8);
#endif
#elif FORMAT == FORMAT_IQ4_XS
#pragma unroll
    for (u32 i = 0; i < 4; i++) c.word[i] = load_block<4, 4>(block, CODES + i * 16, half * 64 + t * 4);
    c.head[0] = load_block<4, 16>(block, 0, 0);
    c.head[1] = load_block<4, 4>(block, 4, 0);
#else /* subs of 16: the lane's four of the first and of the second 16 */
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#if FORMAT == FORMAT_Q6_K
        c.word[i] = load_block<4, 4>(block, i * 16, half * 64 + t * 4);
        c.word[2 + i] = load_block<4, 4>(block, 32 + i * 16, half * 64 + t * 4);
        c.word[4 + i] = load_block<4, 4>(block, 128 + i * 16, half * 32 + t * 4);
        c.head[i] = load_block<4, 4>(block, 192 + i * 4, half * 8);
#elif FORMAT == FORMAT_Q3_K
        c.word[i] = load_block<4, 4>(block, 32 + i * 16, half * 32 + t * 4);
        c.word[2 + i] = load_block<4, 4>(block, i * 16, t * 4);
        c.head[i] = load_block<4, 4>(block, 96 + i * 4, 0);
#else
        c.word[i] = load_block<4, 4>(block, 16 + i * 16, half * 32 + t * 4);
        c.head[i] = load_block<4, 4>(block, i * 4, half * 8);
#endif
    }
#if FORMAT == FORMAT_Q6_K
    c.head[2] = load_block<2, 2>(block, 208, 0);
#elif FORMAT == FORMAT_Q3_K
    c.head[2] = load_block<4, 4>(block, 104, 0);
    c.head[3] = load_block<2, 2>(block, 108, 0);
#else
    c.head[2] = load_block<4, 4>(block, 80, 0);
#endif
#endif
#endif
    return c;
}

DEVICE weight_chunk load_weight_chunk(const weight_row &row, u32 step, bool inner) { return load_chunk(row, step, inner); }

/* Q4_K and Q5_K: lanes 0 and 1 hold the codes of subs 0 and 1, the others those of 2 and 3. */
DEVICE void arrange_weight_chunk(weight_chunk &c) {
#ifndef TILES_IN_SHARED
    if (FORMAT != FORMAT_Q4_K && FORMAT != FORMAT_Q5_K) return;
    exchange_words<2>(c.word[0], c.word[2 % CODE_WORDS]);
    exchange_words<2>(c.word[1], c.word[3 % CODE_WORDS]);
#else
    (void)c;
#endif
}

DEVICE float low_half(u32 word) { return f16_to_f32((u16)word); }
DEVICE float high_half(u32 word) { return f16_to_f32((u16)(word >> 16)); }

/* A scale times what byte `index` of a word has above `zero`: exact, and cheaper than a conversion, by way of 256 + byte / 128. */
DEVICE float scaled_byte(float scale, u32 word, u32 index, u32 zero) {
    const float larger = f32_mul(scale, 128.0f);
    return f32_fma(larger, f32_from_bits(select_bytes(word, in_register(0x43800000u), 0x7604u + 0x10u * index)), f32_mul(larger, -256.0f - (float)zero * 0.0078125f));
}

/* Products of an f16 and a small integer: exact. Of weights times 2^-4 with `upper`, in Q4_K. */
DEVICE float find_sub_scale(const weight_chunk &c, u32 step, u32 sub, bool upper) {
#if FORMAT == FORMAT_GGUF_MXFP4
    return moer_e8m0_half(c.head[sub]);
#elif SMALL_BLOCKS
    return low_half(c.head[sub]);
#elif FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K
    const float scale = upper ? f32_mul(low_half(c.head[0]), 0.0625f) : low_half(c.head[0]);
    return scaled_byte(scale, moer_k_scales(c.head[1], c.head[3], step % 2), sub, 0);
#elif FORMAT == FORMAT_Q6_K
    return scaled_byte(low_half(c.head[2]), c.head[sub / 4] ^ 0x80808080u, sub % 4, 128);
#elif FORMAT == FORMAT_Q2_K
    return scaled_byte(low_half(c.head[2]), c.head[sub / 4] & 0x0f0f0f0fu, sub % 4, 0);
#elif FORMAT == FORMAT_Q3_K
    return scaled_byte(low_half(c.head[3]), moer_q3_k_scales(c.head[sub / 4], c.head[2], step % 2, sub / 4), sub % 4, 32);
#else
    return f32_mul(low_half(c.head[0]), (float)moer_iq4_xs_scale(c.head[1], c.head[0] >> 16, step % 2 * 4 + sub));
#endif
}

DEVICE float sub_scale(const weight_chunk &c, u32 step, u32 sub) { return find_sub_scale(c, step, sub, false); }
/* Of the codes of unpack_codes. */
DEVICE float code_scale(const weight_chunk &c, u32 step, u32 sub) { return find_sub_scale(c, step, sub, UPPER_CODES && sub % 2 == 1); }

DEVICE float sub_min(const weight_chunk &c, u32 step, u32 sub) {
#if FORMAT == FORMAT_Q4_1 || FORMAT == FORMAT_Q5_1
    return high_half(c.head[sub]);
#elif FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K
    return scaled_byte(-high_half(c.head[0]), moer_k_mins(c.head[2], c.head[3], step % 2), sub, 0);
#elif FORMAT == FORMAT_Q2_K
    return scaled_byte(-high_half(c.head[2]), (c.head[sub / 4] >> 4) & 0x0f0f0f0fu, sub % 4, 0);
#else
    return 0.0f;
#endif
}

#if MINS_MULTIPLY
/* A lane's sub of a step is that of its number: that sub's minimum over min_scale, twice as bf16. */
DEVICE u32 min_pair(const weight_chunk &c, u32 step) {
    return bf162_fma(select_bytes(moer_k_mins(c.head[2], c.head[3], step % 2), 0x43434343u, 0x4040u + 0x0101u * (lane_index() & 3)), 0x3f803f80u, 0xc300c300u);
}
DEVICE float min_scale(const weight_chunk &c) { return -high_half(c.head[0]); }
#endif

DEVICE float row_scale(const weight_row &) { return 1.0f; }

/* The codes in bits 0 to 7 and 16 to 23 as floats, less CODE_ZERO. */
DEVICE u32 byte_pair(u32 codes) {
    if (DECODE == DTYPE_F16) return half2_sub(and_or(codes, 0x00ff00ffu, 0x64006400u), CODE_ZERO * 0x10001u + 0x64006400u);
    if (!CODE_IS_8_BITS) return bf162_fma(and_or(codes, 0x007f007fu, 0x43004300u), 0x3f803f80u, CODE_ZERO * 0x10001u + 0xc300c300u);
    return f32_to_bf162(f32_add(f32_from_bits((codes & 255u) | 0x4b000000u), f32_from_bits(0xcb000000u + CODE_ZERO)),
                        f32_add(f32_from_bits(((codes >> 16) & 255u) | 0x4b000000u), f32_from_bits(0xcb000000u + CODE_ZERO)));
}

#if FORMAT == FORMAT_IQ4_NL || FORMAT == FORMAT_IQ4_XS || FORMAT == FORMAT_GGUF_MXFP4
/* The table's bytes, CODE_ZERO added, for four nibbles. */
DEVICE u32 look_up(u32 nibbles) {
#if FORMAT == FORMAT_GGUF_MXFP4
    const u32 table[4] = {0x13121110u, 0x1c181614u, 0x0d0e0f10u, 0x04080a0cu};
#else
    const u32 table[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};
#endif
    const u32 lower = select_bytes(table[0], table[1], nibbles & 0x7777u), upper = select_bytes(table[2], table[3], nibbles & 0x7777u);
    return select_bytes(lower, upper, 0x3210u | ((nibbles & 0x8888u) >> 1));
}
#endif

/* Four bits, each in bit 4 of a byte. */
DEVICE u32 fifth_bits(u32 bits) { return (((bits & 15u) * 0x00204081u) & 0x01010101u) << 4; }

/* A sub's codes, a byte each. */
DEVICE void unpack_bytes(const weight_chunk &c, u32 step, u32 sub, u32 (&codes)[LANE_SUB / 4]) {
#if FORMAT == FORMAT_Q8_0
    codes[0] = c.word[sub * 2] ^ 0x80808080u;
    codes[1] = c.word[sub * 2 + 1] ^ 0x80808080u;
#elif FORMAT == FORMAT_IQ4_NL || FORMAT == FORMAT_IQ4_XS || FORMAT == FORMAT_GGUF_MXFP4
    const u32 first = look_up(c.word[sub] & 0xffffu), second = look_up(c.word[sub] >> 16);
    codes[0] = select_bytes(first, second, 0x6420);
    codes[1] = select_bytes(first, second, 0x7531);
#elif SMALL_BLOCKS
    codes[0] = c.word[sub] & 0x0f0f0f0fu;
    codes[1] = (c.word[sub] >> 4) & 0x0f0f0f0fu;
#if FORMAT == FORMAT_Q5_0 || FORMAT == FORMAT_Q5_1
    codes[0] |= fifth_bits(c.word[4 + sub] >> (lane_quarter() * 4));
    codes[1] |= fifth_bits(c.word[4 + sub] >> (16 + lane_quarter() * 4));
#endif
#elif FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        codes[i] = (c.word[sub / 2 * 2 + i] >> (sub % 2 * 4)) & 0x0f0f0f0fu;
#if FORMAT == FORMAT_Q5_K
        codes[i] |= ((c.word[4 + i] >> (step % 2 * 4 + sub)) & 0x01010101u) << 4;
#endif
    }
#elif FORMAT == FORMAT_Q6_K
    codes[0] = ((c.word[sub / 2 % 2 * 2 + sub % 2] >> (sub / 4 * 4)) & 0x0f0f0f0fu) | ((c.word[4 + sub % 2] >> (sub / 2 * 2)) & 0x03030303u) << 4;
#elif FORMAT == FORMAT_Q3_K
    codes[0] = ((c.word[sub % 2] >> (sub / 2 * 2)) & 0x03030303u) | ((c.word[2 + sub % 2] >> (step % 2 * 4 + sub / 2)) & 0x01010101u) << 2;
#else
    codes[0] = (c.word[sub % 2] >> (sub / 2 * 2)) & 0x03030303u;
#endif
}

DEVICE void unpack_sub(const weight_chunk &c, u32 step, u32 sub, u32 (&pair)[LANE_SUB / 2]) {
    u32 codes[LANE_SUB / 4];
    unpack_bytes(c, step, sub, codes);
#pragma unroll
    for (u32 i = 0; i < LANE_SUB / 4; i++) {
        pair[i * 2] = byte_pair(codes[i]);
        pair[i * 2 + 1] = byte_pair(codes[i] >> 8);
    }
}

/* The same with CODE_ZERO: as f16 subnormals, code * 2^-24, Q4_K's upper codes where they are, times 2^-20; or 128 more, in bf16. */
DEVICE u32 code_pair(u32 codes, u32 mask) { return DECODE == DTYPE_BF16 ? and_or(codes, mask, 0x43004300u) : codes & mask; }
DEVICE void unpack_codes(const weight_chunk &c, u32 step, u32 sub, u32 (&pair)[LANE_SUB / 2]) {
    u32 codes[LANE_SUB / 4];
    if (!UPPER_CODES) unpack_bytes(c, step, sub, codes);
#pragma unroll
    for (u32 i = 0; i < LANE_SUB / 4; i++) {
        const u32 bytes = UPPER_CODES ? c.word[(sub / 2 * 2 + i) % CODE_WORDS] : codes[i], mask = !UPPER_CODES ? 0x00ff00ffu : sub % 2 == 1 ? 0x00f000f0u : 0x000f000fu;
        pair[i * 2] = code_pair(bytes, mask);
        pair[i * 2 + 1] = code_pair(bytes >> 8, mask);
    }
}
