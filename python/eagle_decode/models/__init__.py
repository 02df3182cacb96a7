"""Target models: checkpoints, tokenizers, and the native decoder."""
