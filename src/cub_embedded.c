/*
  cub_embedded.c: unpacks CUB's headers where tools/embed_cub.c has put them into the library, as it does for dist/moe_route.h. Where they are
  looked for otherwise is decided in cub_find.c.

  They were packed for string literals: what is packed is printable, and most of it stands for itself. $ is a line feed. ` and @ copy
  something from before: digits in base 88 tell how far back it begins (two digits, or three behind @), and then how much it is beyond 5
  (or 6) characters: a digit of 87 is followed by more. `$ and one of 0 to 3 is a zero byte, `, @ or $.
*/
#include "internal.h"

#ifdef MOER_EMBEDDED_CUB

#define MOER_PACKED_DIGITS "#%&'()*+,-./0123456789:;<=>ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_abcdefghijklmnopqrstuvwxyz{|}~!"

#define MOER_PACKED_BASE (sizeof MOER_PACKED_DIGITS - 1)

typedef struct moer_packed { /* a place in the pieces */
    const char *const *piece;
    const char *at;
    unsigned char values[256]; /* of digits */
} moer_packed;

static char moer_packed_next(moer_packed *from) { /* 0 at the end */
    if (*from->at == '\0' && *from->piece != NULL && *++from->piece != NULL) from->at = *from->piece;
    return *from->at != '\0' ? *from->at++ : '\0';
}

static size_t moer_packed_digit(moer_packed *from) { return from->values[(unsigned char)moer_packed_next(from)]; }

static void moer_cub_unpack(char *text) {
    static const char escaped[] = {'\0', '`', '@', '$'};
    moer_packed from;
    size_t size = 0, i;
    char c;
    memset(&from, 0, sizeof from);
    for (i = 0; i < MOER_PACKED_BASE; i++) from.values[(unsigned char)MOER_PACKED_DIGITS[i]] = (unsigned char)i;
    from.piece = moer_embedded_cub;
    from.at = *from.piece;
    while (size < MOER_EMBEDDED_CUB_SIZE && (c = moer_packed_next(&from)) != '\0') {
        if (c == '`' || c == '@') {
            const char first = moer_packed_next(&from);
            size_t distance, length, more;
            if (c == '`' && first == '$') {
                text[size++] = escaped[(moer_packed_next(&from) - '0') & 3];
                continue;
            }
            distance = from.values[(unsigned char)first];
            for (i = 0; i < (c == '`' ? 1u : 2u); i++) distance = distance * MOER_PACKED_BASE + moer_packed_digit(&from);
            length = c == '`' ? 5 : 6;
            do {
                more = moer_packed_digit(&from);
                length += more;
            } while (more == MOER_PACKED_BASE - 1);
            for (; length > 0 && size < MOER_EMBEDDED_CUB_SIZE && distance > 0 && distance <= size; length--, size++) text[size] = text[size - distance];
        } else {
            text[size++] = c == '$' ? '\n' : c;
        }
    }
}

static moe_route_status moer_cub_get(moe_route_context *context, moer_cub *cub) {
    memset(cub, 0, sizeof *cub);
    cub->text = (char *)moer_alloc(context, MOER_EMBEDDED_CUB_SIZE + 1);
    if (!cub->text) return moer_fail(context, MOE_ROUTE_ERROR_MEMORY, "out of memory for CUB's headers");
    cub->num_headers = MOER_EMBEDDED_CUB_HEADERS;
    moer_cub_unpack(cub->text);
    return MOE_ROUTE_OK;
}

#endif /* MOER_EMBEDDED_CUB */
