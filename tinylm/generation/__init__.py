"""Text generation: decoding with a KV cache, sampling, beam search, quantization, fusion."""
