"""The estimated memory is at least the memory that training stores, and grows with each dimension of the model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.machines import machine
from tests.planning.planned import adapter, data, planned, planned_pairs
from tests.variants import small
from tinylm.config.model import ModelConfig
from tinylm.errors import UsageError
from tinylm.kernels.layers import MAX_UNFUSED_KEYS, max_unfused_keys
from tinylm.machine.device import autocast
from tinylm.machine.measure import Machine
from tinylm.objectives.loss import MAX_FROZEN_LOGITS, MAX_LOGITS, MIN_CUDA_LOGITS, max_logits
from tinylm.planning import recipes
from tinylm.planning.memory import TrainingMemory, activation_bytes, layer_bytes, training_memory
from tinylm.planning.plan import Plan
from tinylm.planning.plan_request import PlanRequest, block_parameters
from tinylm.system.ranks import MAX_SUM_BYTES
from tinylm.transformer.build import build_model, count_parameters


def test_unfused_attention_stores_its_weights() -> None:
    unfused, fused = machine(max_unfused_keys=MAX_UNFUSED_KEYS), machine()
    assert activation_bytes(unfused, small()) > activation_bytes(fused, small())
    longest = small(context=MAX_UNFUSED_KEYS)
    assert activation_bytes(unfused, small(context=4096)) == activation_bytes(unfused, longest)


def test_in_an_encoder_decoder_the_layers_of_one_stack_store_a_token() -> None:
    """Sources and targets are assumed to be equally long, so the mean number of layers counts."""

    def two_stacks(encoder_layers: int, layers: int) -> ModelConfig:
        return small(architecture="encoder-decoder", encoder_layers=encoder_layers, layers=layers)

    assert activation_bytes(machine(), two_stacks(6, 2)) == activation_bytes(machine(), two_stacks(4, 4))
    assert activation_bytes(machine(), two_stacks(12, 2)) > 1.5 * activation_bytes(machine(), two_stacks(2, 2))


def stored_per_token(config: ModelConfig, layers: int, dtype: str) -> float:
    """Bytes per token that torch stores for the backward pass of the layers, without the weights and their casts."""
    two_stacks = config.architecture == "encoder-decoder"
    config = dataclasses.replace(config, layers=layers, encoder_layers=layers if two_stacks else None)
    model = build_model(config).train()
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    stored: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(config.vocab_size, (4, config.context))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast("cpu", dtype):
        model.probe(ids)
    casts = 2 * sum(p.numel() for p in model.parameters() if p.dim() > 1) if dtype == "bf16" else 0
    return (sum(tensor.untyped_storage().nbytes() for tensor in stored.values()) - casts) / ids.numel()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "choices",
    [
        {"dropout": 0.1, "kv_heads": 4},
        {"attention_dropout": 0.1, "norm_placement": "sandwich"},
        {"position": "relative", "parallel_residual": True},
        {"experts": 4, "qk_norm": False},
        {"norm": "layernorm", "activation": "gelu", "bias": True},
        {"context": 256, "architecture": "encoder"},
        {"architecture": "encoder-decoder", "encoder_layers": 3},
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_the_bytes_of_a_layer_are_those_that_torch_stores(choices: dict[str, Any], dtype: str) -> None:
    config = small(**{"width": 256, "ffn_width": 704, "context": 64, "vocab_size": 50, **choices})
    per_layer = (stored_per_token(config, 3, dtype) - stored_per_token(config, 1, dtype)) / 2
    if config.architecture == "encoder-decoder":
        per_layer /= 2  # a token is in one of the stacks
    on = machine(dtype=dtype, max_unfused_keys=max_unfused_keys("cpu", dtype))
    assert 0.9 * per_layer <= layer_bytes(on, config) <= 1.2 * per_layer


PARTS = {"state": 1000, "gradients": 400, "per_sequence": 70, "logits": 10, "max_logits": 25}


def test_the_peak_of_a_ranks_rows_is_the_largest_of_loading_forward_pass_backward_pass_update_and_evaluation() -> None:
    memory = TrainingMemory(process=5, casts=200, **PARTS)
    assert memory.total(1, 1) == 5 + 1000 + 400  # gradients
    assert memory.total(3, 3) == 5 + 1000 + 200 + 3 * 70 + 25  # logits are computed in chunks
    assert memory.total(3, 6) == 5 + 1000 + 200 + 3 * 70 + 25 + 400  # and the gradients of the first half
    assert TrainingMemory(update=300, backward=200, **PARTS).needed(1, 1) == 1000 + 400 + 300
    assert TrainingMemory(update=200, backward=300, **PARTS).needed(1, 1) == 1000 + 400 + 300
    assert TrainingMemory(evaluation=500, **PARTS).needed(2, 2) == 1000 + 2 * 500
    assert TrainingMemory(process=5, base_loading=2000, **PARTS).total(1, 1) == 5 + 2000
    assert TrainingMemory(process=5, base_loading=1000, **PARTS).total(1, 1) == 5 + 1000 + 400
    assert memory_of(base=small(), base_loading_bytes=7).base_loading == 7
    assert memory_of(machine("cuda"), base=small(), base_loading_bytes=7).base_loading == 0
    memory = TrainingMemory(ranks=4, **PARTS)
    one = TrainingMemory(**PARTS)
    assert (memory.needed(100, 100), memory.needed(5, 100)) == (one.needed(25, 25), one.needed(5, 25))
    assert memory.needed(1, 3) == one.needed(1, 1)


def memory_of(
    on: Machine | None = None,
    *,
    parameters: int = 1000,
    checkpointed: bool = False,
    sharded: bool = False,
    **choices: Any,
) -> TrainingMemory:
    """The memory of training a modern decoder of 4x128 with a vocabulary of 100 and this number of parameters."""
    request = PlanRequest(**{"objective": "next-token", "data": data(10_000), "vocab_size": 100, **choices})
    config = small(width=128, ffn_width=384, layers=4, vocab_size=request.vocab_size)
    return training_memory(on or machine(), request, config, parameters, checkpointed=checkpointed, sharded=sharded)


def test_the_state_is_that_of_the_optimizer_and_the_average() -> None:
    adamw = memory_of(training={"optimizer": "adamw"})
    assert (adamw.state, adamw.gradients, adamw.update) == (12 * 1000, 4 * 1000, 0)
    assert memory_of(training={"optimizer": "adamw", "average": 0.1}).state == 16 * 1000
    bf16 = memory_of(machine(dtype="bf16"), training={"optimizer": "adamw"})
    tied = 4 * 128 * 100  # the gradient of a tied embedding is the sum of two
    assert (adamw.casts, adamw.backward, bf16.casts, bf16.backward) == (0, tied, 2 * 1000, 2 * 1000 + tied)
    per_layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384  # of queries and output, of keys and values, feed-forward
    muon = memory_of()
    assert muon.state == adamw.state - 4 * 4 * per_layer
    assert muon.update == 4 * per_layer * (4 + recipes.MUON_COPIES * 4)
    assert memory_of(machine(dtype="bf16")).update == 4 * per_layer * (4 + recipes.MUON_COPIES * 2)
    rows = 128 + 64 + 64 + 128 + 384 + 384 + 128  # of queries, keys, values and output; of gate, up and down
    normuon = memory_of(training={"optimizer": "normuon"})
    assert (normuon.state, normuon.update) == (muon.state + 4 * 4 * rows, muon.update)


def test_copies_for_saves_are_counted_where_twice_as_much_is_free_during_training() -> None:
    memory = TrainingMemory(process=5, copies=recipes.MIN_COPIED_SAVE, **PARTS)
    enough = memory.state + 2 * memory.copies
    assert memory.total(1, 1, None) == memory.total(1, 1, enough) == 5 + 1000 + 400 + memory.copies
    assert memory.total(1, 1, enough - 1) == 5 + 1000 + 400
    small = TrainingMemory(process=5, copies=recipes.MIN_COPIED_SAVE - 1, **PARTS)
    assert small.total(1, 1, None) == 5 + 1000 + 400, "a small save is written at once"
    adamw = {"optimizer": "adamw", "average": 0.1}
    assert memory_of(training=adamw).copies == memory_of(training=adamw).state
    lora = adapter(rank=8, targets=("q_proj",))
    assert memory_of(adapter=lora).copies == 12 * 4 * 8 * (128 + 128), "the base model is not saved"
    assert memory_of(machine("cuda")).copies == 0, "copies are in the memory of the CPU"


def test_shards_divide_the_state_and_add_what_is_gathered() -> None:
    adamw: dict[str, Any] = {"training": {"optimizer": "adamw"}, "ranks": 4}
    config = small(width=128, ffn_width=384, layers=4, vocab_size=100)
    in_blocks, total = block_parameters(config), count_parameters(config)["total"]
    outside = total - in_blocks
    assert outside == 100 * 128 + 128, "the embedding and the gain of the final norm"
    replica, shard = (memory_of(parameters=total, sharded=sharded, **adamw) for sharded in (False, True))
    assert (shard.state, shard.gradients, shard.copies) == tuple(
        pytest.approx(bytes / 4, abs=1) for bytes in (replica.state, replica.gradients, replica.copies)
    )
    assert replica.gathered == replica.best == 0
    assert shard.gathered == 4 * outside + recipes.GATHERED_BLOCKS * 4 * in_blocks / 4
    assert (shard.backward, shard.best) == (4 * outside, 4 * total)
    lora = adapter(rank=8, targets=("q_proj",))
    replica, shard = (
        memory_of(machine(dtype="bf16"), parameters=total, adapter=lora, sharded=sharded, ranks=4)
        for sharded in (False, True)
    )
    base = 2 * total + 2 * 100 * 128  # bytes: the embedding stays fp32
    assert replica.state - shard.state == base * 3 / 4, "of an adapter, only the base model is sharded"
    assert (shard.gradients, shard.copies, shard.best) == (replica.gradients, replica.copies, 0)
    assert shard.gathered == 4 * outside + recipes.GATHERED_BLOCKS * 2 * in_blocks / 4


def test_replicas_sum_gradients_in_buckets_of_limited_size_and_one_that_does_not_fit_is_sharded() -> None:
    adamw: dict[str, Any] = {"training": {"optimizer": "adamw"}}
    small_model, large_model = 1000, 10**9
    assert memory_of(parameters=small_model, ranks=2, **adamw).sums == 4 * small_model
    large = memory_of(parameters=large_model, ranks=2, **adamw)
    assert large.sums == MAX_SUM_BYTES
    assert large.fixed == large.state + large.gradients + max(large.backward, MAX_SUM_BYTES)
    assert memory_of(parameters=large_model, **adamw).sums == 0
    assert memory_of(parameters=large_model, ranks=2, sharded=True, **adamw).sums == 0
    settings = {"batch_size": 2, "optimizer": "adamw", "checkpoint_activations": False}
    large: dict[str, Any] = {"model": {"size": "base"}, "training": settings, "ranks": 2}
    needed = planned(on=machine("cuda"), **large).memory
    for share, mode in ((1.1, "ddp"), (0.9, "fsdp")):
        on = machine("cuda", free_memory=int(share * needed / recipes.MEMORY_SHARE))
        plan = planned(on=on, **large)
        assert (plan.parallel, plan.shortage) == (mode, None)
        assert planned(on=on, **large, parallel="ddp").parallel == "ddp"
        assert planned(on=on, **large, parallel="fsdp").parallel == "fsdp"
        assert planned(on=on, **{**large, "ranks": 1, "parallel": "fsdp"}).parallel == "ddp", "nothing to shard"
    assert planned(on=machine(free_memory=None), **large).parallel == "ddp"
    short = planned(on=machine("cuda", free_memory=needed // 2), **large, parallel="ddp").shortage
    assert short is not None and "of memory in each process" in short and 'or `parallel="fsdp"`' in short


def test_an_adapter_has_gradients_and_moments_of_its_own_parameters_only() -> None:
    lora = {"rank": 8, "targets": ("q_proj", "down_proj")}
    per_layer = 8 * (128 + 128) + 8 * (384 + 128)
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        memory = memory_of(machine(dtype=dtype), adapter=adapter(**lora))
        base = size * 1000 + (4 - size) * 100 * 128  # bytes: the embedding stays fp32
        assert (memory.gradients, memory.state) == (4 * 4 * per_layer, base + 12 * 4 * per_layer)
    bottleneck = memory_of(adapter=adapter(kind="bottleneck", rank=16, targets=("attention", "feedforward")))
    assert bottleneck.gradients == 4 * 4 * 2 * (2 * 128 * 16 + 16 + 128)


def test_checkpointed_layers_store_their_inputs() -> None:
    config = small(width=256, ffn_width=704, layers=40)
    layer = layer_bytes(machine(), config)
    assert activation_bytes(machine(), config) == round((40 + recipes.EXTRA_LAYERS) * layer)
    inputs = 40 * 4 * 256
    found = activation_bytes(machine(), config, checkpointed=True)
    assert found == round(inputs + recipes.CHECKPOINTED_LAYERS * layer)
    assert memory_of(checkpointed=True).evaluation == memory_of().evaluation / 4


@pytest.mark.parametrize(("gigabytes", "limit"), [(8, 2**27), (24, 24 * 2**23), (128, 2**30), (288, 2**30)])
def test_the_logits_of_a_chunk_grow_with_the_memory_of_the_gpu(gigabytes: int, limit: int) -> None:
    """At 14 bytes each, they take at most a ninth of the memory of a GPU with 16 GB or more."""
    assert max_logits("cuda", frozen=False, memory=gigabytes * 2**30) == limit


@pytest.mark.parametrize(("vocabulary", "losses"), [(100, 2), (1 << 24, 1)])  # multi-token prediction: up to 1,024
def test_the_memory_of_logits_is_bounded(vocabulary: int, losses: int) -> None:
    memory = memory_of(vocab_size=vocabulary)
    logit_bytes = recipes.LOGIT_BYTES + (losses - 1) * recipes.LOGIT_GRADIENT_BYTES
    assert memory.logits == logit_bytes * 24 * vocabulary
    gradient = 4 * 128 * vocabulary  # of the output layer: one per loss, and that of a chunk
    assert memory.max_logits == logit_bytes * MAX_LOGITS + (losses + 1) * gradient
    on_gpu = memory_of(machine("cuda"), vocab_size=vocabulary)
    assert on_gpu.max_logits == logit_bytes * MIN_CUDA_LOGITS + (losses + 1) * gradient
    for device, limit in (("cpu", MAX_FROZEN_LOGITS), ("mps", MAX_FROZEN_LOGITS), ("cuda", MIN_CUDA_LOGITS)):
        frozen = memory_of(machine(device), vocab_size=vocabulary, adapter=adapter())
        assert frozen.max_logits == recipes.LOGIT_BYTES * limit
    single = memory_of(vocab_size=vocabulary, training={"mtp_weight": 0.0})
    assert single.logits == recipes.LOGIT_BYTES * 24 * vocabulary


def test_the_memory_of_a_plan_grows_with_each_sequence() -> None:
    """A pair is a source and a target of maximum length."""

    def grows(plan: Callable[[int], Plan], logit_bytes: int) -> float:
        """The bytes for one more sequence, in those of a token: vocabularies have 100."""
        one, two = plan(1000), plan(1001)
        return (two.memory - one.memory) / (activation_bytes(machine(), one.model) + logit_bytes * 100)

    def text(size: int) -> Plan:
        return planned(model={"size": "nano", "context": 64}, training={"batch_size": size})

    def pairs(size: int) -> Plan:
        model = {"architecture": "encoder-decoder", "dropout": 0.1}
        return planned_pairs([10, 20], model=model, training={"batch_size": size})

    assert grows(text, recipes.LOGIT_BYTES + recipes.LOGIT_GRADIENT_BYTES) == 64  # of two losses
    assert grows(pairs, recipes.LOGIT_BYTES) == 2 * 20


def test_activations_are_computed_again_if_one_sequence_does_not_fit_otherwise() -> None:
    choices: dict[str, Any] = {"model": {"size": "small", "layers": 24, "context": 4096}, "training": {"batch_size": 1}}
    plain = planned(on=machine("cuda"), **choices)
    assert not plain.training.checkpoint_activations
    short = machine("cuda", free_memory=int(plain.memory / recipes.MEMORY_SHARE) - 1)
    assert planned(on=short, **choices).training.checkpoint_activations
    choices["training"] = {"batch_size": 1, "checkpoint_activations": False}
    assert not planned(on=short, **choices).training.checkpoint_activations
    choices["training"] = {"batch_size": 1, "checkpoint_activations": True}
    assert planned(**choices).training.checkpoint_activations


def test_on_apple_gpus_activations_are_not_computed_again_with_dropout() -> None:
    """torch.utils.checkpoint does not restore their random number generator."""
    choices: dict[str, Any] = {"model": {"size": "small", "layers": 24, "context": 4096}, "training": {"batch_size": 1}}
    for dropout in ({"dropout": 0.1, "attention_dropout": 0.0}, {"dropout": 0.0, "attention_dropout": 0.1}):
        choices["model"] = {"size": "small", "layers": 24, "context": 4096, **dropout}
        for device in ("cuda", "mps"):
            plan = planned(on=machine(device, free_memory=2 << 30), **choices)
            assert plan.training.checkpoint_activations == (device == "cuda")
            assert "`checkpoint_activations`" not in str(plan.shortage)
    choices["training"] = {"batch_size": 1, "checkpoint_activations": True}
    assert planned(on=machine("cuda"), **choices).training.checkpoint_activations
    with pytest.raises(UsageError, match="`checkpoint_activations` cannot be combined with dropout on Apple GPUs"):
        planned(on=machine("mps"), **choices)
    choices["model"] = {"dropout": 0.0, "attention_dropout": 0.0}
    assert planned(on=machine("mps"), **choices).training.checkpoint_activations
    base = {"base": small(context=16), "training": {"batch_size": 1, "checkpoint_activations": True}}
    with pytest.raises(UsageError, match="dropout on Apple GPUs"):
        planned(on=machine("mps"), **base, adapter=adapter(dropout=0.1))


def shortage(free: int | None, **choices: Any) -> str | None:
    return planned(on=machine(free_memory=free), **choices).shortage


def test_a_run_that_does_not_fit_says_what_to_change() -> None:
    """One within the error of the estimate is not refused."""
    large = {"model": {"size": "base"}, "training": {"batch_size": 1}}
    assert shortage(500_000_000, **large) == (
        "Training needs about 2.3 GB of memory, 2.3 GB of it for weights, gradients and optimizer, and 0.5 GB are "
        'free. Choose a smaller `size` or `optimizer="adamw"`.'
    )
    assert shortage(64 << 30, **large) is shortage(None, **large) is None
    long: dict[str, Any] = {"size": "small", "context": 16384}
    settings = {"batch_size": 1, "optimizer": "adamw"}
    automatic, without = (
        shortage(500_000_000, model=long, training={**settings, **choice})
        for choice in ({}, {"checkpoint_activations": False})
    )
    assert automatic is not None and automatic.endswith("Choose a smaller `size` or a shorter `context`.")
    assert without is not None and without.endswith(
        "Choose a smaller `size` or a shorter `context` or `checkpoint_activations`."
    )
    base = {"base": planned(**large).model, "training": {**settings, "sequence_length": 8}}
    whole, part = shortage(100_000_000, **base), shortage(100_000_000, **base, adapter=adapter(rank=1))
    assert whole is not None and whole.endswith("Choose a smaller model or a LoRA adapter instead of all weights.")
    assert part is not None and "LoRA" not in part
    choices: dict[str, Any] = {"model": {"size": "small"}, "training": {"batch_size": 1, "optimizer": "adamw"}}
    needed = planned(on=machine("cuda"), **choices).memory
    choices["training"]["checkpoint_activations"] = False
    assert planned(on=machine("cuda", free_memory=int(0.86 * needed)), **choices).shortage is None
    assert planned(on=machine("cuda", free_memory=int(0.84 * needed)), **choices).shortage is not None
