/*
  output.h: what every subcommand writes for other programs: files that are named "-" for stdout, CSV and JSON. Include
  options.h first.
*/
#ifndef OUTPUT_H
#define OUTPUT_H

#if defined(_WIN32)
#include <io.h>
#define OUTPUT_IS_TERMINAL(file) (_isatty(_fileno(file)) != 0)
#else
#include <unistd.h>
#define OUTPUT_IS_TERMINAL(file) (isatty(fileno(file)) != 0)
#endif

static int output_is_stdout(const char *path) { return path && strcmp(path, "-") == 0; }

static FILE *output_open(const char *path) {
    FILE *file = output_is_stdout(path) ? stdout : fopen(path, "w");
    if (!file) stop(STATUS_FILE, "%s can't be written: %s", path, strerror(errno));
    return file;
}

static void output_close(FILE *file, const char *path) {
    int failed = ferror(file) != 0;
    if (file == stdout) failed |= fflush(file) != 0;
    else failed |= fclose(file) != 0;
    if (failed) stop(STATUS_FILE, "%s can't be written: %s", path, strerror(errno));
}

/* Whether this terminal shows more than ASCII. */
static int output_is_unicode(void) {
    const char *names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    int i;
    for (i = 0; i < 3; i++) {
        const char *value = getenv(names[i]);
        if (value && value[0])
            return strstr(value, "UTF-8") || strstr(value, "utf8") || strstr(value, "UTF8") || strstr(value, "utf-8");
    }
    return 0;
}

/* "512 bytes", "34.2 KB", "1.5 GB"; in a buffer that the next call but three overwrites. */
static const char *output_size(uint64_t bytes) {
    static char texts[4][32];
    static int next;
    static const char *const units[] = {"KB", "MB", "GB", "TB"};
    char *text = texts[next++ % 4];
    double value = (double)bytes / 1000;
    int unit = 0;
    if (bytes < 1000) {
        snprintf(text, sizeof texts[0], "%u bytes", (unsigned)bytes);
        return text;
    }
    for (; value >= 1000 && unit < 3; unit++) value /= 1000;
    snprintf(text, sizeof texts[0], value < 100 ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return text;
}

/* ---- CSV: a text with commas, quotes or line ends is quoted ---- */

static void csv_text(FILE *file, const char *text) {
    if (!strpbrk(text, ",\"\r\n")) {
        fputs(text, file);
        return;
    }
    fputc('"', file);
    for (; *text; text++) {
        if (*text == '"') fputc('"', file);
        fputc(*text, file);
    }
    fputc('"', file);
}

/* ---- JSON ---- */

typedef struct json_writer {
    FILE *file;
    int depth, lines; /* lines: members of objects and arrays down to this depth have a line each */
    int filled[16];   /* something stands before, at each depth */
} json_writer;

static void json_begin_file(json_writer *json, FILE *file, int lines) {
    memset(json, 0, sizeof *json);
    json->file = file;
    json->lines = lines;
}

/* Bytes that aren't UTF-8, as file names may have, become a question mark. */
static void json_escape(FILE *file, const char *text) {
    const unsigned char *at = (const unsigned char *)text;
    fputc('"', file);
    while (*at) {
        const int more = *at < 0x80                  ? 0
                         : *at >= 0xc2 && *at < 0xe0 ? 1
                         : *at >= 0xe0 && *at < 0xf0 ? 2
                         : *at >= 0xf0 && *at < 0xf5 ? 3
                                                     : -1;
        int i, sound = more >= 0;
        for (i = 1; i <= more && sound; i++) sound = (at[i] & 0xc0) == 0x80;
        if (more == 2 && sound) sound = !(at[0] == 0xe0 && at[1] < 0xa0) && !(at[0] == 0xed && at[1] >= 0xa0);
        if (more == 3 && sound) sound = !(at[0] == 0xf0 && at[1] < 0x90) && !(at[0] == 0xf4 && at[1] >= 0x90);
        if (!sound) {
            fputc('?', file);
            at++;
        } else if (more > 0) {
            fwrite(at, 1, (size_t)more + 1, file);
            at += more + 1;
        } else {
            if (*at == '"' || *at == '\\') fprintf(file, "\\%c", *at);
            else if (*at == '\n') fputs("\\n", file);
            else if (*at < 0x20 || *at == 0x7f) fprintf(file, "\\u%04x", *at);
            else fputc(*at, file);
            at++;
        }
    }
    fputc('"', file);
}

/* What stands before a value: the comma and its name, which is NULL in an array. */
static void json_name(json_writer *json, const char *name) {
    const int own_line = json->depth > 0 && json->depth <= json->lines;
    if (json->filled[json->depth]) fputs(own_line ? "," : ", ", json->file);
    if (own_line) fprintf(json->file, "\n%*s", json->depth * 2, "");
    json->filled[json->depth] = 1;
    if (!name) return;
    json_escape(json->file, name);
    fputs(": ", json->file);
}

/* `bracket` is { or [. */
static void json_begin(json_writer *json, const char *name, char bracket) {
    json_name(json, name);
    fputc(bracket, json->file);
    json->filled[++json->depth] = 0;
}

static void json_end(json_writer *json, char bracket) {
    const int own_line = json->depth <= json->lines && json->filled[json->depth];
    json->depth--;
    if (own_line) fprintf(json->file, "\n%*s", json->depth * 2, "");
    fputc(bracket, json->file);
    if (json->depth == 0) {
        fputc('\n', json->file);
        json->filled[0] = 0;
    }
}

static void json_text(json_writer *json, const char *name, const char *text) {
    json_name(json, name);
    if (text) json_escape(json->file, text);
    else fputs("null", json->file);
}

/* `digits` significant ones; what isn't finite has no number in JSON. */
static void json_number(json_writer *json, const char *name, double value, int digits) {
    json_name(json, name);
    if (value - value == 0) fprintf(json->file, "%.*g", digits, value);
    else fputs("null", json->file);
}

static void json_count(json_writer *json, const char *name, uint64_t value) {
    json_name(json, name);
    fprintf(json->file, "%llu", (unsigned long long)value);
}

static void json_truth(json_writer *json, const char *name, int value) {
    json_name(json, name);
    fputs(value ? "true" : "false", json->file);
}

#endif /* OUTPUT_H */
