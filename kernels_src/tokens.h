/*
  tokens.h: which rows of a batch are tokens and which are padding. Nothing else.
*/
/* Tokens that aren't padding: the number read from the device, kept within 0 and num_tokens; all where none is given. In two steps for
   who has something to do while it comes. */
DEVICE u32 load_valid_tokens(const int *num_valid_tokens, u32 num_tokens) { return num_valid_tokens ? load_4(num_valid_tokens) : num_tokens; }
DEVICE u32 loaded_valid_tokens(u32 loaded, u32 num_tokens) { return (int)loaded < 0 ? 0 : loaded < num_tokens ? loaded : num_tokens; }
DEVICE u32 valid_tokens(const int *num_valid_tokens, u32 num_tokens) {
    return loaded_valid_tokens(load_valid_tokens(num_valid_tokens, num_tokens), num_tokens);
}
