/*
  sha256.c: SHA-256 as FIPS 180-4 defines it, for cache keys and for checking entries. Every cubin that is
  read is hashed, some 20 to 100 KB for each variant of a layer, which is most of what a warm start costs: so the eight state
  words keep their places in registers, and the rounds take turns in what they call them.
*/
#include "internal.h"

static const uint32_t moer_sha256_constants[64] = {
    0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
    0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
    0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
    0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
    0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
    0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
    0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
    0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u};

static uint32_t moer_rotate_right(uint32_t value, unsigned bits) {
    return (value >> bits) | (value << (32 - bits));
}

/* One round: with a to h the state's words, only d and h change. */
static void moer_sha256_round(uint32_t a, uint32_t b, uint32_t c, uint32_t *d, uint32_t e, uint32_t f, uint32_t g, uint32_t *h, uint32_t added) {
    uint32_t s1 = moer_rotate_right(e, 6) ^ moer_rotate_right(e, 11) ^ moer_rotate_right(e, 25);
    uint32_t s0 = moer_rotate_right(a, 2) ^ moer_rotate_right(a, 13) ^ moer_rotate_right(a, 22);
    uint32_t t1 = *h + s1 + ((e & f) ^ (~e & g)) + added;
    *d += t1;
    *h = t1 + s0 + ((a & b) ^ (a & c) ^ (b & c));
}

/* One block of 64 bytes. */
static void moer_sha256_block(uint32_t state[8], const unsigned char *block) {
    uint32_t words[64], a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
    size_t i;
    for (i = 0; i < 16; i++) {
        words[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
                   (uint32_t)block[4 * i + 3];
    }
    for (i = 16; i < 64; i++) {
        uint32_t x = words[i - 15], y = words[i - 2];
        uint32_t s0 = moer_rotate_right(x, 7) ^ moer_rotate_right(x, 18) ^ (x >> 3);
        uint32_t s1 = moer_rotate_right(y, 17) ^ moer_rotate_right(y, 19) ^ (y >> 10);
        words[i] = words[i - 16] + s0 + words[i - 7] + s1;
    }
    for (i = 0; i < 64; i++) words[i] += moer_sha256_constants[i];
    for (i = 0; i < 64; i += 8) {
        moer_sha256_round(a, b, c, &d, e, f, g, &h, words[i]);
        moer_sha256_round(h, a, b, &c, d, e, f, &g, words[i + 1]);
        moer_sha256_round(g, h, a, &b, c, d, e, &f, words[i + 2]);
        moer_sha256_round(f, g, h, &a, b, c, d, &e, words[i + 3]);
        moer_sha256_round(e, f, g, &h, a, b, c, &d, words[i + 4]);
        moer_sha256_round(d, e, f, &g, h, a, b, &c, words[i + 5]);
        moer_sha256_round(c, d, e, &f, g, h, a, &b, words[i + 6]);
        moer_sha256_round(b, c, d, &e, f, g, h, &a, words[i + 7]);
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
}

static void moer_sha256_begin(moer_sha256 *hash) {
    static const uint32_t initial[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                        0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    memcpy(hash->state, initial, sizeof initial);
    hash->length = 0;
}

static void moer_sha256_add(moer_sha256 *hash, const void *data, size_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    while (size > 0) {
        size_t used = (size_t)(hash->length % 64), count = 64 - used;
        if (used == 0 && size >= 64) { /* a whole block, where it is */
            moer_sha256_block(hash->state, bytes);
            hash->length += 64;
            bytes += 64;
            size -= 64;
            continue;
        }
        if (count > size) count = size;
        memcpy(hash->block + used, bytes, count);
        hash->length += count;
        bytes += count;
        size -= count;
        if (used + count == 64) moer_sha256_block(hash->state, hash->block);
    }
}

static void moer_sha256_end(moer_sha256 *hash, unsigned char digest[32]) {
    static const unsigned char padding[64] = {0x80};
    uint64_t bits = hash->length * 8;
    size_t used = (size_t)(hash->length % 64);
    unsigned char length[8];
    unsigned i;
    for (i = 0; i < 8; i++) length[i] = (unsigned char)(bits >> (56 - 8 * i));
    moer_sha256_add(hash, padding, used < 56 ? 56 - used : 120 - used);
    moer_sha256_add(hash, length, 8);
    for (i = 0; i < 32; i++) digest[i] = (unsigned char)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
}
