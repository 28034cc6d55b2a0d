"""Global batch, micro batch, gradient accumulation: which sizes fit together at a number of processes."""

from __future__ import annotations

from dataclasses import replace

from fullshard.recipe.fields import Recipe, TrainConfig, mistake


def resolve_batch(recipe: Recipe, *, world_size: int) -> Recipe:
    """The recipe with micro_batch_size filled in for this number of processes.

    Raises UserError where the batch or the streams cannot be dealt out evenly to `world_size` processes.
    """
    rows, micro, streams = recipe.train.global_batch_size, recipe.train.micro_batch_size or 1, recipe.data.num_streams
    if world_size > rows:
        raise mistake(recipe, "train.global_batch_size", f"fewer rows than processes, {world_size}; start at most {rows}")
    if streams % world_size:
        fits = ", ".join(map(str, divisors(streams)))
        raise mistake(recipe, "data.num_streams", f"must be a multiple of the number of processes, {world_size}; it fits {fits} processes")
    if rows % (micro * world_size):
        near = nearest_multiples(rows, micro * world_size)
        fix = f"must be a multiple of micro_batch_size x processes, {micro} x {world_size} = {micro * world_size}; nearest that fit: {near}"
        raise mistake(recipe, "train.global_batch_size", fix)
    return replace(recipe, train=replace(recipe.train, micro_batch_size=recipe.train.micro_batch_size or rows // world_size))


def gradient_accumulation_steps(train: TrainConfig, *, world_size: int) -> int:
    """Forwards per optimizer step on each device. For a resolved recipe."""
    assert train.micro_batch_size is not None
    return train.global_batch_size // (train.micro_batch_size * world_size)


def divisors(number: int) -> list[int]:
    """In rising order, 1 and `number` included."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest_multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
