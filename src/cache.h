/*
  cache.h: what the parts that keep compiled variants offer the others: cache_entry.c (key and entry), cache_folder.c (which
  folders), cache_file.c (reading and writing one entry), cache_trim.c (what leaves the folder), pack.c and pack_write.c
  (many entries in one file), cache.c (the order in which all these are asked) and cache_calls.c (public functions).
  Included by internal.h. How code is compiled, and what the driver makes of it, doesn't belong here.
*/
#ifndef MOER_CACHE
#define MOER_CACHE 1

#define MOER_CACHE_DEFAULT_LIMIT ((uint64_t)1 << 30) /* bytes */
#define MOER_CACHE_RECENT 3600 /* seconds: what was used or written within them stays, and isn't marked as used again */

/* ---- cache_entry.c ---- */
typedef struct moer_key { /* what a variant is looked up by; needs neither NVRTC nor the driver */
    char text[1152]; /* the whole key, length-prefixed */
    size_t text_size;
    uint32_t target;
    unsigned char digest[32]; /* SHA-256 of the text */
} moer_key;

typedef struct moer_entry { /* an entry that passed every check; the pointers lie within its bytes */
    const unsigned char *payload;
    size_t payload_size;
    const char *key_text; /* not terminated */
    size_t key_size;
    uint32_t target, nvrtc_version, driver_version, library_version;
    int is_code; /* 0: results of tuning */
} moer_entry;

#define MOER_ENTRY_MAX_PAYLOAD (16u << 20)
#define MOER_ENTRY_MAX_SIZE (MOER_ENTRY_MAX_PAYLOAD + 4096u) /* a header is below 4 KB */

static void moer_write_number(unsigned char *bytes, uint64_t value, unsigned size); /* little-endian */
static uint64_t moer_read_number(const unsigned char *bytes, unsigned size);
static void moer_digest(const void *data, size_t size, unsigned char digest[32]);
static int moer_key_make(moer_key *key, const char *family, const char *defines, uint32_t target); /* 0: too long */
/* The texts that an entry's key is made of, cut where they don't fit; 0 when it isn't such a key. `current`: the kernels
   and switches are those of this library. */
static int moer_key_read(const moer_entry *entry, char *family, size_t family_size, char *defines, size_t defines_size, int *current);
static int moer_entry_parse(const unsigned char *bytes, size_t size, moer_entry *entry); /* 0: anything is wrong with it */
static int moer_entry_is_for(const moer_entry *entry, const moer_key *key);
/* The payload of results of tuning begins so. */
#define MOER_TUNING_MAGIC "moe_route tuning 1\n"
/* The bytes of an entry; data NULL when there is no memory, or the payload is none that can be kept. */
static moer_bytes moer_entry_make(moe_route_context *context, const moer_key *key, const moer_bytes *payload);

/* ---- cache_folder.c ---- */
typedef struct moer_path { char text[MOER_PATH_MAX]; } moer_path;

typedef struct moer_cache {
    const moer_files *files;
    char folder[MOER_PATH_MAX];  /* <root>/v1 once it is checked; empty: the disk isn't written */
    moer_path *read_only;        /* folders that are searched before it, likewise */
    uint32_t num_read_only;
    int trust_shared;            /* others may own or write folders, entries and packs */
    int refresh;                 /* nothing is read from folders */
    uint64_t limit;              /* bytes that the folder may hold */
    /* under the context's mutex: */
    int writable;                /* cleared by the first write that fails */
    int trimming;                /* a thread is about it */
    unsigned stores;             /* numbers the temporary files */
    uint64_t bytes;              /* what the folder holds, as far as this context knows */
    uint64_t trim_at;            /* where that makes it look again; 0: it hasn't looked yet */
} moer_cache;

/* Decides on the folders, once, when a context is created. Never fails: without a usable folder the cache is memory. */
static void moer_cache_open(moe_route_context *context, const moe_route_context_desc *desc);
static void moer_cache_close(moe_route_context *context);
static void moer_cache_create_folders(const moer_cache *cache, char *path); /* as far as they don't exist */
/* Whether entries may lie in a folder. On refusal `why` says what is wrong with it. */
static int moer_cache_check_folder(const moer_cache *cache, const char *path, int read_only, char *why, size_t size);
/* <folder>/<first byte of the digest>, and with `whole` the entry's path in it. */
static void moer_cache_path(const char *folder, const unsigned char digest[32], int whole, char *path, size_t size);

/* ---- cache_file.c ---- */
typedef enum moer_found {
    MOER_FOUND_NOTHING = 0,
    MOER_FOUND_BYTES = 1,
    MOER_FOUND_UNUSABLE = 2, /* there is something that may not or can't be used */
    MOER_FOUND_FOLDER = 3    /* likewise, and writing an entry wouldn't replace it */
} moer_found;
typedef enum moer_read_kind {
    MOER_READ_OWN = 0,       /* an entry of the context's own folder: nobody else may have written it */
    MOER_READ_READ_ONLY = 1, /* an entry of another folder: the system's administrator may have, too */
    MOER_READ_PACK = 2       /* likewise, larger, and the path may be a symbolic link */
} moer_read_kind;
/* A whole file that may be used by its kind, owner, mode and size. On UNUSABLE or FOLDER `why` tells the reason. */
static moer_found moer_cache_read(moe_route_context *context, const char *path, moer_read_kind kind, moer_bytes *bytes,
                                  moer_file_info *info, char *why, size_t size);
/* Writes a new file and flushes it; on failure nothing stays behind, and `why` says what happened. */
static int moer_cache_write_file(const moer_files *files, const char *path, const moer_bytes *bytes, int mode, char *why, size_t size);
/* Publishes an entry in the context's folder. 0: `why` tells what failed. */
static int moer_cache_publish(moe_route_context *context, const moer_key *key, const moer_bytes *entry, char *why, size_t size);

/* ---- cache_trim.c ---- */
typedef struct moer_cache_file { /* a file of the folder */
    char path[MOER_PATH_MAX];
    unsigned char digest[32]; /* its name, for an entry */
    int is_entry;             /* 0: a temporary file */
    moer_file_info info;
} moer_cache_file;
/* Visits all entries and temporary files of the context's folder. A visitor's 0 ends it, and is returned. */
static int moer_cache_walk(moe_route_context *context, int (*visit)(moe_route_context *context, const moer_cache_file *file, void *user), void *user);
/* After an entry of `size` bytes was written: now and then removes left-over temporary files, and the entries that were used
   longest ago when the folder has outgrown its limit. */
static void moer_cache_trim(moe_route_context *context, const moer_key *written, size_t size);

/* ---- pack.c ---- */
typedef struct moer_pack {
    struct moer_pack *next;
    const unsigned char *data;
    unsigned char *owned; /* the same bytes when they were read from a file */
    size_t size;
    uint32_t count;
    char *name;           /* for messages */
} moer_pack;

#define MOER_PACK_MAX_SIZE ((size_t)1 << 30)
#define MOER_PACK_FORMAT 1u
#define MOER_PACK_HEAD 24u  /* header in front of the index */
#define MOER_PACK_INDEX 48u /* one entry of the index */
static const unsigned char *moer_pack_magic(void);
static const char *moer_pack_check(const unsigned char *data, size_t size, uint32_t *count); /* NULL, or what is wrong */
/* The bytes that the index has for a digest: not yet checked in any way. 0: none. */
static int moer_pack_find(const moer_pack *pack, const unsigned char digest[32], const unsigned char **bytes, size_t *size);
static void moer_packs_close(moe_route_context *context);

/* ---- cache.c ---- */
typedef struct moer_lookup { /* a variant being looked for, or what tuning found */
    moer_key key;
    int is_tuning;
    uint32_t place;           /* of the next one to ask: packs, read-only folders, the folder */
    int blocked;              /* a folder stands where the entry would be written */
    int missed;               /* the folders were asked and had nothing sound */
    moe_route_origin origin;
    moer_bytes bytes;         /* the entry that was found */
    moer_entry entry;
    char path[MOER_PATH_MAX]; /* of a file in the context's own folder; otherwise empty */
} moer_lookup;
/* The next sound entry, in lookup->bytes and lookup->entry; 0 when there is none (any more). */
static int moer_lookup_next(moe_route_context *context, moer_lookup *lookup);
/* The same in folders alone, without counting what is found; the first of them has number `first`. */
static int moer_lookup_in_folders(moe_route_context *context, moer_lookup *lookup, uint32_t first);
/* The driver refused the entry that was found: frees it, and removes its file if that is still the same. */
static void moer_lookup_refused(moe_route_context *context, moer_lookup *lookup);
/* Publishes an entry in the folder; a failure turns writing off and is logged once. */
static void moer_cache_store(moe_route_context *context, const moer_lookup *lookup, const moer_bytes *entry);
static void moer_count(moe_route_context *context, uint64_t *counter); /* one more, of context->statistics */

#endif /* MOER_CACHE */
