/*
  json.h: looks values up in a small JSON text that the repository's own tools wrote, such as tests/data/goldens.json. For
  tests alone: the text is trusted to be well-formed, and strings to hold no escapes. What reads foreign files is
  examples/safetensors.h.
*/
#ifndef TEST_JSON_H
#define TEST_JSON_H

TEST_FUNCTION const char *json_space(const char *at) {
    while (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r' || *at == ',' || *at == ':') at++;
    return at;
}

/* Past the value that begins at `at`. */
TEST_FUNCTION const char *json_skip(const char *at) {
    int depth = 0;
    at = json_space(at);
    do {
        if (*at == '"') {
            for (at++; *at && *at != '"'; at++) {}
            if (*at) at++;
        } else if (*at == '{' || *at == '[') {
            depth++;
            at++;
        } else if (*at == '}' || *at == ']') {
            depth--;
            at++;
        } else {
            while (*at && !strchr("\"{}[], :\n", *at)) at++;
        }
        if (depth) at = json_space(at);
    } while (depth > 0 && *at);
    return at;
}

/* The members of an object, from its opening brace: the next one's name (not terminated) and value; 0 at the end. */
typedef struct json_members {
    const char *at, *name, *value;
    size_t name_length;
} json_members;

TEST_FUNCTION json_members json_begin(const char *object) {
    json_members members;
    memset(&members, 0, sizeof members);
    members.at = object && *object == '{' ? object + 1 : "}";
    return members;
}

TEST_FUNCTION int json_next(json_members *members) {
    const char *at = json_space(members->at);
    if (*at != '"') return 0;
    members->name = at + 1;
    for (at++; *at && *at != '"'; at++) {}
    members->name_length = (size_t)(at - members->name);
    members->value = json_space(at + (*at != 0));
    members->at = json_skip(members->value);
    return 1;
}

/* NULL when the object has no such member. */
TEST_FUNCTION const char *json_find(const char *object, const char *name) {
    json_members members = json_begin(object);
    while (json_next(&members))
        if (strlen(name) == members.name_length && memcmp(name, members.name, members.name_length) == 0) return members.value;
    return NULL;
}

/* The first of several names (separated by spaces) that the object has with a value other than null. */
TEST_FUNCTION const char *json_find_any(const char *object, const char *names) {
    while (*names) {
        char name[64];
        size_t length = strcspn(names, " ");
        const char *value;
        snprintf(name, sizeof name, "%.*s", (int)length, names);
        value = json_find(object, name);
        if (value && *value != 'n') return value;
        names += length;
        while (*names == ' ') names++;
    }
    return NULL;
}

/* true counts 1; 0 when there is none. */
TEST_FUNCTION double json_number(const char *value) { return !value ? 0 : *value == 't' ? 1 : *value == 'f' ? 0 : strtod(value, NULL); }

/* Copies a string; empty when there is none. */
TEST_FUNCTION void json_string(const char *value, char *text, size_t size) {
    size_t length = value && *value == '"' ? strcspn(value + 1, "\"") : 0;
    if (length >= size) length = size - 1;
    if (length) memcpy(text, value + 1, length);
    text[length] = 0;
}

/* A whole file, to be freed; ends the program when it can't be read. */
TEST_FUNCTION char *json_read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    long size = -1;
    if (file && fseek(file, 0, SEEK_END) == 0 && (size = ftell(file)) >= 0 && fseek(file, 0, SEEK_SET) == 0) text = (char *)malloc((size_t)size + 1);
    if (!text || fread(text, 1, (size_t)size, file) != (size_t)size) {
        printf("FAIL json: can't read %s\n", path);
        exit(1);
    }
    fclose(file);
    text[size] = 0;
    return text;
}

#endif /* TEST_JSON_H */
