/*
  arrays.h: numbers from files: NumPy's .npy, or the bare values. Files are strangers': sizes and headers are checked before
  anything is used. Include options.h and examples/quantize.h first.
*/
#ifndef ARRAYS_H
#define ARRAYS_H

typedef struct array { /* freed with free(values) */
    float *values;
    size_t rows, columns; /* rows 0: the file doesn't say, there are `columns` numbers in all */
} array;

#define ARRAY_BYTES_MAX ((size_t)1 << 31)

static unsigned char *array_read(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    size_t room = 1 << 16;
    unsigned char *bytes = (unsigned char *)malloc(room);
    *size = 0;
    if (!file) stop(STATUS_FILE, "%s can't be read: %s", path, strerror(errno));
    while (bytes) {
        unsigned char *grown;
        *size += fread(bytes + *size, 1, room - *size, file);
        if (*size < room) break;
        if (room >= ARRAY_BYTES_MAX) stop(STATUS_FILE, "%s has more than 2 GiB", path);
        room *= 2;
        grown = (unsigned char *)realloc(bytes, room);
        if (!grown) free(bytes);
        bytes = grown;
    }
    if (!bytes) stop(STATUS_FILE, "%s is too large for this machine's memory", path);
    if (ferror(file)) stop(STATUS_FILE, "%s can't be read: %s", path, strerror(errno));
    fclose(file);
    return bytes;
}

/* What follows `key` in the header, a Python dictionary as NumPy writes it. */
static const char *array_header_value(const char *path, const char *header, const char *key) {
    const char *at = strstr(header, key);
    if (!at) stop(STATUS_FILE, "%s: its .npy header has no %s", path, key);
    at += strlen(key);
    while (*at == ' ' || *at == ':') at++;
    return at;
}

/* The header of `length` bytes: the type of the values, and the shape of one or two dimensions. */
static quantize_dtype array_parse_header(const char *path, const unsigned char *bytes, size_t length, array *a) {
    char header[1024], *end;
    const char *at;
    unsigned long long sizes[2];
    int count = 0, is_f16;
    if (length >= sizeof header)
        stop(STATUS_FILE, "%s: its .npy header has %lu bytes, more than any matrix needs", path, (unsigned long)length);
    memcpy(header, bytes, length);
    header[length] = 0;
    at = array_header_value(path, header, "'descr'");
    is_f16 = strncmp(at, "'<f2'", 5) == 0;
    if (!is_f16 && strncmp(at, "'<f4'", 5) != 0)
        stop(STATUS_FILE, "%s holds %.8s; needed is '<f4' or '<f2': array.astype(numpy.float32)", path, at);
    if (strncmp(array_header_value(path, header, "'fortran_order'"), "False", 5) != 0)
        stop(STATUS_FILE, "%s is in Fortran's order; needed is C's: numpy.ascontiguousarray(array)", path);
    at = array_header_value(path, header, "'shape'");
    if (*at != '(') stop(STATUS_FILE, "%s: its .npy header has no shape", path);
    for (at++; *at && *at != ')'; at = end) {
        while (*at == ' ' || *at == ',') at++;
        if (*at == ')') break;
        if (*at < '0' || *at > '9' || count == 2) stop(STATUS_FILE, "%s has another shape than [tokens, experts]", path);
        sizes[count++] = strtoull(at, &end, 10);
        if (sizes[count - 1] > ARRAY_BYTES_MAX) stop(STATUS_FILE, "%s: its .npy header names a size of %.12s", path, at);
    }
    if (count == 0) stop(STATUS_FILE, "%s holds a single number", path);
    a->rows = count == 2 ? (size_t)sizes[0] : 1;
    a->columns = (size_t)sizes[count - 1];
    return is_f16 ? QUANTIZE_F16 : QUANTIZE_F32;
}

/* `type` is of bare values; a .npy file has its own. */
static void array_load(const char *path, quantize_dtype type, array *a) {
    size_t size, start = 0, count, i;
    unsigned char *bytes = array_read(path, &size);
    memset(a, 0, sizeof *a);
    if (size >= 10 && memcmp(bytes, "\x93NUMPY", 6) == 0) {
        size_t length = (size_t)bytes[8] | (size_t)bytes[9] << 8;
        start = 10;
        if (bytes[6] >= 2 && size >= 12) {
            length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
            start = 12;
        }
        if (bytes[6] < 1 || bytes[6] > 3 || length > size - start)
            stop(STATUS_FILE, "%s is a damaged .npy file, or one of a later version", path);
        type = array_parse_header(path, bytes + start, length, a);
        start += length;
        count = (size - start) / quantize_dtype_size(type);
        if ((size - start) % quantize_dtype_size(type) != 0 ||
            (a->columns ? count % a->columns != 0 || count / a->columns != a->rows : count != 0))
            stop(STATUS_FILE, "%s is damaged: its header says %lu x %lu, but there are %lu bytes of values", path,
                 (unsigned long)a->rows, (unsigned long)a->columns, (unsigned long)(size - start));
    } else {
        count = size / quantize_dtype_size(type);
        if (size % quantize_dtype_size(type) != 0)
            stop(STATUS_FILE, "%s has %lu bytes, which isn't a whole number of %lu-byte values", path, (unsigned long)size,
                 (unsigned long)quantize_dtype_size(type));
        a->columns = count;
    }
    if (count == 0) stop(STATUS_FILE, "%s holds no numbers", path);
    a->values = (float *)allocate(count, sizeof *a->values);
    for (i = 0; i < count; i++) { /* byte by byte: the header need not end where a number may begin */
        unsigned char value[4] = {0, 0, 0, 0};
        memcpy(value, bytes + start + i * quantize_dtype_size(type), quantize_dtype_size(type));
        if (type == QUANTIZE_F32)
            a->values[i] = float_from_bits((uint32_t)value[0] | (uint32_t)value[1] << 8 | (uint32_t)value[2] << 16 |
                                           (uint32_t)value[3] << 24);
        else
            a->values[i] = type == QUANTIZE_F16 ? f16_to_float((uint16_t)(value[0] | value[1] << 8))
                                                : bf16_to_float((uint16_t)(value[0] | value[1] << 8));
    }
    free(bytes);
}

#endif /* ARRAYS_H */
