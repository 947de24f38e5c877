/*
  packed.h: weights in rows of equally wide codes, with scales and zero points in arrays of their own: F32, F16, BF16, INT8,
  INT4, FP8, MXFP4, NVFP4. What a lane loads of a row in one step of tile.h, and how it becomes pairs of 16-bit floats.

  A step is 64 bytes of a row; lane t loads bytes 16t to 16t + 15. Where a group is longer than a step, or a row has one
  scale, that is all. Shorter groups: a matrix fragment adds up what four lanes hold, which then has to belong to one group.
  Each lane needs a fourth of every group (a "sub"): with two or four groups it loads them as pieces of 8 or 4 bytes, with eight the
  four lanes exchange words until each holds its fourths.

  Constants, beside tile.h's: GROUP, inputs that share a scale, 0: one scale a row; GROUP_ROWS, rows that share a scale;
  SCALES, dtype of the scales, also E8M0 and E4M3; SCALE_ALIGN, bytes that the scales of every row are aligned to;
  ZERO_POINTS, 1: given, in the form of the codes; SIGNED, 1: codes and zero points are two's complement; GLOBAL, a global
  scale: none (0), one (1), by expert (2), by expert and half of its rows (3), by expert and parity of the row (4); CODE_SUMS, 1: codes
  with a zero are multiplied as they are, GGUF's, too (0 where it isn't defined). A matrix has the same in all of its kernels, whose sums are the same bits.
*/
#include "formats.h"

#define SCALES_E8M0 4
#define SCALES_E4M3 5

#define WEIGHT_BITS (FORMAT == FORMAT_F32 ? 32 : FORMAT == FORMAT_F16 || FORMAT == FORMAT_BF16 ? 16 : FORMAT == FORMAT_INT8 || FORMAT == FORMAT_FP8 ? 8 : 4)
#define QUANTIZED (WEIGHT_BITS <= 8)
#define FOUR_BIT_FLOATS (FORMAT == FORMAT_MXFP4 || FORMAT == FORMAT_NVFP4)
#define LANE_VALUES (128 / WEIGHT_BITS)
#define SUBS (GROUP != 0 && GROUP / 4 < LANE_VALUES ? LANE_VALUES * 4 / GROUP : 1)
#define LANE_SUB (LANE_VALUES / SUBS)
#define PIECES (SUBS == 2 || SUBS == 4 ? SUBS : 1)
#define LANE_RUN LANE_SUB
#define SUB_HAS_SCALE (GROUP != 0)
#define SUB_HAS_MIN 0
#define PAIR_ORDER (WEIGHT_BITS != 4 ? PAIRS_LINEAR : LANE_SUB == 4 ? PAIRS_OF_4 : PAIRS_OF_8)
#define CHUNK_WORDS (4 + (GROUP != 0 ? (SUBS * SCALE_BYTES + 3) / 4 : 0) + ZERO_POINTS)
#define ROW_HAS_SCALE (GLOBAL || (QUANTIZED && GROUP == 0))

#define NUM_GROUPS (GROUP != 0 ? (INNER + GROUP - 1) / (GROUP != 0 ? GROUP : 1) : 1)
#define SCALE_ROWS ((ROWS + GROUP_ROWS - 1) / GROUP_ROWS)
#define SCALE_BYTES (SCALES == DTYPE_F32 ? 4 : SCALES == SCALES_E8M0 || SCALES == SCALES_E4M3 ? 1 : 2)
#define ROW_BYTES ((u64)INNER * WEIGHT_BITS / 8)
#define ZERO_POINT_ROW_BYTES (WEIGHT_BITS == 4 ? (NUM_GROUPS + 1) / 2 : NUM_GROUPS)
/* In unsigned codes, without zero points. */
#define USUAL_ZERO_POINT (WEIGHT_BITS == 4 ? 8u : 128u)

struct weight_row {
    const u8 *data, *scales, *zero_points;
    const float *global_scale;
};

DEVICE weight_row find_weight_row(const moer_weights_args &w, u32 expert, u64 row) {
    const u64 index = (u64)expert * ROWS + row;
    weight_row r;
    r.data = (const u8 *)w.data + index * ROW_BYTES;
    r.scales = QUANTIZED ? (const u8 *)w.scales + ((u64)expert * SCALE_ROWS + row / GROUP_ROWS) * NUM_GROUPS * SCALE_BYTES : 0;
    r.zero_points = ZERO_POINTS ? (const u8 *)w.zero_points + index * ZERO_POINT_ROW_BYTES : 0;
    r.global_scale = GLOBAL < 2 ? w.global_scales : w.global_scales + (GLOBAL == 2 ? expert : expert * 2 + (GLOBAL == 3 ? row >= ROWS / 2 : row % 2));
    return r;
}

/* The row that comes so many rows after; not where rows share scales. */
DEVICE weight_row row_after(const weight_row &row, u32 rows) {
    weight_row r = row;
    r.data += rows * ROW_BYTES;
    r.scales += (u64)rows * NUM_GROUPS * SCALE_BYTES;
    r.zero_points += (u64)rows * ZERO_POINT_ROW_BYTES;
    return r;
}
#define ROWS_ALIKE (GROUP_ROWS == 1 && GLOBAL < 3)

/* A lane's part of a row's step, as it lies in memory. */
struct weight_chunk {
    u32 word[4];
    u32 scale[(SUBS * SCALE_BYTES + 3) / 4];
    u32 zero_point[1]; /* INT8: bytes; INT4: nibbles */
};

/* The first group of a step, and where its scales are in their row. */
DEVICE u64 first_group(u64 step) { return GROUP == 0 ? 0 : SUBS > 1 ? step * SUBS : step * STEP / (GROUP != 0 ? GROUP : 1); }
DEVICE u64 scales_at(u64 step) { return first_group(step) * SCALE_BYTES; }

/* The scales of a step's groups; 0 for those past the row, of which an inner step has none. */
DEVICE void load_scales(u32 (&word)[(SUBS * SCALE_BYTES + 3) / 4], const u8 *scales, u64 group, bool inner) {
    constexpr u32 BYTES = SUBS * SCALE_BYTES, ALIGN = SCALE_ALIGN < BYTES ? SCALE_ALIGN : BYTES;
    const u8 *p = scales + group * SCALE_BYTES;
    if (NUM_GROUPS % SUBS == 0 && ALIGN >= (BYTES < 4 ? BYTES : 4)) {
        load_weights<BYTES, ALIGN>(word, p, BYTES);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < (BYTES + 3) / 4; i++) word[i] = 0;
#pragma unroll
    for (u32 i = 0; i < SUBS; i++)
        if (NUM_GROUPS % SUBS == 0 || inner || group + i < NUM_GROUPS) {
            const u32 scale = SCALE_BYTES == 4 ? load_weights_4(p + i * SCALE_BYTES) : SCALE_BYTES == 2 ? load_2(p + i * SCALE_BYTES) : load_1(p + i * SCALE_BYTES);
            word[i * SCALE_BYTES / 4] |= scale << (i * SCALE_BYTES % 4 * 8);
        }
}

DEVICE weight_chunk load_weight_chunk(const weight_row &row, u64 step, bool inner) {
    weight_chunk c;
#pragma unroll
    for (u32 piece = 0; piece < PIECES; piece++) {
        constexpr u32 BYTES = 16 / PIECES;
        const u64 at = step * 64 + (lane_index() & 3) * BYTES + piece * (64 / PIECES); /* from the row's start */
        u32 word[BYTES / 4];
        if (ROW_BYTES % BYTES != 0 && !inner) {
            load_weights<BYTES, WEIGHT_ALIGN>(word, row.data + at, at < ROW_BYTES ? (u32)(ROW_BYTES - at) : 0);
        } else if (ROW_BYTES % 64 == 0 || inner || at < ROW_BYTES) { /* a piece is all there, or none of it */
            load_weights<BYTES, WEIGHT_ALIGN>(word, row.data + at, BYTES);
        } else {
#pragma unroll
            for (u32 i = 0; i < BYTES / 4; i++) word[i] = 0;
        }
#pragma unroll
        for (u32 i = 0; i < BYTES / 4; i++) c.word[piece * (BYTES / 4) + i] = word[i];
    }
    if (GROUP != 0) load_scales(c.scale, row.scales, first_group(step), inner);
    if (ZERO_POINTS) {
        const u64 group = first_group(step);
        const u64 first = WEIGHT_BITS == 4 ? group / 2 : group;
        load_weights<(WEIGHT_BITS == 4 ? (SUBS + 1) / 2 : SUBS), 1>(c.zero_point, row.zero_points + first, first < ZERO_POINT_ROW_BYTES ? (u32)(ZERO_POINT_ROW_BYTES - first) : 0);
        if (WEIGHT_BITS == 4 && SUBS == 1) c.zero_point[0] >>= group % 2 * 4;
        if (SIGNED) c.zero_point[0] ^= WEIGHT_BITS == 4 ? 0x88888888u : 0x80808080u;
    }
    return c;
}

/* A step of 16 rows in shared memory, for stream.h: the low rows' 64 bytes each, the high rows', then a word or two of scales by
   row. Scales that don't fill words are copied with what is beside them, but nothing past the row. */
#define STEP_SCALE_BYTES (GROUP != 0 ? SUBS * SCALE_BYTES : 0)
#define SCALES_FILL_WORDS (SCALE_ALIGN >= 4 && STEP_SCALE_BYTES % 4 == 0)
#define STEP_SCALE_WORDS (SCALES_FILL_WORDS || STEP_SCALE_BYTES <= SCALE_ALIGN ? (STEP_SCALE_BYTES + 3) / 4 : (STEP_SCALE_BYTES + 6) / 4)
#define STEP_WORDS (256 + 16 * STEP_SCALE_WORDS)
/* A warp's steps have their scales at the same place in words. */
#define STEPS_TOGETHER(parts) (NUM_STEPS % (parts) == 0 && (GROUP == 0 || (SUBS > 1 && SUBS * SCALE_BYTES % 4 == 0)))
#define STEPS_KEEP_WORDS(parts) (STEPS_TOGETHER(parts) || SCALES_FILL_WORDS || (SUBS > 1 ? (parts) * SUBS * SCALE_BYTES % 4 == 0 : GROUP != 0 && (parts) * STEP % (4 * GROUP) == 0))
/* They lie in the row where its first step and the distance to it say, scales_at(first) + scales_at(steps): where steps share a group,
   the warp steps over whole groups. */
#define STEPS_KEEP_GROUPS(parts) (STEPS_TOGETHER(parts) || (parts) == 1 || GROUP == 0 || SUBS > 1 || (parts) * STEP % (GROUP != 0 ? GROUP : 1) == 0)
#define CAN_COPY(parts) (TENSOR_CORES && STEPS_KEEP_WORDS(parts) && WEIGHT_ALIGN == 16 && INNER * WEIGHT_BITS % 128 == 0 && !ZERO_POINTS && STEP_SCALE_WORDS <= 2)

/* What a lane copies of a warp's first step in two rows, and how it finds its own scales beside others. */
struct copy_source {
    const u8 *low, *high, *scales;
    u32 low_scales, high_scales; /* selectors of bytes */
};

/* Lane 4g + t copies bytes 16t to 16t + 15 of rows g and g + 8, and a word of scales: word t / 2 of the low row if t is even. */
DEVICE copy_source find_copy_source(const weight_row &low, const weight_row &high, u32 first_step) {
    const u32 t = lane_index() & 3;
    copy_source s;
    s.low = low.data + first_step * 64 + t * 16;
    s.high = high.data + first_step * 64 + t * 16;
    const u8 *const low_scales = low.scales + scales_at(first_step), *const high_scales = high.scales + scales_at(first_step);
    s.scales = t % 2 ? high_scales : low_scales;
    if (!SCALES_FILL_WORDS) s.scales -= (u64)s.scales & 3;
    s.scales += t / 2 * 4;
    s.low_scales = 0x3210u + 0x1111u * ((u32)(u64)low_scales & 3);
    s.high_scales = 0x3210u + 0x1111u * ((u32)(u64)high_scales & 3);
    return s;
}

/* So many rows later, where that leaves words of scales words. */
#define ROWS_KEEP_WORDS(rows) (STEP_SCALE_BYTES == 0 || (rows) * NUM_GROUPS * SCALE_BYTES % 4 == 0)
DEVICE copy_source copy_source_after(const copy_source &source, u32 rows) {
    copy_source s = source;
    s.low += rows * ROW_BYTES;
    s.high += rows * ROW_BYTES;
    s.scales += (u64)rows * NUM_GROUPS * SCALE_BYTES;
    return s;
}

/* Whether the words of scales of a warp's step `index` are the row's to their end. The second of two may begin with the next
   step's, which then has to be whole. */
#define NEXT_SCALES_TOO (!SCALES_FILL_WORDS && STEP_SCALE_WORDS == 2 && NUM_GROUPS % SUBS != 0)
template <u32 PARTS>
DEVICE bool has_whole_scales(u32 index) {
    return STEPS_TOGETHER(PARTS) ? index + 1 + NEXT_SCALES_TOO < PART_STEPS(PARTS) : (index + 1) * PARTS + NEXT_SCALES_TOO < NUM_STEPS;
}

/* Where 16 bytes of row g lie among its 64. Where a lane takes several pieces out again, rows differ, against bank conflicts. */
DEVICE u32 swizzled(u32 g, u32 chunk) { return PIECES == 2 ? chunk ^ (g & 2) : PIECES == 4 ? chunk ^ (g >> 1 & 3) : chunk; }

/* A lane's places in its warp's steps, of the first: to copy to, and to take its own part of the low row from. */
struct copy_places {
    shared_place data, scales, pieces[PIECES], own_scales;
};

template <class Words>
DEVICE copy_places find_copy_places(Words &words, u32 at) {
    const u32 t = lane_index() & 3, g = lane_index() >> 2;
    copy_places p;
    p.data = shared_place_of(words, at + g * 16 + swizzled(g, t) * 4);
#pragma unroll
    for (u32 piece = 0; piece < PIECES; piece++)
        p.pieces[piece] = shared_place_of(words, at + g * 16 + (PIECES == 2 ? swizzled(g, piece * 2 + t / 2) * 4 + t % 2 * 2 : PIECES == 4 ? swizzled(g, piece) * 4 + t : t * 4));
    p.scales = shared_place_of(words, at + (STEP_SCALE_WORDS ? 256 + t / 2 * 16 + t % 2 * 8 + g : 0));
    p.own_scales = shared_place_of(words, at + (STEP_SCALE_WORDS ? 256 + g : 0));
    return p;
}

/* Copies the step that comes `steps` after the warp's first, to so many words from its places. */
DEVICE void copy_step(const copy_places &places, u32 at, const copy_source &s, u32 first_step, u32 steps, bool inner, bool whole_scales) {
    const u32 t = lane_index() & 3;
    const u32 size = INNER * WEIGHT_BITS % 512 == 0 || inner || ((u64)first_step + steps) * 64 + t * 16 < ROW_BYTES ? 16 : 0;
    copy_async_line_16(places.data, at, s.low + steps * 64, size);
    copy_async_line_16(places.data, at + 128, s.high + steps * 64, size);
    if (STEP_SCALE_WORDS == 0) return;
    const u8 *const p = s.scales + scales_at(steps);
    const bool wanted = t / 2 < STEP_SCALE_WORDS;
    if (whole_scales || (NUM_GROUPS % SUBS == 0 && SCALES_FILL_WORDS)) return copy_async_4(places.scales, at, p, wanted);
    const u32 begin = (u32)scales_at((u64)first_step + steps) + t / 2 * 4, skew = (t % 2 ? s.high_scales : s.low_scales) & 3, end = NUM_GROUPS * SCALE_BYTES + skew;
    copy_async_4(places.scales, at, p, wanted && begin + 4 <= end);
    if (!wanted || begin + 4 <= end) return;
    u32 bytes = 0; /* nothing past the row */
#pragma unroll
    for (u32 i = 0; i < 3; i++)
        if (begin + i < end) bytes |= (u32)load_1(p + i) << (8 * i);
    shared_store_to(places.scales, at, bytes);
}

/* A piece of a lane's part of a row, from shared memory. */
DEVICE void fetch_piece(weight_chunk &c, u32 piece, const shared_place &place, u32 from) {
    if (PIECES == 2) {
        const u32x2 two = shared_load_2_from(place, from);
        c.word[piece * 2 % 4] = two.v[0];
        c.word[(piece * 2 + 1) % 4] = two.v[1];
    } else if (PIECES == 4) {
        c.word[piece] = shared_load_from(place, from);
    } else {
        const u32x4 four = shared_load_4_from(place, from);
#pragma unroll
        for (u32 i = 0; i < 4; i++) c.word[i] = four.v[i];
    }
}

/* A lane's part of its low (half 0) or high (half 1) row. */
DEVICE weight_chunk fetch_chunk(const copy_places &places, u32 at, u32 half, const copy_source &s) {
    weight_chunk c = {};
#pragma unroll
    for (u32 piece = 0; piece < PIECES; piece++) fetch_piece(c, piece, places.pieces[piece], at + half * 128);
    if (STEP_SCALE_WORDS) {
        const u32 first = shared_load_from(places.own_scales, at + half * 8), second = STEP_SCALE_WORDS == 2 ? shared_load_from(places.own_scales, at + 16 + half * 8) : 0;
        c.scale[0] = SCALES_FILL_WORDS ? first : select_bytes(first, second, half ? s.high_scales : s.low_scales);
        if (SCALES_FILL_WORDS && STEP_SCALE_WORDS == 2) c.scale[STEP_SCALE_WORDS - 1] = second;
    }
    return c;
}

/* The fourth of a group that lane t has after arrange_weight_chunk. */
DEVICE u32 lane_quarter() {
    const u32 t = lane_index() & 3;
    return SUBS == 8 ? (t >> 1) | (t & 1) << 1 : t;
}

/* Gives every lane its fourth of each sub: SUBS 2 (loaded so): sub s is words 2s and 2s + 1; 4 (loaded so): word s; 8: half s % 2 of word s / 2. */
DEVICE void arrange_weight_chunk(weight_chunk &c) {
    if (SUBS != 8) return;
    exchange_words<1>(c.word[0], c.word[1]);
    exchange_words<1>(c.word[2], c.word[3]);
    exchange_words<2>(c.word[0], c.word[2]);
    exchange_words<2>(c.word[1], c.word[3]);
#pragma unroll
    for (u32 i = 0; i < 4; i += 2) { /* lanes 0 and 1 hold even subs, 2 and 3 odd ones: the same again, in halves of words */
        u32 low = select_bytes(c.word[i], c.word[i + 1], 0x5410), high = select_bytes(c.word[i], c.word[i + 1], 0x7632);
        exchange_words<2>(low, high);
        c.word[i] = select_bytes(low, high, 0x5410);
        c.word[i + 1] = select_bytes(low, high, 0x7632);
    }
}

DEVICE float sub_scale(const weight_chunk &c, u32, u32 sub) {
    const u32 word = c.scale[sub * SCALE_BYTES / 4] >> (sub * SCALE_BYTES % 4 * 8);
    if (SCALES == DTYPE_F32) return f32_from_bits(word);
    if (SCALES == SCALES_E8M0) return moer_e8m0(word & 255);
    if (SCALES == SCALES_E4M3) return moer_e4m3(word & 255);
    return SCALES == DTYPE_F16 ? f16_to_f32((u16)word) : bf16_to_f32((u16)word);
}

DEVICE float code_scale(const weight_chunk &c, u32 step, u32 sub) { return sub_scale(c, step, sub); }
DEVICE float sub_min(const weight_chunk &, u32, u32) { return 0.0f; }

#define SCALES_ARE_EXPONENTS (SUB_HAS_SCALE && SCALES == SCALES_E8M0)
/* E8M0 is the exponent of an f32, but for 0 and 255. Whether a row's step has one of these, so that the others are had by a shift. */
DEVICE bool has_odd_scales(const weight_chunk &c) {
    u32 odd = 0;
#pragma unroll
    for (u32 i = 0; i < (SUBS * SCALE_BYTES + 3) / 4; i++) {
        const u32 w = SUBS * SCALE_BYTES < 4 ? c.scale[i] | 0x01010101u << (SUBS * SCALE_BYTES * 8 % 32) : c.scale[i];
        odd |= ((w - 0x01010101u) & ~w) | ((~w - 0x01010101u) & w);
    }
    return (odd & 0x80808080u) != 0;
}
DEVICE float even_scale(const weight_chunk &c, u32 sub) {
    const u32 w = c.scale[sub / 4];
    return f32_from_bits((sub % 4 == 3 ? w >> 1 : w << (23 - sub % 4 * 8)) & 0x7f800000u);
}

/* What every weight of a row is multiplied by, once the sum is there. */
DEVICE float row_scale(const weight_row &row) {
    if (GLOBAL) return load_value(row.global_scale, 0, DTYPE_F32);
    return QUANTIZED && GROUP == 0 ? load_value(row.scales, 0, SCALES) : 1.0f;
}

#if FORMAT == FORMAT_F32 || FORMAT == FORMAT_F16 || FORMAT == FORMAT_BF16

/* The pairs are those of memory. */
DEVICE void unpack_sub(const weight_chunk &c, u32, u32, u32 (&pair)[LANE_SUB / 2]) {
#pragma unroll
    for (u32 i = 0; i < LANE_SUB / 2; i++) pair[i] = c.word[i];
}

DEVICE void unpack_sub_values(const weight_chunk &c, u32, u32, float (&value)[LANE_SUB]) {
#pragma unroll
    for (u32 i = 0; i < LANE_SUB; i++) {
        if (FORMAT == FORMAT_F32) value[i] = f32_from_bits(c.word[i % 4]);
        else value[i] = FORMAT == FORMAT_F16 ? f16_to_f32((u16)(c.word[i / 2 % 4] >> (16 * (i % 2)))) : bf16_to_f32((u16)(c.word[i / 2 % 4] >> (16 * (i % 2))));
    }
}

#else

/* Two codes of four bits, one in the low bits of each half of `codes`, as floats. They stand in the mantissa of 1024 (f16)
   or 128 (bf16), from which 1024 or 128 and the zero point are taken away: exact. */
DEVICE u32 int4_pair(u32 codes, u32 zero_point) {
    if (DECODE == DTYPE_F16) return half2_sub(and_or(codes, 0x000f000fu, 0x64006400u), zero_point * 0x10001u + 0x64006400u);
    return bf162_fma(and_or(codes, 0x000f000fu, 0x43004300u), 0x3f803f80u, zero_point * 0x10001u + 0xc300c300u);
}

/* The same for the bits above those: in f16 they can stay where they are, as 1024 + 16 q, and are divided by 16. */
DEVICE u32 int4_upper_pair(u32 codes, u32 zero_point) {
    if (DECODE == DTYPE_F16) return half2_fma(and_or(codes, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero_point * 0x100010u + 0xd400d400u);
    return int4_pair(codes >> 4, zero_point);
}

/* E2M1: the exponent is put where a 16-bit float has its own, then corrected by a power of two. Subnormals come out right. */
DEVICE u32 fp4_pair(u32 codes) {
    const u32 sign = (codes << 12) & 0x80008000u;
    if (DECODE == DTYPE_F16) return half2_fma(and_or(codes << 9, 0x0e000e00u, sign), 0x74007400u, 0x80008000u); /* * 2^14 */
    return bf162_fma(and_or(codes << 6, 0x01c001c0u, sign), 0x7e807e80u, 0x80008000u);                          /* * 2^126 */
}

/* E4M3 likewise; the code is the upper byte of each half. All ones would come out as 480, and become NaN. */
DEVICE u32 fp8_pair(u32 codes) {
    const u32 sign = codes & 0x80008000u;
    const u32 all_ones = ((codes & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    const u32 pair = DECODE == DTYPE_F16 ? half2_fma(and_or(codes >> 1, 0x3f803f80u, sign), 0x5c005c00u, 0x80008000u)  /* * 2^8 */
                                         : bf162_fma(and_or(codes >> 4, 0x07f007f0u, sign), 0x7b807b80u, 0x80008000u); /* * 2^120 */
    return pair | (all_ones - (all_ones >> 15));
}

/* f16 has subnormals, and tensor cores multiply them exactly: a code of four bits is one as it is, code * 2^-24, or four bits further up
   code * 2^-20, and E2M1 is one in the place of the lowest bits of the exponent, times 2^-14. So nothing but masks is needed; what
   the codes lack of their weights, in CODE_SCALE, is made up for once a tile. In bf16, whose subnormals are too small for the sums, a code stands in the mantissa of 128. INT4's zero
   point, and that 128, are made up for by the sums of the activations: so it pays where these are held (CODE_SUMS). */
#define CODES_MULTIPLY (TENSOR_CORES && SUB_HAS_SCALE && LANE_SUB >= 8 && !ZERO_POINTS && (FOUR_BIT_FLOATS ? DECODE == DTYPE_F16 : FORMAT == FORMAT_INT4 && CODE_SUMS))
#define CODE_SCALE (!CODES_MULTIPLY || DECODE == DTYPE_BF16 ? 1.0f : FORMAT == FORMAT_INT4 ? 16777216.0f : 16384.0f)
#define CODE_ZERO (FORMAT == FORMAT_INT4 ? USUAL_ZERO_POINT : 0u)
#define SUM_FACTOR ((DECODE == DTYPE_BF16 ? 0xc300u : 0x8000u) | CODE_ZERO)

/* The codes of sub `sub` in the order PAIR_ORDER; INT4 in f16: even pairs times 2^-24, odd ones times 2^-20. */
DEVICE void unpack_codes(const weight_chunk &c, u32, u32 sub, u32 (&pair)[LANE_SUB / 2]) {
#pragma unroll
    for (u32 i = 0; i < LANE_SUB / 8; i++) {
        u32 w = c.word[sub * (LANE_SUB / 8) + i];
        if (FORMAT == FORMAT_INT4) {
            if (SIGNED) w ^= 0x88888888u;
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                if (DECODE == DTYPE_BF16) pair[(i * 4 + j) % (LANE_SUB / 2)] = and_or(w >> (4 * j), 0x000f000fu, 0x43004300u);
                else pair[(i * 4 + j) % (LANE_SUB / 2)] = (j < 2 ? w : w >> 8) & (j % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
            continue;
        }
        /* Each code's sign and the rest of it go to their places by two shifts, and a mask takes both. Shifts to the left are multiplications elsewhere than in the ALUs, which are
           the limit here; so the compiler mustn't exchange shifts and masks. */
        const u32 lower = and_or(w, 0x0f0f0f0fu, 0), upper = and_or(w, 0xf0f0f0f0u, 0);
        pair[i * 4 % (LANE_SUB / 2)] = or_and(lower << 12, lower << 9, 0x8e008e00u);
        pair[(i * 4 + 1) % (LANE_SUB / 2)] = or_and(upper << 8, upper << 5, 0x8e008e00u);
        pair[(i * 4 + 2) % (LANE_SUB / 2)] = or_and(lower << 4, lower << 1, 0x8e008e00u);
        pair[(i * 4 + 3) % (LANE_SUB / 2)] = or_and(upper, upper >> 3, 0x8e008e00u);
    }
}

/* The lane's weights of sub `sub` as pairs of 16-bit floats of type DECODE, in the order PAIR_ORDER. */
DEVICE void unpack_sub(const weight_chunk &c, u32, u32 sub, u32 (&pair)[LANE_SUB / 2]) {
    u32 zero_point = USUAL_ZERO_POINT;
    if (ZERO_POINTS) zero_point = WEIGHT_BITS == 4 ? (c.zero_point[0] >> (4 * sub)) & 15u : (c.zero_point[0] >> (8 * sub)) & 255u;
#pragma unroll
    for (u32 i = 0; i < (LANE_SUB * WEIGHT_BITS + 31) / 32; i++) {
        u32 w = c.word[LANE_SUB * WEIGHT_BITS < 32 ? sub / 2 : sub * (LANE_SUB * WEIGHT_BITS / 32) + i];
#if FORMAT == FORMAT_INT8
        if (SIGNED) w ^= 0x80808080u;
        if (DECODE == DTYPE_F16) {
            pair[i * 2 + 0] = half2_sub(select_bytes(w, 0x64646464u, 0x4140), zero_point * 0x10001u + 0x64006400u);
            pair[i * 2 + 1] = half2_sub(select_bytes(w, 0x64646464u, 0x4342), zero_point * 0x10001u + 0x64006400u);
        } else { /* through the mantissa of 2^23: bf16 has no room for eight bits and the one before them */
            float q[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) q[j] = f32_add(f32_from_bits(select_bytes(w, 0x4b000000u, 0x7440u + j)), f32_from_bits(0xcb000000u + zero_point));
            pair[i * 2 + 0] = f32_to_bf162(q[0], q[1]);
            pair[i * 2 + 1] = f32_to_bf162(q[2], q[3]);
        }
#elif FORMAT == FORMAT_FP8
        pair[i * 2 + 0] = fp8_pair(select_bytes(w, 0, 0x1404));
        pair[i * 2 + 1] = fp8_pair(select_bytes(w, 0, 0x3424));
#else
        if (SIGNED) w ^= 0x88888888u;
        if (LANE_SUB == 4) { /* the four nibbles of two bytes, a byte in each half: pairs (0, 2) and (1, 3) */
            w = select_bytes(w, 0, sub % 2 == 0 ? 0x4140 : 0x4342);
            pair[0] = FOUR_BIT_FLOATS ? fp4_pair(w) : int4_pair(w, zero_point);
            pair[1] = FOUR_BIT_FLOATS ? fp4_pair(w >> 4) : int4_upper_pair(w, zero_point);
        } else { /* eight nibbles: pairs (0, 4), (1, 5), (2, 6), (3, 7) */
#pragma unroll
            for (u32 j = 0; j < 4; j += 2) {
                pair[(i * 4 + j) % (LANE_SUB / 2)] = FOUR_BIT_FLOATS ? fp4_pair(w >> (4 * j)) : int4_pair(w >> (4 * j), zero_point);
                pair[(i * 4 + j + 1) % (LANE_SUB / 2)] = FOUR_BIT_FLOATS ? fp4_pair(w >> (4 * j + 4)) : int4_upper_pair(w >> (4 * j), zero_point);
            }
        }
#endif
    }
}

#endif
