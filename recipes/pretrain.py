"""Pretrain a Llama from scratch.

accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/pretrain.py [--config recipes/X.yaml] [--section.key value ...]
"""

from __future__ import annotations

import functools

from fullshard.config import check_output_dir, resolve_batch
from fullshard.errors import one_line_errors
from fullshard.parsing import parse_recipe
from fullshard.preemption import end_with_launcher
from fullshard.sharding import check_launch, check_sharding


@one_line_errors
def main() -> None:
    end_with_launcher()
    recipe = parse_recipe()
    placement = check_launch()
    recipe = resolve_batch(recipe, world_size=placement.num_processes)
    check_sharding(recipe, placement)
    check_output_dir(recipe)

    # Imported here: torch and transformers take seconds, and a mistake in a YAML is told before.
    from fullshard.accelerator import build_accelerator, on_main, prepare_model
    from fullshard.bad_steps import BadSteps
    from fullshard.checkpoint import find_checkpoint, load_checkpoint
    from fullshard.data import evaluation_rows, survey, train_batches
    from fullshard.document_mask import masked_document_end
    from fullshard.metrics import check_trackers
    from fullshard.model import build_on_meta, llama_config
    from fullshard.optim import build_optimizer, build_schedule
    from fullshard.run import finish, start
    from fullshard.tokenizer import load_tokenizer
    from fullshard.train import train

    trackers = check_trackers(recipe.logging.trackers)
    accelerator = build_accelerator(
        placement=placement,
        sharding=recipe.sharding,
        trackers=trackers,
        output_dir=recipe.output_dir,
        timeout_seconds=recipe.train.timeout_seconds,
    )
    resume = find_checkpoint(recipe=recipe, accelerator=accelerator)

    tokenizer = load_tokenizer(recipe.data.tokenizer)
    config = llama_config(recipe.model, tokenizer=tokenizer)
    # Once: thousands of ranks that list a repository are turned away.
    held_out_too = recipe.evaluation.max_rows > 0
    look = functools.partial(survey, recipe.data, tokenizer=tokenizer, held_out=held_out_too, position=resume.position)
    corpus = on_main(accelerator, look)
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    batches = train_batches(
        data=recipe.data,
        tokenizer=tokenizer,
        corpus=corpus,
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        position=resume.position,
        allow_changes=recipe.checkpoint.allow_changes,
        documents_log=f"{recipe.output_dir}/documents",
        **ranks,
    )
    held_out = evaluation_rows(
        data=recipe.data, tokenizer=tokenizer, corpus=corpus, max_rows=recipe.evaluation.max_rows, note=batches.note, **ranks
    )

    model = prepare_model(accelerator, build_on_meta(config), seed=recipe.seed, sharding=recipe.sharding)
    adamw = build_optimizer(model.parameters(), optim=recipe.optim)
    schedule = build_schedule(adamw, optim=recipe.optim, max_steps=resume.schedule_steps)
    optimizer = accelerator.prepare_optimizer(adamw)
    bad_steps = BadSteps(spike_factor=recipe.train.spike_factor, device=accelerator.device)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "bad_steps": bad_steps}
    load_checkpoint(resume, recipe=recipe, accelerator=accelerator, **state)

    run = start(recipe=recipe, placement=placement, accelerator=accelerator, model=model, resume=resume, batches=batches)
    values = train(
        recipe=recipe,
        placement=placement,
        accelerator=accelerator,
        **state,
        batches=batches,
        held_out=held_out,
        run=run,
        resume=resume,
        document_end=masked_document_end(recipe.data, tokenizer),
    )
    finish(recipe=recipe, accelerator=accelerator, model=model, tokenizer=tokenizer, run=run, values=values)


if __name__ == "__main__":
    main()
