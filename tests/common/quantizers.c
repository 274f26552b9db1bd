// Stands for libggml-base in tests: each value of a block takes as many whole bits as the block's bytes have room for.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct traits {
    const char *name;
    int64_t block, interleave;
    size_t bytes;
    bool is_quantized;
    void (*to_float)(const void *, float *, int64_t);
};

static int get_bits(const uint8_t *bytes, size_t at, size_t n) {
    int value = 0;
    for (size_t i = at; i < at + n; i++) value = value << 1 | (bytes[i / 8] >> i % 8 & 1);
    return value;
}

// values from -1 to 1
static void read_blocks(const uint8_t *from, float *to, int64_t n, int64_t block, size_t bytes) {
    size_t bits = 8 * bytes / block;
    for (int64_t i = 0; i < n; i++) {
        int value = get_bits(from + i / block * bytes, i % block * bits, bits);
        to[i] = 2.0f * value / ((1 << bits) - 1) - 1.0f;
    }
}

#define READER(name, block, bytes) \
    static void name(const void *from, float *to, int64_t n) { read_blocks(from, to, n, block, bytes); }
READER(read_q4_0, 32, 18)
READER(read_q5_0, 32, 22)
READER(read_q8_0, 32, 34)
READER(read_q4_k, 256, 144)
READER(read_q6_k, 256, 210)

static const struct traits TYPES[64] = {
    [2] = {"q4_0", 32, 0, 18, true, read_q4_0},
    [6] = {"q5_0", 32, 0, 22, true, read_q5_0},
    [8] = {"q8_0", 32, 0, 34, true, read_q8_0},
    [12] = {"q4_K", 256, 0, 144, true, read_q4_k},
    [14] = {"q6_K", 256, 0, 210, true, read_q6_k},
};

const struct traits *ggml_get_type_traits(int type) { return &TYPES[type]; }

bool ggml_quantize_requires_imatrix(int type) { return (void) type, false; }

void ggml_quantize_init(int type) { (void) type; }

size_t ggml_quantize_chunk(int type, const float *from, void *to, int64_t start, int64_t rows, int64_t columns, const float *weights) {
    (void) start, (void) weights;
    const struct traits *t = &TYPES[type];
    size_t bits = 8 * t->bytes / t->block, all = rows * columns / t->block * t->bytes;
    uint8_t *out = memset(to, 0, all);
    for (int64_t i = 0; i < rows * columns; i++) {
        float scaled = (from[i] + 1.0f) / 2.0f * ((1 << bits) - 1) + 0.5f;
        int value = scaled < 0.0f ? 0 : scaled > (1 << bits) - 1 ? (1 << bits) - 1 : (int) scaled;
        for (size_t bit = 0; bit < bits; bit++) {
            size_t at = i % t->block * bits + bit;
            out[i / t->block * t->bytes + at / 8] |= (value >> (bits - 1 - bit) & 1) << at % 8;
        }
    }
    return all;
}
