"""Text from a trained model: KV cache, sampling, streaming."""
