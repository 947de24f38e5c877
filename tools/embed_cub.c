/*
  embed_cub.c: builds dist/moe_route.h: moe_route.h with the headers of CUB that its kernels include, packed into string literals, and the
  notices of their licences. Plain C; called by the Makefile:

    embed_cub OUTPUT moe_route.h CCCL LICENCE...

  CCCL is the folder that holds cub/, cuda/, nv/ and thrust/. The headers are those that the kernels' #include <cub/...> lead to, by every #include
  line whether its condition holds or not: so they are right for every NVRTC and architecture. Comments go, and lines stay where they were,
  since macros make names of __LINE__. What src/cub_embedded.c unpacks is described there. Equal inputs give equal output, to the byte.
*/
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct text {
    char *data;
    size_t size, room;
} text;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("embed_cub: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static void *grow(void *memory, size_t size) {
    void *grown = realloc(memory, size);
    if (grown == NULL) fail("out of memory");
    return grown;
}

static void add(text *t, const char *data, size_t size) {
    if (t->size + size + 1 > t->room) {
        t->room = (t->size + size + 1) * 2;
        t->data = (char *)grow(t->data, t->room);
    }
    memcpy(t->data + t->size, data, size);
    t->size += size;
    t->data[t->size] = 0;
}

static void add_character(text *t, char c) { add(t, &c, 1); }

static void add_line(text *t, const char *format, const char *word) {
    char line[512];
    snprintf(line, sizeof line, format, word);
    add(t, line, strlen(line));
    add_character(t, '\n');
}

static int read_file(const char *path, text *t) {
    FILE *file = fopen(path, "rb");
    char block[65536];
    size_t size;
    memset(t, 0, sizeof *t);
    if (file == NULL) return 0;
    add(t, "", 0);
    while ((size = fread(block, 1, sizeof block, file)) > 0) {
        size_t i;
        for (i = 0; i < size; i++)
            if (block[i] != '\r') add_character(t, block[i]);
    }
    if (ferror(file)) fail("can't read %s", path);
    fclose(file);
    if (strlen(t->data) != t->size) fail("%s holds a NUL", path);
    return 1;
}

/* ---- the headers, each once, in the order in which they are met ---- */

typedef struct header {
    char *name;
    text source;
} header;
static header *headers;
static size_t num_headers;

/* Takes the header unless it was taken before. 0: there is no such file, as for those of host compilers. */
static int take_header(const char *folder, const char *name) {
    char path[4096];
    text source;
    size_t i;
    for (i = 0; i < num_headers; i++)
        if (strcmp(headers[i].name, name) == 0) return 1;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) fail("the path of %s is too long", name);
    if (!read_file(path, &source)) return 0;
    headers = (header *)grow(headers, (num_headers + 1) * sizeof *headers);
    headers[num_headers].name = (char *)grow(NULL, strlen(name) + 1);
    strcpy(headers[num_headers].name, name);
    headers[num_headers++].source = source;
    return 1;
}

/* Takes what the lines #include <name> of a text name, if `prefix` begins it. */
static void take_included(const char *folder, const char *source, const char *prefix) {
    const char *line, *next;
    for (line = source; *line; line = next) {
        const char *end;
        char name[256];
        next = strchr(line, '\n');
        next = next != NULL ? next + 1 : line + strlen(line);
        line += strspn(line, " \t\"");
        if (*line++ != '#') continue;
        line += strspn(line, " \t");
        if (strncmp(line, "include", 7) != 0) continue;
        line += 7 + strspn(line + 7, " \t");
        end = strchr(line, '>');
        if (*line != '<' || end == NULL || end > next || (size_t)(end - line) >= sizeof name) continue;
        memcpy(name, line + 1, (size_t)(end - line) - 1);
        name[end - line - 1] = 0;
        if (strncmp(name, prefix, strlen(prefix)) == 0) take_header(folder, name);
    }
}

/* Wrappers of single PTX instructions that CUB's block primitives have no use for: empty, a fifth of NVRTC's time is saved.
   tests/test_dist.sh shows that the code stays the same. */
static int is_unneeded(const char *name) {
    static const char folder[] = "cuda/__ptx/instructions/generated/";
    static const char *const instructions[] = {"cp_", "ld.", "multimem_", "st.", "tcgen05_", "tensormap_"};
    size_t i;
    if (strncmp(name, folder, sizeof folder - 1) != 0) return 0;
    for (i = 0; i < sizeof instructions / sizeof *instructions; i++)
        if (strncmp(name + sizeof folder - 1, instructions[i], strlen(instructions[i])) == 0) return 1;
    return 0;
}

/* ---- a header's text without comments ---- */

typedef struct reader {
    const char *at;
    size_t newlines; /* that comments held, and that come behind the line: a directive goes on behind a comment of several lines */
    text out;
} reader;

static void copy(reader *r, size_t size) {
    add(&r->out, r->at, size);
    r->at += size;
}

static void copy_quoted(reader *r, char quote) {
    copy(r, 1);
    while (*r->at && *r->at != quote && *r->at != '\n') copy(r, r->at[0] == '\\' && r->at[1] ? 2 : 1);
    if (*r->at == quote) copy(r, 1);
}

static void copy_raw_string(reader *r, const char *name) { /* R"mark( ... )mark" */
    const char *open = strchr(r->at, '('), *end;
    char mark[32];
    const size_t size = open != NULL ? (size_t)(open - r->at) - 2 : 0;
    if (open == NULL || size > 16) fail("%s: malformed raw string", name);
    snprintf(mark, sizeof mark, ")%.*s\"", (int)size, r->at + 2);
    end = strstr(open, mark);
    if (end == NULL) fail("%s: a raw string has no end", name);
    copy(r, (size_t)(end - r->at) + strlen(mark));
}

/* One space for any white space and comments; none at the start of a line and before its end. */
static void skip_blank(reader *r, const char *name) {
    const char last = r->out.size ? r->out.data[r->out.size - 1] : '\n';
    for (;;) {
        if (*r->at == ' ' || *r->at == '\t') {
            r->at++;
        } else if (r->at[0] == '/' && r->at[1] == '/') {
            while (*r->at && *r->at != '\n') { /* a line that goes on makes the comment go on */
                if (r->at[0] == '\\' && r->at[1] == '\n') r->newlines++, r->at++;
                r->at++;
            }
        } else if (r->at[0] == '/' && r->at[1] == '*') {
            const char *end = strstr(r->at + 2, "*/");
            if (end == NULL) fail("%s: a comment has no end", name);
            for (; r->at < end + 2; r->at++) r->newlines += *r->at == '\n';
        } else {
            break;
        }
    }
    if (last != '\n' && *r->at && *r->at != '\n') add_character(&r->out, ' ');
}

static text without_comments(const char *source, const char *name) {
    reader r;
    memset(&r, 0, sizeof r);
    add(&r.out, "", 0);
    r.at = source;
    while (*r.at) {
        const char c = *r.at;
        if (c == ' ' || c == '\t' || (c == '/' && (r.at[1] == '/' || r.at[1] == '*'))) {
            skip_blank(&r, name);
        } else if (c == '\n') {
            const int goes_on = r.out.size > 0 && r.out.data[r.out.size - 1] == '\\';
            copy(&r, 1);
            for (; !goes_on && r.newlines; r.newlines--) add_character(&r.out, '\n');
        } else if (c == '"') {
            if (r.out.size > 0 && r.out.data[r.out.size - 1] == 'R') {
                r.at--, r.out.size--;
                copy_raw_string(&r, name);
            } else {
                copy_quoted(&r, c);
            }
        } else if (c == '\'') {
            copy_quoted(&r, c);
        } else if (isalnum((unsigned char)c) || c == '_') { /* a word or number, with the ' between its digits */
            const int number = isdigit((unsigned char)c);
            while (isalnum((unsigned char)*r.at) || *r.at == '_' || (number && (*r.at == '.' || (*r.at == '\'' && isalnum((unsigned char)r.at[1]))))) copy(&r, 1);
        } else {
            copy(&r, 1);
        }
    }
    while (r.out.size > 0 && r.out.data[r.out.size - 1] == '\n') r.out.size--;
    add_character(&r.out, '\n');
    return r.out;
}

/* ---- packing: as src/cub_embedded.c says ---- */

enum { HASH_BITS = 16, BASE = 88, NEAR_DISTANCE = BASE * BASE, FAR_DISTANCE = BASE * BASE * BASE, NEAR_MIN = 5, FAR_MIN = 6, MAX_TRIES = 256 };

static char digit(size_t value) { /* below BASE: printable, and none that a literal would escape or that means something here */
    static const char digits[] = "#%&'()*+,-./0123456789:;<=>ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_abcdefghijklmnopqrstuvwxyz{|}~!";
    return digits[value];
}

static unsigned hash_of(const char *p) {
    unsigned h = 0, i;
    for (i = 0; i < NEAR_MIN; i++) h = h * 2654435u + (unsigned char)p[i];
    return (h * 2654435761u) >> (32 - HASH_BITS);
}

typedef struct packer {
    const char *data;
    size_t size;
    long *latest, *earlier; /* positions of the same hash */
} packer;

static void remember(packer *p, size_t at) {
    unsigned h;
    if (at + NEAR_MIN > p->size) return;
    h = hash_of(p->data + at);
    p->earlier[at] = p->latest[h];
    p->latest[h] = (long)at;
}

/* Characters that the best match at `at` saves; 0: none. */
static size_t best_match(const packer *p, size_t at, size_t *length, size_t *distance) {
    size_t best = 0, tries = 0;
    long from;
    if (at + NEAR_MIN > p->size) return 0;
    for (from = p->latest[hash_of(p->data + at)]; from >= 0 && at - (size_t)from < FAR_DISTANCE && tries < MAX_TRIES; from = p->earlier[from], tries++) {
        const size_t back = at - (size_t)from, least = back < NEAR_DISTANCE ? NEAR_MIN : FAR_MIN;
        size_t n = 0, cost;
        while (at + n < p->size && p->data[(size_t)from + n] == p->data[at + n]) n++;
        if (n < least) continue;
        cost = (back < NEAR_DISTANCE ? 4u : 5u) + (n - least) / (BASE - 1);
        if (n > cost && n - cost > best) {
            best = n - cost;
            *length = n;
            *distance = back;
        }
    }
    return best;
}

static void pack_match(text *out, size_t length, size_t distance) {
    const int near = distance < NEAR_DISTANCE;
    size_t left = length - (near ? NEAR_MIN : FAR_MIN);
    add_character(out, near ? '`' : '@');
    if (!near) add_character(out, digit(distance / BASE / BASE));
    add_character(out, digit(distance / BASE % BASE));
    add_character(out, digit(distance % BASE));
    for (; left >= BASE - 1; left -= BASE - 1) add_character(out, digit(BASE - 1));
    add_character(out, digit(left));
}

static text pack(const text *in) {
    packer p;
    text out;
    size_t at = 0, i;
    memset(&out, 0, sizeof out);
    p.data = in->data;
    p.size = in->size;
    p.latest = (long *)grow(NULL, ((size_t)1 << HASH_BITS) * sizeof *p.latest);
    p.earlier = (long *)grow(NULL, (in->size + 1) * sizeof *p.earlier);
    for (i = 0; i < (size_t)1 << HASH_BITS; i++) p.latest[i] = -1;
    while (at < in->size) {
        size_t length = 0, distance = 0, later_length, later_distance, saved = best_match(&p, at, &length, &distance);
        remember(&p, at);
        if (saved > 0 && best_match(&p, at + 1, &later_length, &later_distance) > saved) saved = 0; /* a better one begins behind the next character */
        if (saved == 0) {
            const char c = in->data[at++];
            if (c == '\n') add_character(&out, '$');
            else if (c == '\0') add(&out, "`$0", 3);
            else if (c == '`' || c == '@' || c == '$') add(&out, c == '`' ? "`$1" : c == '@' ? "`$2" : "`$3", 3);
            else if (c < ' ' || c > '~') fail("a header holds the character %d", (unsigned char)c);
            else add_character(&out, c);
        } else {
            pack_match(&out, length, distance);
            for (i = 1; i < length; i++) remember(&p, at + i);
            at += length;
        }
    }
    free(p.latest);
    free(p.earlier);
    return out;
}

static void write_pieces(FILE *out, const text *packed) {
    size_t i, in_piece = 0;
    for (i = 0; i < packed->size; i++) {
        const char c = packed->data[i];
        if (in_piece == 0) fputc('"', out);
        if (c == '"' || c == '\\' || c == '?') { /* ? so that no trigraph comes about */
            fputc('\\', out);
            in_piece++;
        }
        fputc(c, out);
        if (++in_piece >= 3900 || i + 1 == packed->size) {
            fputs("\",\n", out);
            in_piece = 0;
        }
    }
}

/* ---- notices ---- */

/* The comments that a header begins with, as plain text: without the signs and rulers of comments. */
static text notice_of(const char *source) {
    text notice;
    int block = 0;
    memset(&notice, 0, sizeof notice);
    add(&notice, "", 0);
    while (*source) {
        const char *end = strchr(source, '\n'), *line = source + strspn(source, " \t"), *last;
        if (end == NULL) end = source + strlen(source);
        if (!block && line < end && strncmp(line, "//", 2) != 0 && strncmp(line, "/*", 2) != 0) break;
        if (!block && line == end && notice.size > 0 && strstr(notice.data, "opyright") != NULL) break; /* what follows explains the header */
        if (!block && strncmp(line, "/*", 2) == 0) block = 1;
        last = end;
        if (block) {
            const char *close = strstr(line, "*/");
            if (close != NULL && close < end) {
                block = 0;
                last = close;
            }
        }
        while (line < last && strchr("/*!=-", *line) != NULL) line++;
        while (last > line && strchr("/*=- \t", last[-1]) != NULL) last--;
        if (last - line > 1 || (notice.size > 1 && notice.data[notice.size - 2] != '\n')) {
            add(&notice, line, (size_t)(last - line));
            add_character(&notice, '\n');
        }
        source = end + (*end == '\n');
    }
    return notice;
}

/* Each notice once, under the first header that has it. */
static void add_notices(text *out) {
    text seen;
    size_t i;
    memset(&seen, 0, sizeof seen);
    add(&seen, "", 0);
    for (i = 0; i < num_headers; i++) {
        text notice = notice_of(headers[i].source.data);
        if ((strstr(notice.data, "opyright") != NULL || strstr(notice.data, "SPDX") != NULL) && strstr(seen.data, notice.data) == NULL) {
            add_line(out, "\n---- %s, and others with the same notice:", headers[i].name);
            add(out, notice.data, notice.size);
            add(&seen, notice.data, notice.size);
        }
        free(notice.data);
    }
    free(seen.data);
}

static void add_licence(text *out, const char *path) {
    text licence;
    if (!read_file(path, &licence)) fail("can't read %s", path);
    add_line(out, "\n---- %s:\n", strrchr(path, '/') != NULL ? strrchr(path, '/') + 1 : path);
    add(out, licence.data, licence.size);
    free(licence.data);
}

/* What has to be there for the headers to be passed on: CUB's licence is in its headers or in a file of the package, and the Apache
   License, which libcu++ and Thrust are under, in a file. */
static void check_notices(const text *notices) {
    if (strstr(notices->data, "*/") != NULL) fail("a notice or licence would end a comment");
    if (strstr(notices->data, "Redistribution and use in source and binary forms") == NULL || strstr(notices->data, "Version 2.0, January 2004") == NULL)
        fail("the licences of CUB (BSD 3-clause) and of libcu++ and Thrust (Apache License 2.0) aren't all there: name files that hold them by CCCL_LICENCES='FILE...'");
}

/* ---- */

static unsigned long version_of(const char *folder) {
    char path[4096];
    text t;
    const char *at;
    unsigned long version = 0;
    snprintf(path, sizeof path, "%s/cub/version.cuh", folder);
    if (read_file(path, &t) && (at = strstr(t.data, "#define CUB_VERSION ")) != NULL) version = strtoul(at + 20, NULL, 10);
    if (version == 0) fail("%s names no version of CUB", path);
    free(t.data);
    return version;
}

int main(int argc, char **argv) {
    static const char implemented[] = "#define MOE_ROUTE_IMPLEMENTED\n";
    /* Headers whose names macros put together: thrust/iterator/detail/{host,device}_system_tag.h */
    static const char *const indirect[] = {"thrust/system/cpp/detail/execution_policy.h", "thrust/system/cuda/detail/execution_policy.h"};
    text library, all, packed, notices;
    const char *folder, *place;
    unsigned long version;
    FILE *out;
    size_t i;
    int l;
    memset(&all, 0, sizeof all);
    memset(&notices, 0, sizeof notices);
    if (argc < 5) fail("usage: embed_cub OUTPUT moe_route.h CCCL LICENCE...");
    folder = argv[3];
    if (!read_file(argv[2], &library)) fail("can't read %s", argv[2]);
    place = strstr(library.data, implemented);
    if (place == NULL) fail("%s isn't moe_route.h", argv[2]);
    place += sizeof implemented - 1;
    version = version_of(folder);
    take_included(folder, library.data, "cub/");
    for (i = 0; i < sizeof indirect / sizeof *indirect; i++) take_header(folder, indirect[i]);
    for (i = 0; i < num_headers; i++) take_included(folder, headers[i].source.data, "");
    for (i = 0; i < num_headers; i++) {
        text stripped = without_comments(is_unneeded(headers[i].name) ? "" : headers[i].source.data, headers[i].name);
        add(&all, headers[i].name, strlen(headers[i].name) + 1);
        add(&all, stripped.data, stripped.size);
        add_character(&all, '\0');
        free(stripped.data);
    }
    packed = pack(&all);
    add_notices(&notices);
    for (l = 4; l < argc; l++) add_licence(&notices, argv[l]);
    check_notices(&notices);
    out = fopen(argv[1], "wb");
    if (out == NULL) fail("can't write %s", argv[1]);
    fwrite(library.data, 1, (size_t)(place - library.data), out);
    fprintf(out, "\n/* ---- headers of CUB %lu.%lu.%lu, packed; notices and licences are at the end of this file ---- */\n", version / 100000, version / 100 % 1000, version % 100);
    fprintf(out, "#define MOER_EMBEDDED_CUB %lu\n#define MOER_EMBEDDED_CUB_HEADERS %lu\n#define MOER_EMBEDDED_CUB_SIZE %lu\n", version, (unsigned long)num_headers, (unsigned long)all.size);
    fputs("static const char *const moer_embedded_cub[] = {\n", out);
    write_pieces(out, &packed);
    fputs("0};\n", out);
    fputs(place, out);
    fputs("\n/*\nThe packed headers of CUB and of what it includes, libcu++ and Thrust, are NVIDIA's and others'. Comments and white space were taken out.\n", out);
    fwrite(notices.data, 1, notices.size, out);
    fputs("*/\n", out);
    if (fclose(out) != 0) fail("can't write %s", argv[1]);
    printf("%lu headers of CUB %lu.%lu.%lu: %lu bytes without comments, %lu packed\n", (unsigned long)num_headers, version / 100000, version / 100 % 1000, version % 100, (unsigned long)all.size,
           (unsigned long)packed.size);
    return 0;
}
