/*
  platform.c: what differs between operating systems: threads, the clock, the environment, shared libraries, the
  locale, files. Thin functions without policy: what a cache folder must look like, or where NVRTC is looked for, stands
  elsewhere.

  On POSIX systems only what a strict C99 compiler declares is called by name, because a program may have included
  system headers before this file can ask for more. The few functions beyond that are reached through moer_hidden.
*/
#include "internal.h"

#include <locale.h>
#include <time.h>

/* Copies a text; 0 when it doesn't fit. */
static int moer_text_set(char *buffer, size_t size, const char *text) {
    size_t length = strlen(text);
    if (length >= size) return 0;
    memcpy(buffer, text, length + 1);
    return 1;
}

/* Cuts a path's last component off, in place; 0 when it has none. */
static int moer_path_parent(char *path) {
    size_t length = strlen(path);
    while (length > 0 && path[length - 1] != '/' && path[length - 1] != '\\') length--;
    if (length == 0) return 0;
    path[length > 1 ? length - 1 : 1] = '\0';
    return 1;
}

#if defined(_WIN32)

static void moer_mutex_init(moer_mutex *mutex) { InitializeSRWLock(mutex); }
static void moer_mutex_destroy(moer_mutex *mutex) { (void)mutex; }
static void moer_mutex_lock(moer_mutex *mutex) { AcquireSRWLockExclusive(mutex); }
static void moer_mutex_unlock(moer_mutex *mutex) { ReleaseSRWLockExclusive(mutex); }
static void moer_condition_init(moer_condition *condition) { InitializeConditionVariable(condition); }
static void moer_condition_destroy(moer_condition *condition) { (void)condition; }
static void moer_condition_wait(moer_condition *condition, moer_mutex *mutex) {
    SleepConditionVariableSRW(condition, mutex, INFINITE, 0);
}
static void moer_condition_broadcast(moer_condition *condition) { WakeAllConditionVariable(condition); }

static double moer_milliseconds(void) {
    LARGE_INTEGER ticks, frequency;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&frequency);
    return (double)ticks.QuadPart * 1000.0 / (double)frequency.QuadPart;
}

static long moer_process_id(void) { return (long)GetCurrentProcessId(); }

static const char *moer_environment(const char *name) {
    const char *value = getenv(name);
    return value && value[0] ? value : NULL;
}

static void moer_system_error(char *text, size_t size) {
    snprintf(text, size, "Windows error %lu", (unsigned long)GetLastError());
}

static void *moer_library_open(const char *path) {
    char copy[MOER_PATH_MAX];
    HMODULE module;
    UINT mode;
    size_t i;
    if (!moer_text_set(copy, sizeof copy, path)) {
        SetLastError(ERROR_FILENAME_EXCED_RANGE);
        return NULL;
    }
    for (i = 0; copy[i]; i++) {
        if (copy[i] == '/') copy[i] = '\\';
    }
    mode = SetErrorMode(SEM_FAILCRITICALERRORS); /* no dialog about a broken library */
    module = LoadLibraryExA(copy, NULL, moer_path_is_absolute(copy) ? LOAD_WITH_ALTERED_SEARCH_PATH : 0);
    SetErrorMode(mode);
    return (void *)module;
}

static void *moer_library_loaded(const char *name) { return (void *)GetModuleHandleA(name); }

static moer_function moer_library_symbol(void *library, const char *name) {
    FARPROC address = GetProcAddress((HMODULE)library, name);
    moer_function function = NULL;
    memcpy(&function, &address, sizeof function);
    return function;
}

static void moer_library_error(char *text, size_t size) { moer_system_error(text, size); }

/* Folder of a loaded module; NULL is the program itself. */
static int moer_module_folder(HMODULE module, char *folder, size_t size) {
    DWORD length = GetModuleFileNameA(module, folder, (DWORD)size);
    return length > 0 && length < size && moer_path_parent(folder);
}

static int moer_library_folder(moer_function function, char *folder, size_t size) {
    HMODULE module;
    LPCSTR address;
    memcpy(&address, &function, sizeof address);
    return GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                              address, &module) &&
           moer_module_folder(module, folder, size);
}

static int moer_executable_folder(char *folder, size_t size) { return moer_module_folder(NULL, folder, size); }

static void moer_locale_begin(moer_locale *locale) {
    const char *name;
    locale->per_thread = _configthreadlocale(_ENABLE_PER_THREAD_LOCALE);
    name = setlocale(LC_ALL, NULL);
    if (!name || !moer_text_set(locale->saved, sizeof locale->saved, name)) locale->saved[0] = '\0';
    if (locale->saved[0]) setlocale(LC_ALL, "C");
}

static void moer_locale_end(const moer_locale *locale) {
    if (locale->saved[0]) setlocale(LC_ALL, locale->saved);
    if (locale->per_thread != -1) _configthreadlocale(locale->per_thread);
}

static int moer_home_folder(char *folder, size_t size) {
    const char *profile = moer_environment("USERPROFILE");
    return profile && moer_path_is_absolute(profile) && moer_text_set(folder, size, profile);
}

static int moer_path_is_absolute(const char *path) {
    int drive = (path[0] >= 'A' && path[0] <= 'Z') || (path[0] >= 'a' && path[0] <= 'z');
    if ((path[0] == '\\' || path[0] == '/') && path[1] == path[0]) return 1;
    return drive && path[1] == ':' && (path[2] == '\\' || path[2] == '/');
}

static int moer_path_absolute(const char *path, char *absolute, size_t size) {
    DWORD length = GetFullPathNameA(path, (DWORD)size, absolute, NULL);
    return length > 0 && length < size;
}

static uint64_t moer_random(void) {
    LARGE_INTEGER ticks;
    uint64_t value;
    QueryPerformanceCounter(&ticks);
    value = (uint64_t)ticks.QuadPart ^ ((uint64_t)GetCurrentProcessId() << 40) ^
            ((uint64_t)GetCurrentThreadId() << 20) ^ (uint64_t)(uintptr_t)&ticks;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

static moer_path_kind moer_kind_of_attributes(DWORD attributes) {
    if (attributes & FILE_ATTRIBUTE_DIRECTORY) return MOER_PATH_FOLDER;
    return attributes & FILE_ATTRIBUTE_DEVICE ? MOER_PATH_OTHER : MOER_PATH_FILE;
}

static moer_path_kind moer_path_inspect(const char *path) {
    DWORD attributes = GetFileAttributesA(path);
    return attributes == INVALID_FILE_ATTRIBUTES ? MOER_PATH_OTHER : moer_kind_of_attributes(attributes);
}

static moer_file moer_file_open(const char *path) {
    return CreateFileA(path, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL, OPEN_EXISTING,
                       FILE_ATTRIBUTE_NORMAL | FILE_FLAG_OPEN_REPARSE_POINT, NULL);
}

static moer_file moer_file_create(const char *path, int shared) {
    (void)shared; /* the folder's access list decides */
    return CreateFileA(path, GENERIC_WRITE, FILE_SHARE_DELETE, NULL, CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL);
}

/* Access lists aren't read: the default folder is the user's own. */
static int moer_file_inspect(moer_file file, moer_file_info *info) {
    BY_HANDLE_FILE_INFORMATION data;
    memset(info, 0, sizeof *info);
    if (!GetFileInformationByHandle(file, &data)) return 0;
    if (data.dwFileAttributes & FILE_ATTRIBUTE_REPARSE_POINT) info->kind = MOER_PATH_OTHER;
    else info->kind = moer_kind_of_attributes(data.dwFileAttributes);
    info->size = (uint64_t)data.nFileSizeHigh << 32 | data.nFileSizeLow;
    info->owned = 1;
    return 1;
}

static long moer_file_read(moer_file file, void *data, size_t size) {
    DWORD count = 0;
    if (!ReadFile(file, data, size > 0x10000000u ? 0x10000000u : (DWORD)size, &count, NULL)) return -1;
    return (long)count;
}

static long moer_file_write(moer_file file, const void *data, size_t size) {
    DWORD count = 0;
    if (!WriteFile(file, data, size > 0x10000000u ? 0x10000000u : (DWORD)size, &count, NULL)) return -1;
    return (long)count;
}

static int moer_file_flush(moer_file file) { return FlushFileBuffers(file) != 0; }
static int moer_file_close(moer_file file) { return CloseHandle(file) != 0; }
static int moer_file_remove(const char *path) { return DeleteFileA(path) != 0; }

/* Virus scanners and indexers open new files for a moment; hence the repetitions, 150 ms at most. */
static int moer_file_rename(const char *from, const char *to) {
    DWORD wait;
    for (wait = 10; wait <= 80; wait *= 2) {
        if (MoveFileExA(from, to, MOVEFILE_REPLACE_EXISTING)) return 1;
        if (GetLastError() != ERROR_SHARING_VIOLATION && GetLastError() != ERROR_ACCESS_DENIED) return 0;
        Sleep(wait);
    }
    return MoveFileExA(from, to, MOVEFILE_REPLACE_EXISTING) != 0;
}

static double moer_file_age(const char *path) {
    WIN32_FILE_ATTRIBUTE_DATA data;
    FILETIME now;
    uint64_t from, to;
    if (!GetFileAttributesExA(path, GetFileExInfoStandard, &data)) return -1;
    GetSystemTimeAsFileTime(&now);
    from = (uint64_t)data.ftLastWriteTime.dwHighDateTime << 32 | data.ftLastWriteTime.dwLowDateTime;
    to = (uint64_t)now.dwHighDateTime << 32 | now.dwLowDateTime;
    return to > from ? (double)(to - from) * 1e-7 : 0;
}

static int moer_folder_create(const char *path, int shared) {
    (void)shared;
    return CreateDirectoryA(path, NULL) != 0;
}

static int moer_folder_inspect(const char *path, moer_file_info *info) {
    DWORD attributes = GetFileAttributesA(path);
    memset(info, 0, sizeof *info);
    if (attributes == INVALID_FILE_ATTRIBUTES) return 0;
    if (!(attributes & FILE_ATTRIBUTE_DIRECTORY) || (attributes & FILE_ATTRIBUTE_REPARSE_POINT)) {
        SetLastError(ERROR_DIRECTORY);
        return 0;
    }
    info->kind = MOER_PATH_FOLDER;
    info->owned = 1;
    return 1;
}

static int moer_folder_open(moer_folder *folder, const char *path) {
    char pattern[MOER_PATH_MAX];
    if (!moer_text_set(pattern, sizeof pattern, path) || !moer_append(pattern, sizeof pattern, "/*")) return 0;
    folder->search = FindFirstFileA(pattern, &folder->entry);
    folder->started = 0;
    return folder->search != INVALID_HANDLE_VALUE;
}

static const char *moer_folder_next(moer_folder *folder) {
    if (folder->started && !FindNextFileA(folder->search, &folder->entry)) return NULL;
    folder->started = 1;
    return folder->entry.cFileName;
}

static void moer_folder_close(moer_folder *folder) { FindClose(folder->search); }

#else /* POSIX */

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

static const char *moer_environment(const char *name) {
    const char *value;
    if (getuid() != geteuid() || getgid() != getegid()) return NULL;
#if defined(AT_SECURE)
    if (getauxval(AT_SECURE)) return NULL; /* file capabilities, too */
#endif
    value = getenv(name);
    return value && value[0] ? value : NULL;
}

static void moer_system_error(char *text, size_t size) { snprintf(text, size, "%s", strerror(errno)); }

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

/* locale_t is a pointer in every C library that NVRTC runs with. */
static void moer_locale_begin(moer_locale *locale) {
#if defined(LC_ALL_MASK)
    const int mask = LC_ALL_MASK;
#else
    const int mask = 1 << LC_NUMERIC; /* the categories left out come from "C" as well */
#endif
    void *(*new_locale)(int, const char *, void *) = (void *(*)(int, const char *, void *))moer_hidden("newlocale");
    void *(*use_locale)(void *) = (void *(*)(void *))moer_hidden("uselocale");
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
}

static int moer_home_folder(char *folder, size_t size) {
    typedef int (*password_entry)(uid_t, struct passwd *, char *, size_t, struct passwd **);
    const char *home = moer_environment("HOME");
    password_entry get_entry;
    struct passwd entry, *found = NULL;
    char text[8192];
    if (home && home[0] == '/' && home[1] != '\0') return moer_text_set(folder, size, home);
    get_entry = (password_entry)moer_hidden("getpwuid_r");
    if (!get_entry || get_entry(geteuid(), &entry, text, sizeof text, &found) != 0) return 0;
    if (!found || !found->pw_dir) return 0;
    return found->pw_dir[0] == '/' && found->pw_dir[1] != '\0' && moer_text_set(folder, size, found->pw_dir);
}

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
    info->owned = status->st_uid == geteuid();
    info->writable_by_others = (status->st_mode & 022) != 0;
}

static moer_path_kind moer_path_inspect(const char *path) {
    struct stat status;
    moer_file_info info;
    if (stat(path, &status) != 0) return MOER_PATH_OTHER;
    moer_info_of_stat(&status, &info);
    return info.kind;
}

/* Without waiting, should the name turn out to be a pipe. */
static int moer_open(const char *path, int flags, int mode) {
    int file;
    do {
        file = open(path, flags | MOER_O_NOFOLLOW | MOER_O_CLOEXEC | O_NONBLOCK, mode);
    } while (file < 0 && errno == EINTR);
    return file;
}

static moer_file moer_file_open(const char *path) { return moer_open(path, O_RDONLY, 0); }

static moer_file moer_file_create(const char *path, int shared) {
    return moer_open(path, O_WRONLY | O_CREAT | O_EXCL, shared ? 0666 : 0600);
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

static double moer_file_age(const char *path) {
    struct stat status;
    double age;
    if (stat(path, &status) != 0) return -1;
    age = difftime(time(NULL), status.st_mtime);
    return age > 0 ? age : 0;
}

static int moer_folder_create(const char *path, int shared) { return mkdir(path, shared ? 0777 : 0700) == 0; }

static int moer_folder_inspect(const char *path, moer_file_info *info) {
    int file = moer_open(path, O_RDONLY | MOER_O_DIRECTORY, 0), inspected;
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
