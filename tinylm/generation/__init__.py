"""Text generation: decoding with a KV cache, sampling, speculative decoding, beam search, quantization, fusion."""
