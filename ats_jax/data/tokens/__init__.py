"""Text to token ids and back: bytes, BPE, SentencePiece, tiktoken, tokenizer.json."""
