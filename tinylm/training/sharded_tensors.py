"""Tensors whose rows are sharded among ranks (torch's DTensor), and functions of matrices gathered on one rank each.

Rank r of N has part r of the rows; see `tinylm.run_directory.tensor_files.Shard`. DTensor is imported only where
it is needed, since the import is slow.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


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
