/*
  platform_posix.c: threads, the clock, the environment, shared libraries, the locale and files of POSIX systems. Thin
  functions without policy: what a cache folder must look like, or where NVRTC is looked for, stands elsewhere.

  Only what a strict C99 compiler declares is called by name, because a program may have included system headers before
  this file can ask for more. The few functions beyond that are reached through moer_hidden.
*/
#include "internal.h"

#if !defined(_WIN32)

#include <locale.h>
#include <time.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

/* glibc hides the plain names in strict modes and always has the others. */
#if defined(O_NOFOLLOW)
#define MOER_O_NOFOLLOW O_NOFOLLOW
#elif defined(__O_NOFOLLOW)
#define MOER_O_NOFOLLOW __O_NOFOLLOW
#else
#define MOER_O_NOFOLLOW 0
#endif
#if defined(O_CLOEXEC)
#define MOER_O_CLOEXEC O_CLOEXEC
#elif defined(__O_CLOEXEC)
#define MOER_O_CLOEXEC __O_CLOEXEC
#else
#define MOER_O_CLOEXEC 0
#endif
#if defined(O_DIRECTORY)
#define MOER_O_DIRECTORY O_DIRECTORY
#elif defined(__O_DIRECTORY)
#define MOER_O_DIRECTORY __O_DIRECTORY
#else
#define MOER_O_DIRECTORY 0
#endif

static void moer_mutex_init(moer_mutex *mutex) { pthread_mutex_init(mutex, NULL); }
static void moer_mutex_destroy(moer_mutex *mutex) { pthread_mutex_destroy(mutex); }
static void moer_mutex_lock(moer_mutex *mutex) { pthread_mutex_lock(mutex); }
static void moer_mutex_unlock(moer_mutex *mutex) { pthread_mutex_unlock(mutex); }
static void moer_condition_init(moer_condition *condition) { pthread_cond_init(condition, NULL); }
static void moer_condition_destroy(moer_condition *condition) { pthread_cond_destroy(condition); }
static void moer_condition_wait(moer_condition *condition, moer_mutex *mutex) { pthread_cond_wait(condition, mutex); }
static void moer_condition_broadcast(moer_condition *condition) { pthread_cond_broadcast(condition); }

static void *moer_thread_run(void *user) {
    moer_thread *thread = (moer_thread *)user;
    thread->function(thread->user);
    return NULL;
}

static int moer_thread_start(moer_thread *thread, void (*function)(void *user), void *user) {
    thread->function = function;
    thread->user = user;
    return pthread_create(&thread->handle, NULL, moer_thread_run, thread) == 0;
}

static void moer_thread_join(moer_thread *thread) { pthread_join(thread->handle, NULL); }

static uint32_t moer_processors(void) {
#if defined(_SC_NPROCESSORS_ONLN)
    long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 1 ? (uint32_t)count : 1;
#else
    return 1;
#endif
}

static double moer_milliseconds(void) {
#if defined(CLOCK_MONOTONIC)
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
#else
    struct timeval now;
    gettimeofday(&now, NULL);
    return (double)now.tv_sec * 1e3 + (double)now.tv_usec * 1e-3;
#endif
}

static long moer_process_id(void) { return (long)getpid(); }

static const char *moer_environment(const char *name, char *value, size_t size) {
    const char *found;
    if (getuid() != geteuid() || getgid() != getegid()) return NULL;
#if defined(AT_SECURE)
    if (getauxval(AT_SECURE)) return NULL; /* file capabilities, too */
#endif
    found = getenv(name);
    if (!found || !found[0]) return NULL;
    snprintf(value, size, "%s", found);
    return value;
}

static void moer_system_error(char *text, size_t size) { snprintf(text, size, "%s", strerror(errno)); }
static int moer_system_error_is_absence(void) { return errno == ENOENT || errno == ENOTDIR; }

static void *moer_library_open(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static void *moer_library_loaded(const char *name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); }

static moer_function moer_library_symbol(void *library, const char *name) {
    void *address = dlsym(library, name);
    moer_function function = NULL;
    memcpy(&function, &address, sizeof function);
    return function;
}

static void moer_library_error(char *text, size_t size) {
    const char *error = dlerror();
    snprintf(text, size, "%s", error ? error : "unknown reason");
}

/* A function of the C library that strict C99 doesn't declare; NULL when there is none. */
static moer_function moer_hidden(const char *name) {
    void *program = dlopen(NULL, RTLD_NOW | RTLD_LOCAL);
    moer_function function = program ? moer_library_symbol(program, name) : NULL;
    if (program) dlclose(program);
    return function;
}

static int moer_library_folder(moer_function function, char *folder, size_t size) {
    struct { /* Dl_info */
        const char *file;
        void *base;
        const char *symbol;
        void *symbol_address;
    } info;
    int (*address_info)(const void *, void *) = (int (*)(const void *, void *))moer_hidden("dladdr");
    void *address;
    memcpy(&address, &function, sizeof address);
    memset(&info, 0, sizeof info);
    return address_info && address_info(address, &info) && info.file && moer_text_set(folder, size, info.file) &&
           moer_path_parent(folder);
}

static int moer_executable_folder(char *folder, size_t size) {
    ssize_t (*read_link)(const char *, char *, size_t) =
        (ssize_t(*)(const char *, char *, size_t))moer_hidden("readlink");
    ssize_t length = read_link ? read_link("/proc/self/exe", folder, size) : -1;
    if (length <= 0 || (size_t)length >= size) return 0;
    folder[length] = '\0';
    return moer_path_parent(folder);
}

/* NVRTC before 12.4 sets the whole process's LC_NUMERIC to "C" and leaves it. The first of the threads that compile at once
   keeps what it was, and the last puts it back. */
static pthread_mutex_t moer_locale_mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned moer_locale_users;
static char moer_locale_numeric[128]; /* empty: unknown */

static void moer_locale_keep(void) {
    const char *name;
    moer_mutex_lock(&moer_locale_mutex);
    if (moer_locale_users++ == 0) {
        name = setlocale(LC_NUMERIC, NULL);
        if (!name || !moer_text_set(moer_locale_numeric, sizeof moer_locale_numeric, name)) moer_locale_numeric[0] = '\0';
    }
    moer_mutex_unlock(&moer_locale_mutex);
}

static void moer_locale_put_back(void) {
    const char *name;
    moer_mutex_lock(&moer_locale_mutex);
    if (--moer_locale_users == 0 && moer_locale_numeric[0]) {
        name = setlocale(LC_NUMERIC, NULL);
        if (name && strcmp(name, "C") == 0 && strcmp(name, moer_locale_numeric) != 0) setlocale(LC_NUMERIC, moer_locale_numeric);
    }
    moer_mutex_unlock(&moer_locale_mutex);
}

/* locale_t is a pointer in every C library that NVRTC runs with. */
static void moer_locale_begin(moer_locale *locale) {
#if defined(LC_ALL_MASK)
    const int mask = LC_ALL_MASK;
#else
    const int mask = 1 << LC_NUMERIC; /* the categories left out come from "C" as well */
#endif
    void *(*new_locale)(int, const char *, void *) = (void *(*)(int, const char *, void *))moer_hidden("newlocale");
    void *(*use_locale)(void *) = (void *(*)(void *))moer_hidden("uselocale");
    moer_locale_keep();
    locale->saved = locale->neutral = NULL;
    if (!new_locale || !use_locale) return;
    locale->neutral = new_locale(mask, "C", NULL);
    if (locale->neutral) locale->saved = use_locale(locale->neutral);
}

static void moer_locale_end(const moer_locale *locale) {
    void *(*use_locale)(void *) = (void *(*)(void *))moer_hidden("uselocale");
    void (*free_locale)(void *) = (void (*)(void *))moer_hidden("freelocale");
    if (locale->saved) use_locale(locale->saved);
    if (locale->neutral && free_locale) free_locale(locale->neutral);
    moer_locale_put_back();
}

static int moer_home_folder(char *folder, size_t size) {
    typedef int (*password_entry)(uid_t, struct passwd *, char *, size_t, struct passwd **);
    password_entry get_entry;
    struct passwd entry, *found = NULL;
    char text[8192];
    const char *home = moer_environment("HOME", text, sizeof text);
    if (home && home[0] == '/' && home[1] != '\0') return moer_text_set(folder, size, home);
    get_entry = (password_entry)moer_hidden("getpwuid_r");
    if (!get_entry || get_entry(geteuid(), &entry, text, sizeof text, &found) != 0) return 0;
    if (!found || !found->pw_dir) return 0;
    return found->pw_dir[0] == '/' && found->pw_dir[1] != '\0' && moer_text_set(folder, size, found->pw_dir);
}

static int moer_path_is_separator(char character) { return character == '/'; }
static int moer_path_is_absolute(const char *path) { return path[0] == '/'; }

static int moer_path_absolute(const char *path, char *absolute, size_t size) {
    if (moer_path_is_absolute(path)) return moer_text_set(absolute, size, path);
    return getcwd(absolute, size) && moer_append(absolute, size, "/%s", path);
}

static uint64_t moer_random(void) {
    struct timeval now;
    uint64_t value = 0;
    int file = open("/dev/urandom", O_RDONLY | MOER_O_CLOEXEC);
    if (file >= 0) {
        ssize_t count = read(file, &value, sizeof value);
        close(file);
        if (count == (ssize_t)sizeof value) return value;
    }
    gettimeofday(&now, NULL);
    value ^= ((uint64_t)now.tv_sec << 20) ^ (uint64_t)now.tv_usec ^ ((uint64_t)getpid() << 40) ^
             (uint64_t)(uintptr_t)&now;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

static void moer_info_of_stat(const struct stat *status, moer_file_info *info) {
    memset(info, 0, sizeof *info);
    if (S_ISREG(status->st_mode)) info->kind = MOER_PATH_FILE;
    else if (S_ISDIR(status->st_mode)) info->kind = MOER_PATH_FOLDER;
    info->size = status->st_size > 0 ? (uint64_t)status->st_size : 0;
    info->modified = (int64_t)status->st_mtime;
    if (status->st_uid == geteuid()) info->owner = MOER_OWNER_SELF;
    else if (status->st_uid == 0) info->owner = MOER_OWNER_SYSTEM;
    info->writable_by_others = (status->st_mode & 022) != 0;
}

static moer_path_kind moer_path_inspect(const char *path) {
    struct stat status;
    moer_file_info info;
    if (stat(path, &status) != 0) return MOER_PATH_OTHER;
    moer_info_of_stat(&status, &info);
    return info.kind;
}

/* Without waiting, should the name turn out to be a pipe, and without side effects on a terminal. */
static int moer_open(const char *path, int flags, int mode) {
    int file;
    do {
        file = open(path, flags | MOER_O_CLOEXEC | O_NONBLOCK | O_NOCTTY, mode);
    } while (file < 0 && errno == EINTR);
    return file;
}

static moer_file moer_file_open(const char *path, int follow) {
    return moer_open(path, O_RDONLY | (follow ? 0 : MOER_O_NOFOLLOW), 0);
}

static moer_file moer_file_create(const char *path, int mode) {
    return moer_open(path, O_WRONLY | O_CREAT | O_EXCL | MOER_O_NOFOLLOW, mode);
}

static int moer_file_inspect(moer_file file, moer_file_info *info) {
    struct stat status;
    if (fstat(file, &status) != 0) return 0;
    moer_info_of_stat(&status, info);
    return 1;
}

static long moer_file_read(moer_file file, void *data, size_t size) {
    ssize_t count;
    do {
        count = read(file, data, size);
    } while (count < 0 && errno == EINTR);
    return (long)count;
}

static long moer_file_write(moer_file file, const void *data, size_t size) {
    ssize_t count;
    do {
        count = write(file, data, size);
    } while (count < 0 && errno == EINTR);
    return (long)count;
}

static int moer_file_flush(moer_file file) {
    int result;
    do {
        result = fsync(file);
    } while (result != 0 && errno == EINTR);
    return result == 0;
}

/* Not repeated when interrupted: the descriptor is gone by then, and the data were flushed. */
static int moer_file_close(moer_file file) { return close(file) == 0 || errno == EINTR; }

static int moer_file_rename(const char *from, const char *to) { return rename(from, to) == 0; }
static int moer_file_remove(const char *path) { return unlink(path) == 0; }

static int64_t moer_files_now(void) { return (int64_t)time(NULL); }

static int moer_file_touch(const char *path) {
    int (*set_times)(int, const void *) = (int (*)(int, const void *))moer_hidden("futimens");
    int file = set_times ? moer_file_open(path, 0) : -1, touched;
    if (file < 0) return 0;
    touched = set_times(file, NULL) == 0;
    close(file);
    return touched;
}

static int moer_folder_create(const char *path, int mode) { return mkdir(path, (mode_t)mode) == 0; }

static int moer_folder_inspect(const char *path, moer_file_info *info) {
    int file = moer_open(path, O_RDONLY | MOER_O_NOFOLLOW | MOER_O_DIRECTORY, 0), inspected;
    if (file < 0) return 0;
    inspected = moer_file_inspect(file, info);
    close(file);
    return inspected && info->kind == MOER_PATH_FOLDER;
}

static int moer_folder_open(moer_folder *folder, const char *path) {
    folder->stream = opendir(path);
    return folder->stream != NULL;
}

static const char *moer_folder_next(moer_folder *folder) {
    struct dirent *entry = readdir(folder->stream);
    return entry ? entry->d_name : NULL;
}

static void moer_folder_close(moer_folder *folder) { closedir(folder->stream); }

#endif
