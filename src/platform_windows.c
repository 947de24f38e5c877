/*
  platform_windows.c: threads, the clock, the environment, shared libraries, the locale and files of Windows. Thin
  functions without policy: what a cache folder must look like, or where NVRTC is looked for, stands elsewhere.

  All texts are UTF-8; the system gets them as UTF-16, so that every path works whatever the code page is.
*/
#include "internal.h"

#if defined(_WIN32)

#include <aclapi.h>
#include <locale.h>
#if defined(_MSC_VER)
#pragma comment(lib, "advapi32.lib")
#endif

#define MOER_ENVIRONMENT_MAX 32768 /* the system's own limit */
#define MOER_WIDE_MAX (MOER_PATH_MAX + 8)
#define MOER_WIDE_SHORT 240u /* longer paths need the prefix that lifts the limit of 260 characters */

/* UTF-16 with backslashes; 0 when the text is no UTF-8 or too long. */
static int moer_wide(const char *text, wchar_t *wide, int size) {
    int i;
    if (MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, wide, size) == 0) {
        SetLastError(ERROR_INVALID_NAME);
        return 0;
    }
    for (i = 0; wide[i]; i++) {
        if (wide[i] == L'/') wide[i] = L'\\';
    }
    return 1;
}

static int moer_wide_path(const char *path, wchar_t wide[MOER_WIDE_MAX]) {
    static const wchar_t prefix[] = L"\\\\?\\";
    const int prefix_length = 4;
    size_t length = strlen(path);
    int lifted = length > MOER_WIDE_SHORT && length < MOER_PATH_MAX && path[1] == ':';
    if (lifted) memcpy(wide, prefix, sizeof prefix);
    return moer_wide(path, wide + (lifted ? prefix_length : 0), MOER_WIDE_MAX - prefix_length);
}

static int moer_narrow(const wchar_t *wide, char *text, size_t size) {
    return WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, (int)size, NULL, NULL) > 0;
}

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

static DWORD WINAPI moer_thread_run(LPVOID user) {
    moer_thread *thread = (moer_thread *)user;
    thread->function(thread->user);
    return 0;
}

static int moer_thread_start(moer_thread *thread, void (*function)(void *user), void *user) {
    thread->function = function;
    thread->user = user;
    thread->handle = CreateThread(NULL, 0, moer_thread_run, thread, 0, NULL);
    return thread->handle != NULL;
}

static void moer_thread_join(moer_thread *thread) {
    WaitForSingleObject(thread->handle, INFINITE);
    CloseHandle(thread->handle);
}

static uint32_t moer_processors(void) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwNumberOfProcessors > 1 ? (uint32_t)info.dwNumberOfProcessors : 1;
}

static double moer_milliseconds(void) {
    LARGE_INTEGER ticks, frequency;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&frequency);
    return (double)ticks.QuadPart * 1000.0 / (double)frequency.QuadPart;
}

static long moer_process_id(void) { return (long)GetCurrentProcessId(); }

static const char *moer_environment(const char *name, char *value, size_t size) {
    wchar_t wide_name[64], wide[MOER_ENVIRONMENT_MAX];
    DWORD length;
    if (!moer_wide(name, wide_name, 64)) return NULL;
    length = GetEnvironmentVariableW(wide_name, wide, MOER_ENVIRONMENT_MAX);
    if (length == 0 || length >= MOER_ENVIRONMENT_MAX) return NULL;
    if (length >= size) wide[size - 1] = L'\0';
    while (!moer_narrow(wide, value, size)) wide[--length] = L'\0'; /* a character may take several bytes */
    return value;
}

static void moer_system_error(char *text, size_t size) {
    snprintf(text, size, "Windows error %lu", (unsigned long)GetLastError());
}

static int moer_system_error_is_absence(void) {
    return GetLastError() == ERROR_FILE_NOT_FOUND || GetLastError() == ERROR_PATH_NOT_FOUND;
}

/* ---- libraries ---- */

static void *moer_library_open(const char *path) {
    wchar_t wide[MOER_WIDE_MAX];
    HMODULE module;
    UINT mode;
    if (!moer_wide(path, wide, MOER_WIDE_MAX)) return NULL;
    mode = SetErrorMode(SEM_FAILCRITICALERRORS); /* no dialog about a broken library */
    module = LoadLibraryExW(wide, NULL,
                            moer_path_is_absolute(path) ? LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS
                                                        : LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
    SetErrorMode(mode);
    return (void *)module;
}

static void *moer_library_loaded(const char *name) {
    wchar_t wide[MOER_WIDE_MAX];
    return moer_wide(name, wide, MOER_WIDE_MAX) ? (void *)GetModuleHandleW(wide) : NULL;
}

static moer_function moer_library_symbol(void *library, const char *name) {
    FARPROC address = GetProcAddress((HMODULE)library, name);
    moer_function function = NULL;
    memcpy(&function, &address, sizeof function);
    return function;
}

static void moer_library_error(char *text, size_t size) { moer_system_error(text, size); }

/* Folder of a loaded module; NULL is the program itself. */
static int moer_module_folder(HMODULE module, char *folder, size_t size) {
    wchar_t wide[MOER_PATH_MAX];
    DWORD length = GetModuleFileNameW(module, wide, MOER_PATH_MAX);
    return length > 0 && length < MOER_PATH_MAX && moer_narrow(wide, folder, size) && moer_path_parent(folder);
}

static int moer_library_folder(moer_function function, char *folder, size_t size) {
    HMODULE module;
    LPCWSTR address;
    memcpy(&address, &function, sizeof address);
    return GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
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

/* ---- paths ---- */

static int moer_home_folder(char *folder, size_t size) {
    return moer_environment("USERPROFILE", folder, size) && moer_path_is_absolute(folder);
}

static int moer_path_is_separator(char character) { return character == '/' || character == '\\'; }

static int moer_path_is_absolute(const char *path) {
    int drive = (path[0] >= 'A' && path[0] <= 'Z') || (path[0] >= 'a' && path[0] <= 'z');
    if (moer_path_is_separator(path[0]) && moer_path_is_separator(path[1])) return 1;
    return drive && path[1] == ':' && moer_path_is_separator(path[2]);
}

static int moer_path_absolute(const char *path, char *absolute, size_t size) {
    wchar_t wide[MOER_WIDE_MAX], full[MOER_PATH_MAX];
    DWORD length;
    if (!moer_wide(path, wide, MOER_WIDE_MAX)) return 0;
    length = GetFullPathNameW(wide, MOER_PATH_MAX, full, NULL);
    return length > 0 && length < MOER_PATH_MAX && moer_narrow(full, absolute, size);
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
    return (attributes & FILE_ATTRIBUTE_DEVICE) ? MOER_PATH_OTHER : MOER_PATH_FILE;
}

static moer_path_kind moer_path_inspect(const char *path) {
    wchar_t wide[MOER_WIDE_MAX];
    DWORD attributes = moer_wide_path(path, wide) ? GetFileAttributesW(wide) : INVALID_FILE_ATTRIBUTES;
    return attributes == INVALID_FILE_ATTRIBUTES ? MOER_PATH_OTHER : moer_kind_of_attributes(attributes);
}

/* ---- files ---- */

static int64_t moer_seconds_of(FILETIME time) {
    return (int64_t)(((uint64_t)time.dwHighDateTime << 32 | time.dwLowDateTime) / 10000000u);
}

static int64_t moer_files_now(void) {
    FILETIME now;
    GetSystemTimeAsFileTime(&now);
    return moer_seconds_of(now);
}

static HANDLE moer_open(const char *path, DWORD access, DWORD disposition, DWORD flags) {
    wchar_t wide[MOER_WIDE_MAX];
    if (!moer_wide_path(path, wide)) return MOER_NO_FILE;
    return CreateFileW(wide, access, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL, disposition, flags, NULL);
}

static moer_file moer_file_open(const char *path, int follow) {
    return moer_open(path, GENERIC_READ, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL | (follow ? 0u : (DWORD)FILE_FLAG_OPEN_REPARSE_POINT));
}

/* The folder's access list decides who may read and write the file. */
static moer_file moer_file_create(const char *path, int mode) {
    (void)mode;
    return moer_open(path, GENERIC_WRITE, CREATE_NEW, FILE_ATTRIBUTE_NORMAL);
}

/* What the process's token says of its user: [0] the user, [1] the owner of what the process creates. */
static int moer_token_owns(PSID owner) {
    union {
        TOKEN_USER user;
        TOKEN_OWNER owner;
        char space[sizeof(TOKEN_USER) + SECURITY_MAX_SID_SIZE];
    } data;
    HANDLE token;
    DWORD size;
    int owns;
    if (!OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &token)) return 0;
    owns = GetTokenInformation(token, TokenUser, &data, sizeof data, &size) && EqualSid(owner, data.user.User.Sid);
    if (!owns) owns = GetTokenInformation(token, TokenOwner, &data, sizeof data, &size) && EqualSid(owner, data.owner.Owner);
    CloseHandle(token);
    return owns;
}

static int moer_sid_is_system(PSID sid) {
    return IsWellKnownSid(sid, WinLocalSystemSid) || IsWellKnownSid(sid, WinBuiltinAdministratorsSid);
}

/* Does the access list let anyone write but the user and the system's own accounts? What isn't understood does. */
static int moer_list_lets_others_write(PACL list) {
    const ACCESS_MASK writing = FILE_WRITE_DATA | FILE_APPEND_DATA | FILE_DELETE_CHILD | DELETE | WRITE_DAC | WRITE_OWNER |
                                GENERIC_WRITE | GENERIC_ALL;
    DWORD i;
    if (!list) return 1; /* no list: everyone may do everything */
    for (i = 0; i < list->AceCount; i++) {
        void *entry;
        ACCESS_ALLOWED_ACE *allowed;
        PSID sid;
        if (!GetAce(list, i, &entry)) return 1;
        allowed = (ACCESS_ALLOWED_ACE *)entry;
        if (allowed->Header.AceType == ACCESS_DENIED_ACE_TYPE || (allowed->Header.AceFlags & INHERIT_ONLY_ACE)) continue;
        if (allowed->Header.AceType != ACCESS_ALLOWED_ACE_TYPE) return 1;
        if (!(allowed->Mask & writing)) continue;
        sid = (PSID)&allowed->SidStart;
        if (!moer_token_owns(sid) && !moer_sid_is_system(sid) && !IsWellKnownSid(sid, WinCreatorOwnerSid)) return 1;
    }
    return 0;
}

static void moer_inspect_access(HANDLE file, moer_file_info *info) {
    PSECURITY_DESCRIPTOR descriptor = NULL;
    PSID owner = NULL;
    PACL list = NULL;
    info->owner = MOER_OWNER_OTHER;
    info->writable_by_others = 1;
    if (GetSecurityInfo(file, SE_FILE_OBJECT, OWNER_SECURITY_INFORMATION | DACL_SECURITY_INFORMATION, &owner, NULL, &list,
                        NULL, &descriptor) != ERROR_SUCCESS) {
        return;
    }
    if (owner && moer_token_owns(owner)) info->owner = MOER_OWNER_SELF;
    else if (owner && moer_sid_is_system(owner)) info->owner = MOER_OWNER_SYSTEM;
    info->writable_by_others = moer_list_lets_others_write(list);
    LocalFree(descriptor);
}

static int moer_file_inspect(moer_file file, moer_file_info *info) {
    BY_HANDLE_FILE_INFORMATION data;
    memset(info, 0, sizeof *info);
    if (!GetFileInformationByHandle(file, &data)) return 0;
    if (data.dwFileAttributes & FILE_ATTRIBUTE_REPARSE_POINT) info->kind = MOER_PATH_OTHER;
    else info->kind = moer_kind_of_attributes(data.dwFileAttributes);
    info->size = (uint64_t)data.nFileSizeHigh << 32 | data.nFileSizeLow;
    info->modified = moer_seconds_of(data.ftLastWriteTime);
    moer_inspect_access(file, info);
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

static int moer_file_remove(const char *path) {
    wchar_t wide[MOER_WIDE_MAX];
    return moer_wide_path(path, wide) && DeleteFileW(wide);
}

/* Virus scanners and indexers open new files for a moment; hence the repetitions, 150 ms at most. */
static int moer_file_rename(const char *from, const char *to) {
    wchar_t wide_from[MOER_WIDE_MAX], wide_to[MOER_WIDE_MAX];
    DWORD wait;
    if (!moer_wide_path(from, wide_from) || !moer_wide_path(to, wide_to)) return 0;
    for (wait = 10; wait <= 80; wait *= 2) {
        if (MoveFileExW(wide_from, wide_to, MOVEFILE_REPLACE_EXISTING)) return 1;
        if (GetLastError() != ERROR_SHARING_VIOLATION && GetLastError() != ERROR_ACCESS_DENIED) return 0;
        Sleep(wait);
    }
    return MoveFileExW(wide_from, wide_to, MOVEFILE_REPLACE_EXISTING) != 0;
}

static int moer_file_touch(const char *path) {
    HANDLE file = moer_open(path, FILE_WRITE_ATTRIBUTES, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL | FILE_FLAG_OPEN_REPARSE_POINT);
    FILETIME now;
    int touched;
    if (file == MOER_NO_FILE) return 0;
    GetSystemTimeAsFileTime(&now);
    touched = SetFileTime(file, NULL, NULL, &now) != 0;
    CloseHandle(file);
    return touched;
}

static int moer_folder_create(const char *path, int mode) {
    wchar_t wide[MOER_WIDE_MAX];
    (void)mode;
    return moer_wide_path(path, wide) && CreateDirectoryW(wide, NULL);
}

static int moer_folder_inspect(const char *path, moer_file_info *info) {
    HANDLE folder = moer_open(path, GENERIC_READ, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS | FILE_FLAG_OPEN_REPARSE_POINT);
    int inspected;
    if (folder == MOER_NO_FILE) return 0;
    inspected = moer_file_inspect(folder, info);
    CloseHandle(folder);
    if (inspected && info->kind != MOER_PATH_FOLDER) SetLastError(ERROR_DIRECTORY);
    return inspected && info->kind == MOER_PATH_FOLDER;
}

static int moer_folder_open(moer_folder *folder, const char *path) {
    wchar_t wide[MOER_WIDE_MAX];
    char pattern[MOER_PATH_MAX];
    if (!moer_text_set(pattern, sizeof pattern, path) || !moer_append(pattern, sizeof pattern, "/*")) return 0;
    if (!moer_wide_path(pattern, wide)) return 0;
    folder->search = FindFirstFileW(wide, &folder->entry);
    folder->started = 0;
    return folder->search != INVALID_HANDLE_VALUE;
}

static const char *moer_folder_next(moer_folder *folder) {
    do {
        if (folder->started && !FindNextFileW(folder->search, &folder->entry)) return NULL;
        folder->started = 1;
    } while (!moer_narrow(folder->entry.cFileName, folder->name, sizeof folder->name));
    return folder->name;
}

static void moer_folder_close(moer_folder *folder) { FindClose(folder->search); }

#endif
