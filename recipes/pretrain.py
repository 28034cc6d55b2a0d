"""Pretrain a Llama from scratch.

accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/pretrain.py [--config recipes/X.yaml] [--section.key value ...]
"""

from __future__ import annotations

from fullshard.config import check_output_dir, resolve_batch
from fullshard.errors import one_line_errors
from fullshard.parsing import parse_recipe
from fullshard.sharding import check_launch


@one_line_errors
def main() -> None:
    recipe = parse_recipe()
    placement = check_launch()
    recipe = resolve_batch(recipe, world_size=placement.num_processes)
    check_output_dir(recipe)

    # Imported here: torch and transformers take seconds, and a mistake in a YAML is told before.
    from fullshard.accelerator import build_accelerator, prepare_model
    from fullshard.data import evaluation_rows, train_rows
    from fullshard.metrics import check_trackers
    from fullshard.model import build_on_meta, llama_config
    from fullshard.optim import build_optimizer, build_schedule
    from fullshard.run import finish, start
    from fullshard.tokenizer import load_tokenizer
    from fullshard.train import train

    trackers = check_trackers(recipe.logging.trackers)
    accelerator = build_accelerator(placement=placement, sharding=recipe.sharding, trackers=trackers, output_dir=recipe.output_dir)
    rank, world_size = accelerator.process_index, accelerator.num_processes

    tokenizer = load_tokenizer(recipe.data.tokenizer)
    config = llama_config(recipe.model, tokenizer=tokenizer)
    batches = train_rows(
        data=recipe.data,
        tokenizer=tokenizer,
        seed=recipe.seed,
        rank=rank,
        world_size=world_size,
        global_batch_size=recipe.train.global_batch_size,
    )
    held_out = evaluation_rows(data=recipe.data, tokenizer=tokenizer, rank=rank, world_size=world_size, max_rows=recipe.evaluation.max_rows)

    model = prepare_model(accelerator, build_on_meta(config), seed=recipe.seed)
    optimizer = build_optimizer(model.parameters(), optim=recipe.optim)
    schedule = build_schedule(optimizer, optim=recipe.optim, max_steps=recipe.train.max_steps)

    run = start(recipe=recipe, placement=placement, accelerator=accelerator, model=model)
    values = train(
        recipe=recipe,
        accelerator=accelerator,
        model=model,
        optimizer=accelerator.prepare_optimizer(optimizer),
        schedule=schedule,
        batches=batches,
        held_out=held_out,
        run=run,
    )
    finish(recipe=recipe, accelerator=accelerator, model=model, tokenizer=tokenizer, run=run, values=values)


if __name__ == "__main__":
    main()
