/*
  options.h: the command line of every subcommand, from a table of options: parsed, checked, explained by --help, and what is
  unknown refused with the nearest name. Also how the program ends: its exit statuses and its one line on stderr.
*/
#ifndef OPTIONS_H
#define OPTIONS_H

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* docs/command.md documents them. */
enum {
    STATUS_OK = 0,
    STATUS_FAILED = 1, /* a check failed, NVRTC refused a kernel, the driver refused a call */
    STATUS_USAGE = 2,  /* an option, or a model that it describes, is wrong */
    STATUS_NO_GPU = 3,
    STATUS_NO_NVRTC = 4, /* something has to be compiled and there is no NVRTC */
    STATUS_FILE = 5      /* a file can't be read, isn't what it should be, or can't be written */
};

#if defined(__GNUC__)
#define OPTIONS_PRINTF(text, first) __attribute__((format(printf, text, first)))
#define OPTIONS_NORETURN __attribute__((noreturn))
#else
#define OPTIONS_PRINTF(text, first)
#define OPTIONS_NORETURN
#endif

static const char *options_command = ""; /* the running subcommand, for messages */

static void stop(int status, const char *format, ...) OPTIONS_PRINTF(2, 3) OPTIONS_NORETURN;

static void stop(int status, const char *format, ...) {
    va_list arguments;
    fflush(stdout);
    fprintf(stderr, "moe_route%s%s: ", options_command[0] ? " " : "", options_command);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    exit(status);
}

static void *allocate(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size ? size : 1);
    if (!memory) stop(STATUS_FAILED, "out of memory");
    return memory;
}

/* ---- the table ---- */

typedef enum option_kind {
    OPTION_TITLE,  /* begins a group of options in the help */
    OPTION_FLAG,   /* int: 1 */
    OPTION_COUNT,  /* uint32_t */
    OPTION_REAL,   /* float */
    OPTION_TEXT,   /* const char * */
    OPTION_TEXTS,  /* option_texts: may be repeated */
    OPTION_CHOICE, /* int: the value of a word */
    OPTION_SET     /* uint32_t: the or-ed values of words with commas between */
} option_kind;

typedef struct option_choice { /* ends with a NULL */
    const char *word;
    int value;
} option_choice;

typedef struct option_texts {
    const char *values[16];
    uint32_t count;
} option_texts;

typedef struct option {
    option_kind kind;
    const char *name;  /* with its dashes; a TITLE's text */
    const char *value; /* how the help calls the value */
    const char *help;
    void *target;
    double least, most; /* COUNT, REAL */
    const option_choice *choices;
} option;

#define OPT_TITLE(text) {OPTION_TITLE, text, NULL, NULL, NULL, 0, 0, NULL}
#define OPT_FLAG(name, help, target) {OPTION_FLAG, name, NULL, help, target, 0, 0, NULL}
#define OPT_COUNT(name, value, help, target, least, most) {OPTION_COUNT, name, value, help, target, least, most, NULL}
#define OPT_REAL(name, value, help, target, least, most) {OPTION_REAL, name, value, help, target, least, most, NULL}
#define OPT_TEXT(name, value, help, target) {OPTION_TEXT, name, value, help, target, 0, 0, NULL}
#define OPT_TEXTS(name, value, help, target) {OPTION_TEXTS, name, value, help, target, 0, 0, NULL}
#define OPT_CHOICE(name, value, help, target, choices) {OPTION_CHOICE, name, value, help, target, 0, 0, choices}
#define OPT_SET(name, value, help, target, choices) {OPTION_SET, name, value, help, target, 0, 0, choices}
#define OPT_END OPT_TITLE(NULL)

typedef struct options { /* of one subcommand */
    const char *command, *usage, *about;
    const option *tables[4];       /* each ends with OPT_END */
    option_texts *rest;            /* arguments that are no options; NULL: refused */
    const char *rest_name, *after; /* after: closes the help */
    int joins;                     /* "--and" begins another description */
} options;

/* ---- the nearest name ---- */

enum { OPTIONS_NAME_MAX = 64 };

/* Insertions, deletions, replacements and swapped neighbours from one to the other. */
static unsigned options_distance(const char *a, const char *b) {
    unsigned rows[3][OPTIONS_NAME_MAX + 1], *before = rows[0], *last = rows[1], *row = rows[2];
    const size_t length = strlen(b);
    size_t i, j;
    if (length > OPTIONS_NAME_MAX || strlen(a) > OPTIONS_NAME_MAX) return ~0u;
    for (j = 0; j <= length; j++) last[j] = (unsigned)j;
    for (i = 0; a[i]; i++) {
        unsigned *spare = before;
        row[0] = (unsigned)i + 1;
        for (j = 1; j <= length; j++) {
            unsigned best = last[j - 1] + (a[i] != b[j - 1]);
            if (last[j] + 1 < best) best = last[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            if (i > 0 && j > 1 && a[i] == b[j - 2] && a[i - 1] == b[j - 1] && before[j - 2] + 1 < best) best = before[j - 2] + 1;
            row[j] = best;
        }
        before = last;
        last = row;
        row = spare;
    }
    return last[length];
}

typedef struct options_nearest {
    const char *name;
    unsigned distance;
} options_nearest;

static void options_compare(options_nearest *nearest, const char *wanted, const char *name) {
    unsigned distance = options_distance(wanted, name);
    if (strncmp(wanted, name, strlen(wanted)) == 0) distance = 1; /* a beginning is closer than it counts */
    if (!nearest->name || distance < nearest->distance) {
        nearest->name = name;
        nearest->distance = distance;
    }
}

static const option *options_find(const options *o, const char *name, size_t length, options_nearest *nearest) {
    char wanted[OPTIONS_NAME_MAX + 1];
    const option *at;
    int t;
    snprintf(wanted, sizeof wanted, "%.*s", (int)(length < OPTIONS_NAME_MAX ? length : OPTIONS_NAME_MAX), name);
    memset(nearest, 0, sizeof *nearest);
    options_compare(nearest, wanted, "--help");
    for (t = 0; t < 4 && o->tables[t]; t++)
        for (at = o->tables[t]; at->kind != OPTION_TITLE || at->name; at++) {
            if (at->kind == OPTION_TITLE) continue;
            if (strcmp(at->name, wanted) == 0) return at;
            options_compare(nearest, wanted, at->name);
        }
    return NULL;
}

/* ---- values ---- */

static void options_list_choices(const option_choice *choice, char *text, size_t size) {
    size_t length = 0;
    for (text[0] = 0; choice->word && length < size; choice++)
        length += (size_t)snprintf(text + length, size - length, "%s%s", length ? ", " : "", choice->word);
}

static int options_choose(const option *o, const char *word, size_t length) {
    const option_choice *choice;
    options_nearest nearest = {NULL, 0};
    char all[1024], wanted[OPTIONS_NAME_MAX + 1];
    snprintf(wanted, sizeof wanted, "%.*s", (int)(length < OPTIONS_NAME_MAX ? length : OPTIONS_NAME_MAX), word);
    for (choice = o->choices; choice->word; choice++) {
        if (strlen(choice->word) == length && strncmp(choice->word, word, length) == 0) return choice->value;
        options_compare(&nearest, wanted, choice->word);
    }
    options_list_choices(o->choices, all, sizeof all);
    stop(STATUS_USAGE, "%s is \"%.*s\"; the nearest is %s, allowed are %s", o->name, (int)length, word, nearest.name, all);
}

static uint32_t options_choose_set(const option *o, const char *words) {
    uint32_t set = 0;
    for (;;) {
        const size_t length = strcspn(words, ",");
        set |= (uint32_t)options_choose(o, words, length);
        if (!words[length]) return set;
        words += length + 1;
    }
}

static double options_number(const char *name, const char *text, double least, double most, int whole) {
    char *end;
    double value;
    errno = 0;
    value = strtod(text, &end);
    if (end == text || *end || !(value >= least && value <= most) || (whole && floor(value) != value))
        stop(STATUS_USAGE, "%s is \"%s\"; allowed is a%s number from %.10g to %.10g", name, text, whole ? " whole" : "", least,
             most);
    return value;
}

static void options_set(const option *o, const char *value) {
    switch (o->kind) {
    case OPTION_FLAG: *(int *)o->target = 1; break;
    case OPTION_COUNT: *(uint32_t *)o->target = (uint32_t)options_number(o->name, value, o->least, o->most, 1); break;
    case OPTION_REAL: *(float *)o->target = (float)options_number(o->name, value, o->least, o->most, 0); break;
    case OPTION_TEXT: *(const char **)o->target = value; break;
    case OPTION_TEXTS: {
        option_texts *texts = (option_texts *)o->target;
        if (texts->count == sizeof texts->values / sizeof texts->values[0])
            stop(STATUS_USAGE, "%s is given more than %u times", o->name, texts->count);
        texts->values[texts->count++] = value;
        break;
    }
    case OPTION_CHOICE: *(int *)o->target = options_choose(o, value, strlen(value)); break;
    case OPTION_SET: *(uint32_t *)o->target = options_choose_set(o, value); break;
    case OPTION_TITLE: break;
    }
}

/* "1,2,4" as numbers; at most `room`. */
static uint32_t options_numbers(const char *name, const char *list, double least, double most, uint32_t *numbers, uint32_t room) {
    uint32_t count = 0;
    for (;;) {
        const size_t length = strcspn(list, ",");
        char text[32];
        snprintf(text, sizeof text, "%.*s", (int)(length < 31 ? length : 31), list);
        if (count == room) stop(STATUS_USAGE, "%s holds more than %u numbers", name, room);
        numbers[count++] = (uint32_t)options_number(name, text, least, most, 1);
        if (!list[length]) return count;
        list += length + 1;
    }
}

/* ---- help ---- */

/* Text in lines of up to 110 columns; those after the first begin at `column`. */
static void options_wrap(const char *text, size_t column) {
    size_t at = column;
    while (*text) {
        const size_t length = strcspn(text, " ");
        if (at + length > 110 && at > column) {
            printf("\n%*s", (int)column, "");
            at = column;
        } else if (at > column) {
            putchar(' ');
            at++;
        }
        printf("%.*s", (int)length, text);
        at += length;
        text += length;
        while (*text == ' ') text++;
    }
    putchar('\n');
}

static void options_help(const options *o) {
    const option *at;
    int t;
    printf("usage: moe_route %s\n\n", o->usage);
    options_wrap(o->about, 0);
    for (t = 0; t < 4 && o->tables[t]; t++)
        for (at = o->tables[t]; at->kind != OPTION_TITLE || at->name; at++) {
            char left[64], choices[1024], help[1600];
            if (at->kind == OPTION_TITLE) {
                printf("\n%s:\n", at->name);
                continue;
            }
            snprintf(left, sizeof left, "%s%s%s", at->name, at->value ? " " : "", at->value ? at->value : "");
            choices[0] = 0;
            if (at->choices) options_list_choices(at->choices, choices, sizeof choices);
            snprintf(help, sizeof help, "%s%s%s", at->help, choices[0] ? ": " : "", choices);
            if (strlen(left) > 25) printf("  %s\n%28s", left, "");
            else printf("  %-25s ", left);
            options_wrap(help, 28);
        }
    printf("\n  --help                    this text\n");
    if (o->after) printf("\n%s", o->after);
}

/* ---- parsing ---- */

/* Parses up to the end or to an argument "--and", and returns how many arguments that were, "--and" included. */
static int options_parse(const options *o, int argc, char **argv) {
    int i;
    options_command = o->command;
    for (i = 0; i < argc; i++) {
        const char *argument = argv[i], *value;
        const size_t length = strcspn(argument, "=");
        options_nearest nearest;
        const option *found;
        if (o->joins && strcmp(argument, "--and") == 0) return i + 1;
        if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0) {
            options_help(o);
            exit(STATUS_OK);
        }
        if (argument[0] != '-' || argument[1] == 0) {
            if (!o->rest)
                stop(STATUS_USAGE, "\"%s\" is no option, and nothing else is expected; moe_route %s --help lists the options",
                     argument, o->command);
            if (o->rest->count == sizeof o->rest->values / sizeof o->rest->values[0])
                stop(STATUS_USAGE, "there are more than %u of %s", o->rest->count, o->rest_name);
            o->rest->values[o->rest->count++] = argument;
            continue;
        }
        found = options_find(o, argument, length, &nearest);
        if (!found) stop(STATUS_USAGE, "there is no option %.*s; the nearest is %s", (int)length, argument, nearest.name);
        value = argument[length] ? argument + length + 1 : NULL;
        if (found->kind == OPTION_FLAG) {
            if (value) stop(STATUS_USAGE, "%s takes no value", found->name);
        } else if (!value) {
            if (i + 1 == argc) stop(STATUS_USAGE, "%s needs a value: %s %s", found->name, found->name, found->value);
            value = argv[++i];
        }
        options_set(found, value);
    }
    return argc;
}

#endif /* OPTIONS_H */
