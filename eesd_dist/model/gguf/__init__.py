"""GGUF files as models: the header, the weights, the tokenizer, and the folder made of them."""
