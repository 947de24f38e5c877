/*
  platform.c: the part of platform.h that is the same on every operating system, and the table of file operations. What
  differs stands in platform_posix.c and platform_windows.c.
*/
#include "internal.h"

static const moer_files moer_system_files = {
    moer_files_now,   moer_file_open,     moer_file_create,     moer_file_inspect,   moer_file_read,   moer_file_write,
    moer_file_flush,  moer_file_close,    moer_file_rename,     moer_file_remove,    moer_file_touch,  moer_folder_create,
    moer_folder_inspect, moer_folder_open, moer_folder_next,    moer_folder_close};

/* What contexts use that are created from now on. Only tests put another table here. */
static const moer_files *moer_default_files = &moer_system_files;

static int moer_text_set(char *buffer, size_t size, const char *text) {
    size_t length = strlen(text);
    if (length >= size) return 0;
    memcpy(buffer, text, length + 1);
    return 1;
}

static int moer_path_parent(char *path) {
    size_t length = strlen(path);
    while (length > 0 && !moer_path_is_separator(path[length - 1])) length--;
    if (length == 0) return 0;
    path[length > 1 ? length - 1 : 1] = '\0';
    return 1;
}
