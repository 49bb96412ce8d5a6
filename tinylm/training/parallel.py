"""Training in several processes: every rank computes the gradient of a part of each batch.

ddp: every rank has a replica of the model, its gradient and its optimizer. fsdp: every rank has a shard of them, and
the weights of one block at a time are gathered for its forward and its backward pass (torch's FSDP2). With an adapter,
only the frozen base model is sharded.

Gradients are sums over scored tokens, divided by the number of scored tokens of the whole batch, so their sum over the
ranks is the gradient of the batch. With replicas, the sum is the same on all ranks, and on equal machines so are
clipping, update and weights.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tinylm.config.run import RunConfig
from tinylm.distributed.ranks import Ranks
from tinylm.kernels.allocator import return_large_blocks
from tinylm.machine.device import DTYPES, free_memory
from tinylm.run_directory.directory import LastSave
from tinylm.run_directory.tensor_files import WHOLE, Shard
from tinylm.run_directory.weights import is_finite, require_tensors
from tinylm.text.batches import Batch
from tinylm.training.sharded_tensors import as_shard, is_sharded, local
from tinylm.transformer.block import PreNormBlock
from tinylm.transformer.build import build_empty_model
from tinylm.transformer.stack import Transformer


def rank_memory(device: str, ranks: Ranks) -> int | None:
    """Free bytes on the device of this rank (on a CPU, its share of the memory); `None` if they are not reported."""
    free = free_memory(device)
    return free // ranks.launch.local_size if free is not None and device == "cpu" else free


def rank_shard(parallel: str, config: RunConfig, ranks: Ranks) -> Shard:
    """The part of the trained parameters on this rank: all of them with `ddp`, and with an adapter, of which only the
    base is sharded.
    """
    if parallel == "ddp" or config.adapter is not None:
        return WHOLE
    return Shard(ranks.launch.rank, ranks.size)


def restore_rows(config: RunConfig, save: LastSave, shard: Shard) -> tuple[Transformer, dict[str, Tensor]]:
    """A model on the meta device for `load_shards`, and the rows of its weights on this rank, read from a save.

    Raises TinyLMError if the tensors of the save do not fit the configuration.
    """
    rows = save.read_weights(shard)
    expected = {name: shard.rows(tensor) for name, tensor in build_empty_model(config.model).state_dict().items()}
    require_tensors(rows, expected, save.weights[0].parent, any_float=config.family is not None)
    return build_for_rows(config, rows), rows


def build_for_rows(config: RunConfig, rows: dict[str, Tensor]) -> Transformer:
    """A model on the meta device whose parameters have the dtypes of `rows`."""
    model = build_empty_model(config.model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(rows[name].dtype)
    return model


def shard_model(model: Transformer, device: str, dtype: str) -> None:
    """Shard the model among the ranks, in place, and move the shards to the device, unless it is on the meta device.

    Each block is gathered by itself, and all other parameters together. The few parameters of an adapter are
    replicated, not sharded.

    dtype: number format of the computation under autocast. On a GPU and without an adapter, blocks are gathered in this
        format, since autocast would round their matrices to it; gradients are summed in fp32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if device == "cpu":
        return_large_blocks()  # otherwise, gathered weights that are freed stay resident
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    has_frozen = len(trained) < len(list(model.parameters()))
    replicated = trained if has_frozen else set()
    for parameter in replicated:
        parameter.data = parameter.data.to(device)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    rounded = MixedPrecisionPolicy()
    if device == "cuda" and dtype != "fp32" and not has_frozen:
        rounded = MixedPrecisionPolicy(DTYPES[dtype], torch.float32, cast_forward_inputs=False)
    for block in [module for module in model.modules() if isinstance(module, PreNormBlock)]:
        fully_shard(block, mesh=mesh, mp_policy=rounded, ignored_params=replicated)
    fully_shard(model, mesh=mesh, ignored_params=replicated)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum the gradients over ranks; the default is their mean.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def load_shards(model: Transformer, rows: dict[str, Tensor], device: str) -> None:
    """Load the rows of this rank, by parameter name, into a model that was sharded on the meta device."""
    parameters = dict(model.named_parameters())
    shards = {
        name: as_shard(values.to(parameters[name].dtype), parameters[name], torch.device(device))
        for name, values in rows.items()
    }
    model.load_state_dict(shards, assign=True)


def release_gathered(model: nn.Module) -> None:
    """Free the gathered weights outside of blocks, which a forward pass leaves for the output layer and the backward
    pass. Parameters of the model are then shards. Does nothing with replicas.
    """
    if is_sharded(model):
        model.reshard()  # type: ignore[operator]  # an FSDPModule


def micro_batches(batch: Batch, own: Batch, rows: int, sharded: bool, ranks: Ranks) -> Iterator[tuple[Batch, bool]]:
    """Yield the micro-batches of this rank, of at most `rows` sequences, and whether each of them counts in the loss.

    own: the rows of the batch that this rank computes
    sharded: every rank gets the same number of micro-batches, since the ranks gather the weights together. If a rank
        has too few rows, its last micro-batches repeat the first row of the batch and do not count.
    """
    number = 0
    for part in own.split(rows):
        yield part, True
        number += 1
    if sharded:
        most_rows = -(-len(batch) // ranks.size)
        for _ in range(number, -(-most_rows // rows)):
            yield next(batch.split(1)), False


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor], missing: Sequence[Sequence[int]], ranks: Ranks) -> None:
    """Replace the gradients of this rank by their sum over all ranks. Gradients of sharded parameters are sums already.

    missing: for each rank, the indices of the parameters without a gradient there. A parameter that has a gradient on
        no rank is left without one.
    """
    if ranks.size == 1:
        return
    without = set(range(len(parameters))).intersection(*missing)
    shared = [p for index, p in enumerate(parameters) if index not in without and not is_sharded(p)]
    for parameter in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    ranks.add([parameter.grad for parameter in shared if parameter.grad is not None])


def weights_finite(model: nn.Module, ranks: Ranks) -> bool:
    """Whether all weights are finite; every rank gets the same answer."""
    parts = (local(parameter) for parameter in model.parameters())
    finite = all(is_finite(part) for part in parts if part.numel())
    return all(ranks.gather(finite)) if is_sharded(model) else finite
