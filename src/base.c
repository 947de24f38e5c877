/*
  base.c: memory, messages, checked sizes, status names and the version: what every other part uses. Nothing that knows an
  operating system, CUDA or experts belongs here.
*/
#include "internal.h"

static void *moer_alloc(moe_route_context *context, size_t size) {
    void *memory;
    size_t bytes = size ? size : 1;
    if (context->allocator.alloc) memory = context->allocator.alloc(bytes, context->allocator.user);
    else memory = malloc(bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void moer_free(moe_route_context *context, void *memory) {
    if (!memory) return;
    if (context->allocator.free) context->allocator.free(memory, context->allocator.user);
    else free(memory);
}

static int moer_size_mul(size_t a, size_t b, size_t *result) {
    if (a != 0 && b > (size_t)-1 / a) return 0;
    *result = a * b;
    return 1;
}

static uint32_t moer_divide_up(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

static int moer_size_add(size_t a, size_t b, size_t *result) {
    if (b > (size_t)-1 - a) return 0;
    *result = a + b;
    return 1;
}

static int moer_append(char *buffer, size_t size, const char *format, ...) {
    size_t used = strlen(buffer);
    int length;
    va_list arguments;
    va_start(arguments, format);
    length = vsnprintf(buffer + used, size - used, format, arguments);
    va_end(arguments);
    return length >= 0 && (size_t)length < size - used;
}

/* The formatted text from malloc; NULL when there is no memory. */
static char *moer_format(const char *format, va_list arguments) {
    va_list again;
    char *text;
    int length;
    va_copy(again, arguments);
    length = vsnprintf(NULL, 0, format, again);
    va_end(again);
    if (length < 0) return NULL;
    text = (char *)malloc((size_t)length + 1);
    if (text) vsnprintf(text, (size_t)length + 1, format, arguments);
    return text;
}

static const char moer_text_lost[] = "the call failed, and there was no memory left for a message that says why";

/* The context's logger, called without its mutex: it may call moe_route_message. */
static void moer_log_text(moe_route_context *context, moe_route_log_level level, const char *text) {
    if (context->logger.log) context->logger.log(level, text, context->logger.user);
}

static void moer_log(moe_route_context *context, moe_route_log_level level, const char *format, ...) {
    va_list arguments;
    char *text;
    if (!context->logger.log) return;
    va_start(arguments, format);
    text = moer_format(format, arguments);
    va_end(arguments);
    if (text) moer_log_text(context, level, text);
    free(text);
}

static moe_route_status moer_fail(moe_route_context *context, moe_route_status status, const char *format, ...) {
    va_list arguments;
    char *text, *replaced;
    va_start(arguments, format);
    text = moer_format(format, arguments);
    va_end(arguments);
    /* logged before it is stored, from where another thread's failure may free it */
    moer_log_text(context, MOE_ROUTE_LOG_ERROR, text ? text : moer_text_lost);
    moer_mutex_lock(&context->mutex);
    replaced = context->message;
    context->message = text;
    context->message_lost = text == NULL;
    moer_mutex_unlock(&context->mutex);
    free(replaced);
    return status;
}

/* Copies as much of a text as fits, terminated, and returns its full length. */
static size_t moer_copy_text(const char *from, char *text, size_t size) {
    size_t length = strlen(from);
    if (size > 0) {
        size_t copied = length < size ? length : size - 1;
        memcpy(text, from, copied);
        text[copied] = '\0';
    }
    return length;
}

MOE_ROUTE_API size_t moe_route_message(const moe_route_context *context, char *text, size_t size) {
    moer_mutex *mutex;
    size_t length;
    if (!context) return moer_copy_text("out of memory", text, size);
    mutex = (moer_mutex *)&context->mutex; /* reading a message changes nothing that the caller can see */
    moer_mutex_lock(mutex);
    if (context->message) length = moer_copy_text(context->message, text, size);
    else length = moer_copy_text(context->message_lost ? moer_text_lost : "", text, size);
    moer_mutex_unlock(mutex);
    return length;
}

MOE_ROUTE_API const char *moe_route_version(void) { return MOE_ROUTE_VERSION; }

MOE_ROUTE_API const char *moe_route_status_name(moe_route_status status) {
    switch (status) {
        case MOE_ROUTE_OK: return "OK";
        case MOE_ROUTE_ERROR_ARGUMENT: return "ERROR_ARGUMENT";
        case MOE_ROUTE_ERROR_MEMORY: return "ERROR_MEMORY";
        case MOE_ROUTE_ERROR_NO_DEVICE: return "ERROR_NO_DEVICE";
        case MOE_ROUTE_ERROR_UNSUPPORTED: return "ERROR_UNSUPPORTED";
        case MOE_ROUTE_ERROR_NO_COMPILER: return "ERROR_NO_COMPILER";
        case MOE_ROUTE_ERROR_COMPILE: return "ERROR_COMPILE";
        case MOE_ROUTE_ERROR_DRIVER: return "ERROR_DRIVER";
        case MOE_ROUTE_ERROR_NOT_PREPARED: return "ERROR_NOT_PREPARED";
        case MOE_ROUTE_ERROR_FORKED: return "ERROR_FORKED";
    }
    return "unknown status";
}
