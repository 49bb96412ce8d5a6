"""A run on disk, in JSON and safetensors only: reading a run directory executes no code.

    config.json  tokenizer.json  metrics.jsonl  samples.jsonl
    model.safetensors          the best weights by validation loss (of an adapter: adapter.safetensors); of a run that
                               joins generations, the joined model or, if one generation is better, that one
    adapter_config.json, adapter_model.safetensors
                               the same weights of a LoRA in PEFT's format, if its base is a model of a Hugging Face
                               family; tinylm writes them and never reads them
    first.safetensors          the weights that training started from, if its objective compares with them
    generation-N.safetensors   the best weights of generation N of a run, from which the next one learns
    last/                      weights, optimizer.safetensors, state.json, and manifest.json with the SHA-256 of each;
                               of a sharded model, each rank has files of its own, such as
                               model-00001-of-00002.safetensors
    tokens/                    the encoded text, if it was read from standard input

1. After a kill or a full disk at any instant, the directory holds the best weights of one save and a complete `last/`,
   perhaps under the name `last.new` or `last.old`, which is recovered.
2. A new run is prepared in a hidden directory beside its path and moved to its path with its first save.
3. Only one process, or the ranks of one process group, can write a run at a time.
4. Reading a run detects damaged files and files that do not belong together.
"""
