"""Numerical differences between tinylm and transformers for every model family.

    python benchmarks/formats.py
    python benchmarks/formats.py --families llama qwen3

The models are small and random, and together use every setting of their families (family_peers.py). All compute in
fp32; the standard deviation of their logits is about 1 to 10. A cell is the largest absolute difference over the models
of the family:

import         embeddings of the tokens of texts, computed with tinylm's tokenizer and weights
logits         logits of a whole context
cached logits  logits with the cache, token by token, past the sliding windows
export         logits of transformers for a Hugging Face folder written by tinylm
GGUF           logits of transformers for a GGUF file (f32) written by tinylm; *: transformers does not read all
               settings of this architecture, so tensors are compared, with the layout of llama.cpp's converters
PEFT           logits of PEFT and tinylm with the same adapter: a random LoRA on all matrices written by tinylm, and one
               on all linear layers written by PEFT
LoRA           logits of transformers for an export with a merged random LoRA, compared with the unmerged model
"""

import argparse
import copy
import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family_peers
import gguf
import peft
import torch
import transformers
from gguf_peers import peer_tensors
from measure import describe_machine, table
from torch import Tensor, nn

from tinylm.adapters.adapter import adapter_layers
from tinylm.adapters.foreign import family_of
from tinylm.adapters.load import AdapterSpec, add_adapter, load_adapted_model
from tinylm.adapters.lora import merge_lora, target_modules
from tinylm.errors import UsageError
from tinylm.exporting import export_model
from tinylm.formats.families import FAMILIES
from tinylm.formats.huggingface import write_folder
from tinylm.formats.imported import ForeignModel
from tinylm.formats.peft_writer import convert_adapter, write_adapter
from tinylm.model.stack import Transformer
from tinylm.open_model import open_model
from tinylm.run_config import AdapterConfig
from tinylm.run_directory.loading import LoadedModel

TEXTS = ("", "the bee sees", "no one hears  her\n\n", "中文 naïve 👍🏽")
RANK = 3


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference. tensors_only: of tensors, not of logits: see `_transformers_reads`."""

    value: float
    tensors_only: bool = False


@dataclass(frozen=True)
class Case:
    """A model of transformers, and the folder where it is saved."""

    name: str
    peer: Any
    folder: Path

    def open(self) -> LoadedModel:
        """The model as tinylm opens it."""
        return open_model(self.folder)


def compare_import(case: Case, home: Path) -> Difference:
    """Embeddings of the tokens of TEXTS. Raises AssertionError if token ids differ."""
    opened = case.open()
    tokenizer = transformers.AutoTokenizer.from_pretrained(case.folder)
    largest = 0.0
    for text in TEXTS:
        ids = opened.tokenizer.encode(text)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert list(map(int, ids)) == expected, (case.name, text)
        rows = torch.tensor([expected], dtype=torch.long)
        scale = opened.network.embedding_scale
        largest = max(largest, _largest(opened.network.embed(rows), _embedded(case.peer, rows, scale)))
    return Difference(largest)


def compare_logits(case: Case, home: Path) -> Difference:
    """Logits of a whole context."""
    ids = family_peers.ids(family_peers.CONTEXT)
    return Difference(_largest(_logits(case.open().network, ids), case.peer(ids).logits))


def compare_cached_logits(case: Case, home: Path) -> Difference:
    """A prefill of 13 tokens, then one token at a time."""
    network: Any = case.open().network
    ids = family_peers.ids(family_peers.CONTEXT)
    cache = network.make_cache(len(ids), family_peers.CONTEXT)
    parts = [ids[:, :13], *ids[:, 13:].split(1, dim=1)]
    logits = torch.cat([network.logits(network(part, cache).hidden) for part in parts], dim=1)
    return Difference(_largest(logits, case.peer(ids).logits))


def compare_export(case: Case, home: Path) -> Difference:
    """Logits of transformers for the written folder, and of the original."""
    out = home / "export"
    export_model(case.folder, to="hf", out=out)
    return Difference(_difference_from(case.peer, out))


def compare_gguf(case: Case, home: Path) -> Difference | None:
    """Logits of transformers for the written file, or its tensors; `None` for a model that GGUF cannot represent."""
    out = home / "model.gguf"
    try:
        architecture = export_model(case.folder, to="gguf", out=out, dtype="f32").family
    except UsageError:
        return None
    if _transformers_reads(case.peer, out):
        return Difference(_difference_from(case.peer, out.parent, gguf_file=out.name))
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(out).tensors}
    expected = dict(peer_tensors(architecture, case.peer))
    assert found.keys() == expected.keys(), (case.name, found.keys() ^ expected.keys())
    return Difference(max(_largest(found[name], expected[name]) for name in expected), tensors_only=True)


def compare_peft(case: Case, home: Path) -> Difference:
    """Logits with an adapter that tinylm wrote and with one that PEFT wrote."""
    opened = case.open()
    ids = family_peers.ids(family_peers.CONTEXT)
    config = _add_random_lora(opened.network, "all")
    layers = adapter_layers(opened.network).items()
    factors = {name: tuple(layer.trainable_parameters().values()) for name, layer in layers}
    family = family_of(opened.config)
    write_adapter(home, family, convert_adapter(family, opened.config.model, config, factors), "base")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(case.peer), home).eval()
    exported = _largest(_logits(opened.network, ids), theirs(ids).logits)

    lora = peft.LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(copy.deepcopy(case.peer), lora).eval()
    theirs.save_pretrained(home / "peft")
    ours, _, _, _ = load_adapted_model([AdapterSpec(home / "peft")], case.folder, "cpu")
    return Difference(max(exported, _largest(_logits(ours, ids), theirs(ids).logits)))


def compare_lora(case: Case, home: Path) -> Difference:
    """Logits with a LoRA on all attention projections, unmerged in tinylm and merged in transformers."""
    opened = case.open()
    network = opened.network
    # Merging changes weights in place, which is not possible for weights mapped from a file.
    network.load_state_dict({name: tensor.clone() for name, tensor in network.state_dict().items()}, assign=True)
    _add_random_lora(network, "attention")
    ids = family_peers.ids(family_peers.CONTEXT)
    adapted = _logits(network, ids)
    assert _largest(adapted, case.peer(ids).logits) > 0.01, case.name
    merge_lora(network)
    out = home / "merged"
    out.mkdir()
    tokenizer, special = opened.tokenizer.to_str(), opened.tokenizer.special
    family, config = opened.config.family, opened.config.model
    write_folder(out, ForeignModel(family, config, dict(network.state_dict()), tokenizer, special, None))
    return Difference(_largest(adapted, _load(out)(ids).logits))


COLUMNS: dict[str, Callable[[Case, Path], Difference | None]] = {
    "import": compare_import,
    "logits": compare_logits,
    "cached logits": compare_cached_logits,
    "export": compare_export,
    "GGUF": compare_gguf,
    "PEFT": compare_peft,
    "LoRA": compare_lora,
}


def _add_random_lora(network: Transformer, target: str) -> AdapterConfig:
    """Add a LoRA with random A and B to a model, in place."""
    targets = target_modules([target], network)
    config = AdapterConfig(base="base", base_digest="0", rank=RANK, alpha=RANK, dropout=0.0, targets=targets)
    for layer in add_adapter(network, config).values():
        for parameter in layer.trainable_parameters().values():
            parameter.requires_grad_(False).normal_(std=0.2)
    return config


def _logits(network: Any, ids: Tensor) -> Tensor:
    return network.logits(network(ids).hidden)


def _embedded(peer: Any, ids: Tensor, scale: float) -> Tensor:
    """The scaled embeddings. Some versions of transformers scale Gemma's in the embedding layer, some in the model."""
    embedding: nn.Embedding = peer.get_input_embeddings()
    embedded = embedding(ids)
    return embedded if hasattr(embedding, "embed_scale") else embedded * scale


def _load(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()


def _difference_from(peer: Any, path: Path, **options: Any) -> float:
    """The largest difference of logits between a model that transformers loads and the original."""
    ids = family_peers.ids(family_peers.CONTEXT)
    return _largest(_load(path, **options)(ids).logits, peer(ids).logits)


# Fields of a config that do not change logits.
IGNORED = frozenset(
    [
        "_name_or_path",
        "architectures",
        "dtype",
        "model_type",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ]
)


def _transformers_reads(peer: Any, file: Path) -> bool:
    """Whether transformers reads all settings of the model from a GGUF file.

    It does not support some architectures, and replaces some settings by its own defaults.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except ValueError:
        return False
    found, expected = config.to_dict(), peer.config.to_dict()
    return all(_same(found.get(name), value) for name, value in expected.items() if name not in IGNORED)


def _same(found: Any, expected: Any) -> bool:
    """Whether two settings are equal; floats with the precision of GGUF's 32 bits."""
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-6)
    return found == expected


def _largest(values: Tensor, expected: Tensor) -> float:
    assert values.shape == expected.shape, (values.shape, expected.shape)
    return (values - expected).abs().max().item() if values.numel() else 0.0


@torch.no_grad()
def compare_family(family: str) -> list[str]:
    """The cells of a family's row of the table."""
    differences: dict[str, list[Difference | None]] = {name: [] for name in COLUMNS}
    for name, (kind, _) in family_peers.CASES.items():
        if kind != family:
            continue
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, family_peers.save_peer(name, Path(folder) / "peer"), Path(folder) / "peer")
            for column, compare in COLUMNS.items():
                home = Path(folder) / "work"
                home.mkdir()
                differences[column].append(compare(case, home))
                shutil.rmtree(home)
    return [cell(found) for found in differences.values()]


def cell(differences: Sequence[Difference | None]) -> str:
    """The largest difference, with the number of models compared if it is not all of them."""
    found = [difference for difference in differences if difference is not None]
    if not found:
        return "-"
    share = "" if len(found) == len(differences) else f" ({len(found)} of {len(differences)})"
    parts = []
    for mark, tensors_only in (("", False), ("*", True)):
        values = [difference.value for difference in found if difference.tensors_only == tensors_only]
        parts += [f"{max(values):.0e}{mark}"] if values else []
    return ", ".join(parts) + share


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = sorted(FAMILIES)
    parser.add_argument("--families", nargs="+", choices=families, default=families, help="default: all")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in options.families:
            models = sum(kind == family for kind, _ in family_peers.CASES.values())
            rows.append([family, str(models), *compare_family(family)])
            print(" ".join(rows[-1]), file=sys.stderr)
    print(describe_machine(["torch", "transformers", "peft", "gguf"]))
    print(table(["family", "models", *COLUMNS], rows))


if __name__ == "__main__":
    main()
