/*
  folders.h: folders of their own for tests that write files: made, looked through, and removed with all they hold. POSIX.
*/
#ifndef TEST_FOLDERS_H
#define TEST_FOLDERS_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__GNUC__)
#define FOLDERS_FUNCTION static __attribute__((unused))
#else
#define FOLDERS_FUNCTION static
#endif

static char folder[512]; /* of the running test */

FOLDERS_FUNCTION void folder_create(void) {
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/moe_route_cache.XXXXXX", parent && parent[0] ? parent : "/tmp");
    if (!mkdtemp(folder)) {
        printf("FAIL folders: mkdtemp failed\n");
        exit(1);
    }
}

FOLDERS_FUNCTION void remove_tree(const char *path) {
    DIR *stream = opendir(path);
    struct dirent *entry;
    while (stream && (entry = readdir(stream)) != NULL) {
        char below[8192];
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(below, sizeof below, "%s/%s", path, entry->d_name);
        if (lstat(below, &info) == 0 && S_ISDIR(info.st_mode)) remove_tree(below);
        else unlink(below);
    }
    if (stream) closedir(stream);
    rmdir(path);
}

/* Counts the files below a folder by their names' ends, but for the one whose date tells when the folder was looked through; `found` gets the last entry's path. */
FOLDERS_FUNCTION void count_files(const char *path, uint32_t *entries, uint32_t *others, char *found, size_t size) {
    DIR *stream = opendir(path);
    struct dirent *entry;
    while (stream && (entry = readdir(stream)) != NULL) {
        char below[4096];
        struct stat info;
        const size_t length = strlen(entry->d_name);
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(below, sizeof below, "%s/%s", path, entry->d_name);
        if (lstat(below, &info) == 0 && S_ISDIR(info.st_mode)) {
            count_files(below, entries, others, found, size);
        } else if (length > 5 && strcmp(entry->d_name + length - 5, ".moec") == 0) {
            ++*entries;
            snprintf(found, size, "%s", below);
        } else if (strcmp(entry->d_name, "looked_through") != 0) {
            ++*others;
        }
    }
    if (stream) closedir(stream);
}

FOLDERS_FUNCTION void check_files(uint32_t wanted, const char *what) {
    char found[4096];
    uint32_t entries = 0, others = 0;
    count_files(folder, &entries, &others, found, sizeof found);
    CHECK(entries == wanted && others == 0, "%s: %u entries instead of %u, %u other files", what, entries, wanted, others);
}

/* The path of the only entry below `folder`. */
FOLDERS_FUNCTION int only_entry(char *path, size_t size) {
    uint32_t entries = 0, others = 0;
    path[0] = 0;
    count_files(folder, &entries, &others, path, size);
    return CHECK(entries == 1 && others == 0, "%u entries and %u other files instead of one entry", entries, others);
}

/* A file's bytes, at most `size`. */
FOLDERS_FUNCTION size_t read_bytes(const char *path, unsigned char *bytes, size_t size) {
    FILE *file = fopen(path, "rb");
    const size_t count = file ? fread(bytes, 1, size, file) : 0;
    if (file) fclose(file);
    return count;
}

FOLDERS_FUNCTION void write_bytes(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size) {
        printf("FAIL folders: %s can't be written\n", path);
        exit(1);
    }
    fclose(file);
}

#endif /* TEST_FOLDERS_H */
