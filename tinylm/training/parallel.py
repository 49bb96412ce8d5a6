"""Training in several processes: every rank computes the gradient of a part of each batch.

ddp: every rank has a replica of the model, its gradient and its optimizer. fsdp: every rank has a shard of them, and
the weights of one block at a time are gathered for its forward and its backward pass (torch's FSDP2). With an adapter,
only the frozen base model is sharded.

Gradients are sums over scored tokens, divided by the number of scored tokens of the whole batch, so their sum over the
ranks is the gradient of the batch. With replicas, the sum is the same on all ranks, and on equal machines so are
clipping, update and weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tinylm.config.run import RunConfig
from tinylm.kernels.process import return_large_blocks
from tinylm.machine.device import DTYPES, free_memory
from tinylm.run_directory.directory import LastSave
from tinylm.run_directory.weights import WHOLE, Shard, is_finite, require_tensors
from tinylm.system.ranks import Ranks
from tinylm.text.batches import Batch
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.blocks import PreNormBlock
from tinylm.transformer.build import build_empty_model


def is_sharded(value: Tensor | nn.Module) -> bool:
    """Whether a tensor is a DTensor, or a model was sharded by FSDP2."""
    return hasattr(value, "to_local" if isinstance(value, Tensor) else "reshard")


def local(tensor: Tensor) -> Tensor:
    """The rows of this rank, in the same memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]  # a DTensor


def full(tensor: Tensor) -> Tensor:
    """All rows, gathered from all ranks, which call this together; the tensor itself if it is not sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]  # a DTensor


def full_tensors(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """The tensors with all rows, on the CPU if they were sharded. All ranks call this together; the result
    is empty on ranks without `keep`.
    """
    result = {}
    for name, tensor in tensors.items():
        found = full(tensor)
        if keep:
            result[name] = found.cpu() if is_sharded(tensor) else found
    return result


def as_shard(rows: Tensor, parameter: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor that is sharded like the parameter, from the rows of this rank; `rows` itself if the parameter is not
    sharded. The rows are moved to `device`, by default the device of the parameter.

    rows: (R, ...) with the other dimensions of the parameter, or (R,) with one number per row; R rows of this rank
    """
    rows = rows.to(device or parameter.device)
    if not is_sharded(parameter):
        return rows
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    stride = like.stride() if rows.dim() == like.dim() else (1,)
    return DTensor.from_local(rows, like.device_mesh, like.placements, shape=like.shape[: rows.dim()], stride=stride)


def sum_over_ranks(values: Tensor, parameter: Tensor) -> Tensor:
    """Sum the values in place over the ranks that share the parameter; unchanged if it is not sharded."""
    if is_sharded(parameter):
        torch.distributed.all_reduce(values, group=parameter.device_mesh.get_group())  # type: ignore[attr-defined]  # a DTensor
    return values


def apply_to_full_matrices(
    function: Callable[[list[Tensor]], list[Tensor]], matrices: Sequence[Tensor]
) -> list[Tensor]:
    """`function(matrices)`, for a function that returns as many matrices of the same shapes and dtype.

    Sharded matrices are gathered, each on one rank, which applies the function; the rows of the results are then sent
    back. The matrices of each shape are distributed evenly among the ranks. All matrices or none must be sharded.
    """
    results = list(matrices)
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        if is_sharded(matrix):
            by_shape[matrix.shape].append(index)
    if not by_shape:
        return function(results)
    for indices in by_shape.values():
        found = _apply_on_owners(function, [matrices[index] for index in indices])
        for index, result in zip(indices, found, strict=True):
            results[index] = result
    return results


def _apply_on_owners(function: Callable[[list[Tensor]], list[Tensor]], matrices: list[Any]) -> list[Tensor]:
    """`function` applied to sharded matrices of one shape (R, C); of N ranks, rank i % N applies it to matrix i."""
    from torch.distributed.tensor import DTensor

    mesh, placements = matrices[0].device_mesh, matrices[0].placements
    size, rank, (rows, columns) = mesh.size(), mesh.get_local_rank(), matrices[0].shape
    turns, part = -(-len(matrices) // size), -(-rows // size)  # matrices per rank, and rows of a matrix per rank
    shards = [matrix.to_local() for matrix in matrices]
    buffer = shards[0].new_zeros(size, turns, part, columns)  # (N, turns, part, C), by owner
    for index, shard in enumerate(shards):
        buffer[index % size, index // size, : len(shard)] = shard
    gathered = _exchange(buffer, mesh)  # (N, turns, part, C), by the sender of the rows
    own = gathered.transpose(0, 1).reshape(turns, size * part, columns)[:, :rows]  # (turns, R, C)
    computed = function([matrix for turn, matrix in enumerate(own) if turn * size + rank < len(matrices)])
    buffer = buffer.new_zeros(turns, size * part, columns)  # (turns, N * part, C)
    for turn, matrix in enumerate(computed):
        buffer[turn, :rows] = matrix
    # (N, turns, part, C), by owner
    scattered = _exchange(buffer.view(turns, size, part, columns).transpose(0, 1), mesh)
    return [
        DTensor.from_local(
            scattered[index % size, index // size, : len(shard)],
            mesh,
            placements,
            shape=matrix.shape,
            stride=matrix.stride(),
        )
        for index, (matrix, shard) in enumerate(zip(matrices, shards, strict=True))
    ]


def _exchange(parts: Tensor, mesh: Any) -> Tensor:
    """Send `parts[r]` to rank r of N. Returns the received parts, by sender: (N, ...) -> (N, ...)."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=mesh.get_group())
    return received


def rank_memory(device: str, ranks: Ranks, free_memory: Callable[[str], int | None] = free_memory) -> int | None:
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
