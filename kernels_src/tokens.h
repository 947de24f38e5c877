/*
  tokens.h: which rows of a batch are tokens and which are padding. Nothing else.
*/
/* Tokens that aren't padding: the number read from the device, kept within 0 and num_tokens; all where none is given. */
DEVICE u32 valid_tokens(const int *num_valid_tokens, u32 num_tokens) {
    if (!num_valid_tokens) return num_tokens;
    const int valid = (int)load_4(num_valid_tokens);
    return valid < 0 ? 0 : (u32)valid < num_tokens ? (u32)valid : num_tokens;
}
