/*
  files.h: sizes of files and reads at an offset, beyond 2 GiB on every platform. For the readers of examples/; what the bytes
  mean is theirs.
*/
#ifndef FILES_H
#define FILES_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>

#if defined(__GNUC__)
#define FILES_FUNCTION static __attribute__((unused))
#define FILES_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define FILES_FUNCTION static
#define FILES_PRINTF(text, first)
#endif

FILES_FUNCTION int files_seek(FILE *stream, uint64_t offset) {
#if defined(_WIN32)
    return offset <= INT64_MAX && _fseeki64(stream, (int64_t)offset, SEEK_SET) == 0;
#else
    return offset <= LONG_MAX && fseek(stream, (long)offset, SEEK_SET) == 0;
#endif
}

/* Leaves the stream at its start. 0 for what has no size, such as a pipe. */
FILES_FUNCTION int files_size(FILE *stream, uint64_t *size) {
#if defined(_WIN32)
    const int64_t end = _fseeki64(stream, 0, SEEK_END) == 0 ? _ftelli64(stream) : -1;
#else
    const long end = fseek(stream, 0, SEEK_END) == 0 ? ftell(stream) : -1;
#endif
    *size = end < 0 ? 0 : (uint64_t)end;
    return end >= 0 && files_seek(stream, 0);
}

/* 1 when all `size` bytes were there. */
FILES_FUNCTION int files_read(FILE *stream, uint64_t offset, void *to, size_t size) {
    return files_seek(stream, offset) && fread(to, 1, size, stream) == size;
}

#endif /* FILES_H */
