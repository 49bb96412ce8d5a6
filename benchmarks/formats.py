"""Models and texts of other tools: differences from transformers, opening, encoding and start-up, each a command.

    python benchmarks/formats.py differences --families llama qwen3
    python benchmarks/formats.py opening                  # Llama's shape, 1.7 billion random parameters, 3.4 GB on disk
    python benchmarks/formats.py encoding tinyshakespeare.txt
    python benchmarks/formats.py startup --model SmolLM2-135M-Instruct.Q4_1.gguf

differences: the largest absolute difference from transformers over the models of each family, which are small and
random, and together use every setting of their families (tests/formats/peers.py). All compute in fp32, whose rounding
is the limit; the standard deviation of the logits is about 1 to 10. import: embeddings of the tokens of texts; logits:
of a whole context; cached logits: token by token, past the sliding windows; export: logits of transformers for a folder
written by tinylm; GGUF: tensors of a file (f32) written by tinylm, with the layout of llama.cpp's converters.

opening: memory and time of opening a large model with tinylm and with transformers, each in its own process: the peak
resident memory, and the anonymous memory, which the system cannot drop because it is not mapped from a file; both
beyond those of the imports, and relative to the size of the file, which is the limit. tinylm reads all weights to check
that they are finite, so the mapped pages of the file are resident. `first logits` includes a forward pass of 16 tokens.
Linux only.

encoding: MB/s of encoding a text, repeated up to --megabytes, with characters and byte-level BPE. `tokenizers` encodes
one string, and a batch of chunks of 64 KB on all cores, whose ids may differ at their ends; the faster one is the base
of the ratios. tinylm's BPE caches words: each measurement starts with an empty cache, but a repeated text favours it.

startup: tinylm --help and the first character of tinylm sample, whole processes, beside `import torch`, which is the
limit of a sample by torch, and xllamacpp, which opens the file that tinylm converted before.
The model has about ten million weights, trained for a step, unless --model names a run directory or a GGUF file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tokenizers
import torch
from measure import LIMIT, describe_machine, running, speedup, table, take_turns, tinylm_command
from torch import Tensor

from tinylm.errors import UsageError
from tinylm.formats.families import FAMILIES
from tinylm.generation.llama_cpp import import_llama_cpp
from tinylm.models.exporting import export_model
from tinylm.models.open import open_model
from tinylm.system.files import SETTLED_SECONDS
from tinylm.text.parallel_encoding import encode_in_memory
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for the models of tests/formats
CORPUS = ROOT / "data" / "corpus.txt"

TEXTS = ("", "the bee sees", "no one hears  her\n\n", "中文 naïve 👍🏽")
CONTEXT = 64  # of the models of tests/formats/peers.py


# Differences from transformers.

COLUMNS = ("import", "logits", "cached logits", "export", "GGUF")


def compare(peer: Any, home: Path) -> Iterator[float | None]:
    """Yield the largest difference of each column; `None`: GGUF cannot represent the model. home: has the peer."""
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.formats import gguf_peers, peers

    opened, tokenizer, ids = open_model(home / "peer"), AutoTokenizer.from_pretrained(home / "peer"), peers.ids(CONTEXT)
    network: Any = opened.network
    embedding = peer.get_input_embeddings()
    # Some versions of transformers scale Gemma's embeddings in the layer, some in the model.
    scale = 1.0 if hasattr(embedding, "embed_scale") else network.embedding_scale
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert [list(map(int, opened.tokenizer.encode(text))) for text in TEXTS] == expected
    rows = [torch.tensor([text], dtype=torch.long) for text in expected]
    yield max(largest(network.embed(row), embedding(row) * scale) for row in rows)
    logits = peer(ids).logits
    yield largest(network.logits(network(ids).hidden), logits)
    cache = network.make_cache(len(ids), CONTEXT)
    parts = [ids[:, :13], *ids[:, 13:].split(1, dim=1)]
    yield largest(torch.cat([network.logits(network(part, cache).hidden) for part in parts], dim=1), logits)
    export_model(home / "peer", to="hf", out=home / "export")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    yield largest(AutoModelForCausalLM.from_pretrained(home / "export", **options).eval()(ids).logits, logits)
    try:
        architecture = export_model(home / "peer", to="gguf", out=home / "model.gguf", dtype="f32").family
    except UsageError:
        yield None
        return
    tensors = gguf.GGUFReader(home / "model.gguf").tensors
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in tensors}
    wanted = dict(gguf_peers.peer_tensors(str(architecture), peer))
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    yield max(largest(found[name], wanted[name]) for name in wanted)


def largest(values: Tensor, expected: Tensor) -> float:
    assert values.shape == expected.shape, (values.shape, expected.shape)
    return (values - expected).abs().max().item() if values.numel() else 0.0


@torch.no_grad()
def differences(options: argparse.Namespace) -> None:
    """Print the largest differences of each family, with the number of models compared if it is not all of them."""
    from transformers import logging

    from tests.formats import peers

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    for family in options.families:
        found = []
        for name in (name for name in peers.CASES if name.split()[0] == family):
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(list(compare(peers.save_peer(name, Path(folder) / "peer"), Path(folder))))
        cells = []
        for column in zip(*found, strict=True):
            known = [value for value in column if value is not None]
            share = "" if len(known) == len(column) else f" ({len(known)} of {len(column)})"
            cells.append(f"{max(known):.0e}{share}" if known else "-")
        rows.append([family, str(len(found)), *cells])
    print(describe_machine(["torch", "transformers", "gguf"]))
    print(table(["family", "models", *COLUMNS], rows))


# Opening.

# The shape of SmolLM2-1.7B.
SHAPE: dict[str, Any] = {"vocab_size": 49_152, "num_attention_heads": 32, "num_key_value_heads": 32}
SHAPE |= {"max_position_embeddings": 8192, "rope_theta": 130_000.0, "tie_word_embeddings": True}
OPENERS = {
    "tinylm": """
from tinylm.models.open import open_model
import tinylm.formats.huggingface
def opened(path):
    network = open_model(Path(path)).network
    return lambda ids: network.logits(network(ids).hidden)
""",
    "transformers": """
from transformers import AutoModelForCausalLM, LlamaForCausalLM, logging
logging.disable_progress_bar()
def opened(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    return lambda ids: model(ids).logits
""",
}
MEASURE = """
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
def measured(begun, before):
    return {"seconds": time.perf_counter() - begun, "peak": status("VmHWM:") - before[0],
            "anonymous": status("RssAnon:") - before[1]}
Path("/proc/self/clear_refs").write_text("5")
before, begun = (status("VmRSS:"), status("RssAnon:")), time.perf_counter()
model = opened(sys.argv[1])
results = [measured(begun, before)]
with torch.no_grad():
    model(torch.arange(16).unsqueeze(0))
results.append(measured(begun, before))
print(json.dumps(results))
"""


def opening(options: argparse.Namespace) -> None:
    """Print time and memory until a model is opened, and until its first logits."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        parameters, size = write_model(Path(folder), options.layers, options.width)
        for name, opener in OPENERS.items():
            program = f"import json, sys, time\nfrom pathlib import Path\nimport torch\n{opener}{MEASURE}"
            command = [sys.executable, "-W", "ignore", "-c", program, folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
            for what, result in zip(("opened", "first logits"), json.loads(done.stdout), strict=True):
                shares = [f"{result[part] / 1e6:,.0f} ({result[part] / size:.0%})" for part in ("peak", "anonymous")]
                rows.append([name, what, f"{result['seconds']:.2f}", *shares])
    print(describe_machine(["torch", "transformers"]))
    print(f"{parameters / 1e6:,.0f} million parameters in bf16, {size / 1e6:,.0f} MB on disk")
    print(table(["", "until", "seconds", "MB, peak", "MB, anonymous"], rows))


def write_model(folder: Path, layers: int, width: int) -> tuple[int, int]:
    """Save a random model with a tokenizer. Returns its number of parameters and its size on disk in bytes."""
    import transformers

    from tests.formats.peers import save_tokenizer

    shape = {**SHAPE, "hidden_size": width, "intermediate_size": 4 * width}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=layers, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(dtype=torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return sum(parameter.numel() for parameter in model.parameters()), size


# Encoding.

LIBRARY_CHUNK, TINYLM_CHUNK = 1 << 16, 1 << 20  # characters; of tinylm as when a corpus is read from disk


def encoders(text: str, tokenizer: Tokenizer) -> dict[str, Callable[[], object]]:
    """The encoders by name. Raises AssertionError if the ids of tinylm and the library differ in the first 2^22
    characters.
    """
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    library.encode_special_tokens = True
    chunks = [text[start : start + TINYLM_CHUNK] for start in range(0, len(text), TINYLM_CHUNK)]
    library_chunks = [text[start : start + LIBRARY_CHUNK] for start in range(0, len(text), LIBRARY_CHUNK)]
    sample = text[: 4 * TINYLM_CHUNK]
    assert np.array_equal(encode_in_memory(iter([sample]), tokenizer), library.encode(sample).ids)

    return {  # tinylm's with a new tokenizer, which has cached no words
        "tokenizers, one string": lambda: library.encode(text),
        "tokenizers, chunks of 64 KB": lambda: library.encode_batch_fast(library_chunks),
        "tinylm": lambda: encode_in_memory(iter(chunks), Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.to_str()))),
    }


def encoding(options: argparse.Namespace) -> None:
    """Print the speed of each encoder by tokenizer."""
    original = options.text.read_text(encoding="utf-8")
    text = original * max(1, round(options.megabytes * 1e6 / len(original.encode())))
    bpe = train_bpe([original], options.vocab_size)
    tokenizers_by_name = {"characters": train_char("".join(sorted(set(original)))), f"BPE, {bpe.vocab_size:,} ids": bpe}
    rows = []
    for name, tokenizer in tokenizers_by_name.items():
        times = take_turns(encoders(text, tokenizer), options.rounds)
        variants = [encoder for encoder in times if encoder.startswith("tokenizers")]
        library = min(variants, key=lambda encoder: statistics.median(times[encoder]))
        for encoder, seconds in times.items():
            ratio = "1" if encoder == library else str(speedup(times, encoder, library))
            rows.append([name, encoder, f"{len(text.encode()) / 1e6 / statistics.median(seconds):.1f}", ratio])
    print(f"{describe_machine(['tokenizers', 'gigatoken', 'numpy'])}; {os.cpu_count()} workers\n")
    print(table(["tokens", "encoder", "MB/s", "times tokenizers"], rows))


# Start-up.

TORCH, HELP, FIRST = "import torch", "tinylm --help", "first character of a sample"
PEER = """
import os, sys, tempfile, xllamacpp
os.chdir(tempfile.mkdtemp(dir=sys.argv[2]))  # a socket that a killed process left cannot be used again
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.hostnames, parameters.verbosity = sys.argv[1], ["llama.cpp.sock"], -1
request = {"prompt": [1], "max_tokens": 1000, "stream": True}
show = lambda part: print(part["choices"][0]["text"], end="", flush=True)
xllamacpp.Server(parameters).handle_completions(request, show)
"""


def startup(options: argparse.Namespace) -> None:
    """Print the seconds of whole processes, or until their first byte."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TINYLM_CACHE=f"{folder}/cache"):
        path = options.model or Path(folder) / "run"
        if options.model is None:
            shape = "--layers 6 --heads 6 --width 384 --context 256 --tokenizer char --steps 1 --batch-size 1 --quiet"
            run(tinylm_command("train", CORPUS, "--out", path, *shape.split()))
        sample = tinylm_command("sample", "--model", path, "--seed", 0, "--quiet")
        by_torch = [*sample, "--engine", "torch"]
        functions: dict[str, Callable[[], object]] = {
            TORCH: lambda: run([sys.executable, "-c", "import torch"]),
            HELP: lambda: run(tinylm_command("--help")),
            FIRST: lambda: first_byte([*by_torch, "--max-tokens", "1000"]),
        }
        if import_llama_cpp() is not None:
            time.sleep(SETTLED_SECONDS)  # a conversion is recorded only for files that have not changed for this long
            run([*sample, "--max-tokens", "1"])
            (converted,) = (Path(folder) / "cache").glob("gguf/*.gguf")
            peer = [sys.executable, "-c", PEER, str(converted), folder]
            functions[f"{FIRST}, llama.cpp"] = lambda: first_byte([*sample, "--max-tokens", "1000"])
            functions["xllamacpp, first character"] = lambda: first_byte(peer)
        times = take_turns(functions, options.rounds)
    base = statistics.median(times[TORCH])
    rows = []
    for name, seconds in times.items():
        median, ratio = statistics.median(seconds), 1 / speedup(times, name, TORCH).median
        rows.append([name, f"{median:.2f}", f"{median - base:+.2f}", f"{ratio:.2f}"])
    print(describe_machine(["torch"]))
    print(table(["process", "seconds", f"minus {TORCH}", f"times {TORCH}"], rows))


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT)


def first_byte(command: Sequence[str]) -> None:
    """Run a command until its first character on stdout, and kill it."""
    with running(command, stdout=subprocess.PIPE) as process:
        if process.stdout is None or not process.stdout.read(1):
            raise RuntimeError(f"{' '.join(command)} printed nothing")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    chosen = commands.add_parser("differences")
    families = sorted(FAMILIES)
    chosen.add_argument("--families", nargs="+", choices=families, default=families, help="default: all")
    chosen.set_defaults(command=differences)
    chosen = commands.add_parser("opening")
    chosen.add_argument("--layers", type=int, default=24, help="default: 24, for 1.7 billion parameters")
    chosen.add_argument("--width", type=int, default=2048, help="default: 2048")
    chosen.set_defaults(command=opening)
    chosen = commands.add_parser("encoding")
    chosen.add_argument("text", type=Path)
    chosen.add_argument("--megabytes", type=float, default=20, help="default: 20")
    chosen.add_argument("--vocab-size", type=int, default=4096, help="vocabulary size of the BPE (default: 4096)")
    chosen.add_argument("--rounds", type=int, default=5, help="default: 5")
    chosen.set_defaults(command=encoding)
    chosen = commands.add_parser("startup")
    chosen.add_argument("--model", type=Path, help="a run directory or GGUF file (default: random weights)")
    chosen.add_argument("--rounds", type=int, default=5, help="default: 5")
    chosen.set_defaults(command=startup)
    options = parser.parse_args(arguments)
    options.command(options)


if __name__ == "__main__":
    main()
