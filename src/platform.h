/*
  platform.h: what platform.c, platform_posix.c and platform_windows.c offer the others: threads, the clock, the
  environment, shared libraries, the locale, files. Included by internal.h; part of the implementation's one translation
  unit. Nothing that knows CUDA, caches or experts belongs here.

  Texts are bytes on POSIX systems, and UTF-8 on Windows.
*/
#ifndef MOER_PLATFORM
#define MOER_PLATFORM 1

#if defined(_WIN32)
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
typedef SRWLOCK moer_mutex;
typedef CONDITION_VARIABLE moer_condition;
typedef HANDLE moer_thread_handle;
typedef HANDLE moer_file;
#define MOER_NO_FILE INVALID_HANDLE_VALUE
typedef struct moer_folder { /* being listed */
    HANDLE search;
    WIN32_FIND_DATAW entry;
    char name[4 * MAX_PATH];
    int started;
} moer_folder;
typedef struct moer_locale {
    int per_thread;
    char saved[256];
} moer_locale;
#else
#include <dirent.h>
#include <pthread.h>
typedef pthread_mutex_t moer_mutex;
typedef pthread_cond_t moer_condition;
typedef pthread_t moer_thread_handle;
typedef int moer_file;
#define MOER_NO_FILE (-1)
typedef struct moer_folder { /* being listed */
    DIR *stream;
} moer_folder;
typedef struct moer_locale {
    void *saved, *neutral;
} moer_locale;
#endif

#define MOER_PATH_MAX 4096 /* longer paths are refused, not cut */

static void moer_mutex_init(moer_mutex *mutex);
static void moer_mutex_destroy(moer_mutex *mutex);
static void moer_mutex_lock(moer_mutex *mutex);
static void moer_mutex_unlock(moer_mutex *mutex);
static void moer_condition_init(moer_condition *condition);
static void moer_condition_destroy(moer_condition *condition);
static void moer_condition_wait(moer_condition *condition, moer_mutex *mutex);
static void moer_condition_broadcast(moer_condition *condition);

typedef struct moer_thread {
    moer_thread_handle handle;
    void (*function)(void *user);
    void *user;
} moer_thread;
static int moer_thread_start(moer_thread *thread, void (*function)(void *user), void *user); /* *thread stays until the join */
static void moer_thread_join(moer_thread *thread);
static uint32_t moer_processors(void); /* at least 1 */

static double moer_milliseconds(void); /* of a clock that only serves for differences */
static long moer_process_id(void);
/* The value, copied into `value`, and cut where it doesn't fit: a path of that length is refused everywhere. NULL when it is
   unset or empty, and always when the process runs with more rights than its user (setuid). */
static const char *moer_environment(const char *name, char *value, size_t size);

typedef void (*moer_function)(void); /* any function's address; cast to its type before use */
/* NULL when it can't be loaded. Never closed. On Windows a bare name means the system's folder or the program's, and what
   an absolute path's library needs is looked for beside it, too; never in the current folder or along PATH. */
static void *moer_library_open(const char *path);
static void *moer_library_loaded(const char *name); /* NULL unless this process has it loaded already */
static moer_function moer_library_symbol(void *library, const char *name);
static void moer_library_error(char *text, size_t size); /* why this thread's last moer_library_open failed */
/* Folder of the library that a function lies in, without a closing slash; 0 when unknown. */
static int moer_library_folder(moer_function function, char *folder, size_t size);

/* Makes "C" this thread's locale, and puts back what it was, for the process, too. NVRTC 12 changes both, and reads numbers by
   them. */
static void moer_locale_begin(moer_locale *locale);
static void moer_locale_end(const moer_locale *locale);

static int moer_home_folder(char *folder, size_t size);       /* of the user that the process acts as; 0: none */
static int moer_executable_folder(char *folder, size_t size); /* without a closing slash; 0 when unknown */
static int moer_path_is_separator(char character);
static int moer_path_is_absolute(const char *path);
static int moer_path_absolute(const char *path, char *absolute, size_t size); /* 0 when it doesn't fit */
static int moer_path_parent(char *path); /* cuts the last component off, in place; 0 when there is none */
static int moer_text_set(char *buffer, size_t size, const char *text); /* copies; 0 when it doesn't fit */
static uint64_t moer_random(void); /* for names that must not collide; not a secret */

typedef enum moer_path_kind { MOER_PATH_OTHER = 0, MOER_PATH_FILE = 1, MOER_PATH_FOLDER = 2 } moer_path_kind;
static moer_path_kind moer_path_inspect(const char *path); /* follows symbolic links; OTHER when there is nothing, too */
static void moer_system_error(char *text, size_t size);    /* the reason of this thread's last failed file operation */
static int moer_system_error_is_absence(void);             /* it is that there is no such file or folder */

typedef enum moer_owner { MOER_OWNER_OTHER = 0, MOER_OWNER_SELF = 1, MOER_OWNER_SYSTEM = 2 } moer_owner;
typedef struct moer_file_info {
    moer_path_kind kind;
    uint64_t size;
    int64_t modified;       /* seconds, by the file system's clock */
    moer_owner owner;       /* SELF: the user that the process acts as; SYSTEM: root, when that is another */
    int writable_by_others; /* by anyone but the owner and the system's own accounts */
} moer_file_info;

/* Every operation by which the cache and packs read, change and list files, so that tests can make each of them fail.
   int results are 1 or 0; a failure leaves its reason for moer_system_error. Interrupted calls are repeated within. */
typedef struct moer_files {
    int64_t (*now)(void);                             /* seconds, comparable to moer_file_info.modified */
    moer_file (*open)(const char *path, int follow);  /* to read, without ever waiting; a symbolic link is refused unless `follow` */
    moer_file (*create)(const char *path, int mode);  /* to write a file that must not exist; POSIX mode, under the umask */
    int (*inspect)(moer_file file, moer_file_info *info);
    long (*read)(moer_file file, void *data, size_t size);        /* bytes read, maybe fewer; 0 at the end; -1 */
    long (*write)(moer_file file, const void *data, size_t size); /* bytes written, maybe fewer; -1 */
    int (*flush)(moer_file file);
    int (*close)(moer_file file);                     /* 0 when a write that was put off fails now */
    int (*rename)(const char *from, const char *to);  /* atomic; replaces a file or a link, not a folder */
    int (*remove)(const char *path);
    int (*touch)(const char *path);                   /* modified: now */
    int (*folder_create)(const char *path, int mode); /* one level */
    int (*folder_inspect)(const char *path, moer_file_info *info); /* 0 for a symbolic link, too */
    int (*folder_open)(moer_folder *folder, const char *path);
    const char *(*folder_next)(moer_folder *folder);  /* a name, valid until the next call; NULL at the end */
    void (*folder_close)(moer_folder *folder);
} moer_files;

#endif /* MOER_PLATFORM */
