"""From files to a model, its tokenizer and its defaults."""
