"""Text generation by decoders: prompts, sampling, engines (torch, CUDA graphs, llama.cpp) and chat."""
