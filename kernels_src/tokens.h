/*
  tokens.h: which rows of a batch are tokens and which are padding. Nothing else.
*/
/* The number of tokens that aren't padding, as it is read from the device, all where none is given. It may be negative or too large:
   a token isn't padding if its index, as an int, is smaller. For who has something to do while it comes. */
DEVICE int load_valid_tokens(const int *num_valid_tokens, u32 num_tokens) { return num_valid_tokens ? (int)load_4(num_valid_tokens) : (int)num_tokens; }
/* The same within 0 and num_tokens. */
DEVICE u32 valid_tokens(const int *num_valid_tokens, u32 num_tokens) {
    const int valid = load_valid_tokens(num_valid_tokens, num_tokens);
    return valid < 0 ? 0 : (u32)valid < num_tokens ? (u32)valid : num_tokens;
}
