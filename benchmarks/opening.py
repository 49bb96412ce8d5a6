"""Memory and time of opening a large model with tinylm and with transformers, each in its own process.

    python benchmarks/opening.py                  # Llama's shape, 1.7 billion random parameters in bf16, 3.4 GB on disk
    python benchmarks/opening.py --layers 4

Measures the peak resident memory and the anonymous memory, which the system cannot drop because it is not mapped from a
file; both beyond those of the imports, and also relative to the size of the file. tinylm reads all weights
when it opens a model, to check that they are finite, so the mapped pages of the file are resident. `first logits`
includes a forward pass of 16 tokens. Linux only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import family_peers
import torch
import transformers
from measure import describe_machine, table

# The shape of SmolLM2-1.7B.
SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 8192,
    "rope_theta": 130_000.0,
    "tie_word_embeddings": True,
}
TINYLM = """
from tinylm.open_model import open_model
import tinylm.formats.huggingface
def opened(path):
    network = open_model(Path(path)).network
    return lambda ids: network.logits(network(ids).hidden)
"""
PEER = """
from transformers import AutoModelForCausalLM, LlamaForCausalLM, logging
logging.disable_progress_bar()
def opened(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    return lambda ids: model(ids).logits
"""
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="default: 24, for 1.7 billion parameters")
    parser.add_argument("--width", type=int, default=2048, help="default: 2048")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        parameters, size = write_model(Path(folder), options.layers, options.width)
        rows = []
        for name, opening in (("tinylm", TINYLM), ("transformers", PEER)):
            for what, result in zip(("opened", "first logits"), measure(opening, folder), strict=True):
                shares = [f"{result[part] / 1e6:,.0f} ({result[part] / size:.0%})" for part in ("peak", "anonymous")]
                rows.append([name, what, f"{result['seconds']:.2f}", *shares])
    print(describe_machine(["torch", "transformers"]))
    print(f"{parameters / 1e6:,.0f} million parameters in bf16, {size / 1e6:,.0f} MB on disk")
    print(table(["", "until", "seconds", "MB, peak", "MB, anonymous"], rows))


def write_model(folder: Path, layers: int, width: int) -> tuple[int, int]:
    """Save a random model with a tokenizer. Returns its number of parameters and its size on disk in bytes."""
    shape = {**SHAPE, "hidden_size": width, "intermediate_size": 4 * width}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=layers, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    family_peers.save_tokenizer(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return sum(parameter.numel() for parameter in model.parameters()), size


def measure(opening: str, folder: str) -> list[dict[str, float]]:
    program = f"import json, sys, time\nfrom pathlib import Path\nimport torch\n{opening}{MEASURE}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, folder], stdout=subprocess.PIPE, text=True, timeout=600
    )
    done.check_returncode()
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
