/*
  amalgamate.c: builds moe_route.h: the public header, then the implementation in one piece, with the kernel sources as
  string literals. Plain C; called by the Makefile:

    amalgamate OUTPUT --public FILE... --private FILE... --kernels FILE... --parts FILE... --licence FILE

  A line #include "name" is replaced by that file the first time when it names a file of --kernels (shared by host and
  kernels) or of --private, and dropped otherwise. The first file of --private is the one that includes the others. Equal inputs give equal output, to the byte.
*/
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The library's own SHA-256 makes the digest that the cache keys hold. */
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "../src/api.h"
#include "../src/internal.h"
#include "../src/sha256.c"

typedef struct text {
    char *data;
    size_t size;
} text;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("amalgamate: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static text read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    text t;
    long size;
    if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < 0) {
        fail("can't read %s", path);
        exit(1);
    }
    rewind(file);
    t.size = (size_t)size;
    t.data = (char *)malloc(t.size + 1);
    if (t.data == NULL || fread(t.data, 1, t.size, file) != t.size) fail("can't read %s", path);
    fclose(file);
    t.data[t.size] = 0;
    if (strlen(t.data) != t.size || strchr(t.data, '\r') != NULL) fail("%s holds a NUL or a carriage return", path);
    if (t.size == 0 || t.data[t.size - 1] != '\n') fail("%s doesn't end with a line feed", path);
    return t;
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

enum { MAX_FILES = 64 };
typedef struct list {
    const char *path[MAX_FILES];
    int included[MAX_FILES];
    int count;
} list;

/* `includes` are two lists. */
static void write_part(FILE *out, const char *path, list *includes) {
    text t = read_file(path);
    const char *line = t.data;
    fprintf(out, "\n/* ---- %s ---- */\n", path);
    while (*line != 0) {
        const char *end = strchr(line, '\n') + 1;
        static const char include[] = "#include \"";
        if (strncmp(line, include, sizeof include - 1) == 0) {
            const char *name = line + sizeof include - 1, *quote = strchr(name, '"');
            char path_named[256];
            int i, l;
            if (quote == NULL || quote > end || (size_t)(quote - name) >= sizeof path_named) fail("%s: malformed #include", path);
            memcpy(path_named, name, (size_t)(quote - name));
            path_named[quote - name] = 0;
            for (l = 0; l < 2; l++)
                for (i = 0; i < includes[l].count; i++)
                    if (strcmp(base_name(includes[l].path[i]), base_name(path_named)) == 0 && !includes[l].included[i]) {
                        includes[l].included[i] = 1;
                        write_part(out, includes[l].path[i], includes);
                    }
        } else {
            fwrite(line, 1, (size_t)(end - line), out);
        }
        line = end;
    }
    free(t.data);
}

/* The text as C string literals of fewer than 4,000 characters, the limit that C99 guarantees being 4,095. */
static void write_literals(FILE *out, const text *t) {
    size_t i, in_piece = 0;
    int open = 0;
    for (i = 0; i < t->size; i++) {
        const char c = t->data[i];
        if (!open) {
            fputs("    \"", out);
            open = 1;
        }
        in_piece++;
        if (c == '\n') {
            const char *next = strchr(t->data + i + 1, '\n');
            const size_t next_line = next != NULL ? (size_t)(next - (t->data + i)) : 0;
            fputs("\\n\"", out);
            open = 0;
            if (next_line > 3000) fail("a line of the kernel sources is too long");
            if (in_piece + next_line > 3900 || i + 1 == t->size) {
                fputs(",\n", out);
                in_piece = 0;
            } else {
                fputc('\n', out);
            }
        } else if (c == '"' || c == '\\' || c == '?') { /* ? so that no trigraph comes about */
            fprintf(out, "\\%c", c);
        } else {
            fputc(c, out);
        }
    }
}

static void write_sources(FILE *out, const list *kernels) {
    moer_sha256 hash;
    unsigned char digest[32];
    int i;
    moer_sha256_begin(&hash);
    fputs("\n/* ---- the kernel sources, as NVRTC gets them ---- */\n", out);
    for (i = 0; i < kernels->count; i++) {
        text t = read_file(kernels->path[i]);
        char head[300];
        snprintf(head, sizeof head, "%s %lu\n", base_name(kernels->path[i]), (unsigned long)t.size);
        moer_sha256_add(&hash, head, strlen(head));
        moer_sha256_add(&hash, t.data, t.size);
        fprintf(out, "static const char *const moer_source_%d[] = { /* %s */\n", i, base_name(kernels->path[i]));
        write_literals(out, &t);
        fputs("    NULL};\n", out);
        free(t.data);
    }
    fputs("static const moer_source moer_sources[] = {\n", out);
    for (i = 0; i < kernels->count; i++) fprintf(out, "    {\"%s\", moer_source_%d},\n", base_name(kernels->path[i]), i);
    fputs("    {NULL, NULL}};\n", out);
    moer_sha256_end(&hash, digest);
    fputs("static const char moer_sources_digest[] = \"", out);
    for (i = 0; i < 32; i++) fprintf(out, "%02x", digest[i]);
    fputs("\";\n", out);
}

int main(int argc, char **argv) {
    list lists[5];
    static const char *const names[5] = {"--public", "--private", "--kernels", "--parts", "--licence"};
    FILE *out;
    int i, current = -1;
    memset(lists, 0, sizeof lists);
    if (argc < 3) fail("usage: amalgamate OUTPUT --public FILE... --private FILE... --kernels FILE... --parts FILE... --licence FILE");
    for (i = 2; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) == 0) {
            for (current = 4; current >= 0 && strcmp(argv[i], names[current]) != 0; current--) {}
            if (current < 0) fail("unknown option %s", argv[i]);
        } else {
            if (current < 0 || lists[current].count == MAX_FILES) fail("no option before %s, or too many files", argv[i]);
            lists[current].path[lists[current].count++] = argv[i];
        }
    }
    out = fopen(argv[1], "wb");
    if (out == NULL) {
        fail("can't write %s", argv[1]);
        return 1;
    }
    for (i = 0; i < lists[0].count; i++) {
        text t = read_file(lists[0].path[i]);
        if (i > 0) fputc('\n', out);
        fwrite(t.data, 1, t.size, out);
        free(t.data);
    }
    fputs("\n#if defined(MOE_ROUTE_IMPLEMENTATION) && !defined(MOE_ROUTE_IMPLEMENTED)\n#define MOE_ROUTE_IMPLEMENTED\n", out);
    if (lists[1].count == 0) fail("no --private");
    lists[1].included[0] = 1;
    write_part(out, lists[1].path[0], &lists[1]);
    for (i = 1; i < lists[1].count; i++)
        if (!lists[1].included[i]) fail("%s includes no %s", lists[1].path[0], lists[1].path[i]);
    write_sources(out, &lists[2]);
    for (i = 0; i < lists[3].count; i++) write_part(out, lists[3].path[i], &lists[1]);
    fputs("\n#endif /* MOE_ROUTE_IMPLEMENTATION */\n", out);
    for (i = 0; i < lists[4].count; i++) {
        text t = read_file(lists[4].path[i]);
        fprintf(out, "\n/*\n%s*/\n", t.data);
        free(t.data);
    }
    if (fclose(out) != 0) fail("can't write %s", argv[1]);
    return 0;
}
