"""Models: configuration, weights and tokenizers, from GGUF or safetensors, by alias, path or hub id."""
