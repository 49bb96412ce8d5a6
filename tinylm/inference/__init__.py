"""From a prompt to text: generator (model, cache and sampler) and sampler (logits to a token)."""
