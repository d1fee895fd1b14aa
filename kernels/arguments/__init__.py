"""Arguments of the public functions, checked: numbers, integers of tokens, and others' arguments that ours lack."""
