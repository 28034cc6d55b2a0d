"""Pretrain a Llama from scratch.

accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/pretrain.py [--config recipes/X.yaml] [--section.key value ...]
"""

from __future__ import annotations

import functools

from fullshard.errors import one_line_errors
from fullshard.placement.fit import check_sharding
from fullshard.placement.launch import check_launch
from fullshard.process.preemption import end_with_launcher
from fullshard.recipe.batch import resolve_batch
from fullshard.recipe.checks import check_output_dir
from fullshard.recipe.parsing import parse_recipe


@one_line_errors
def main() -> None:
    end_with_launcher()
    recipe = parse_recipe()
    placement = check_launch()
    recipe = resolve_batch(recipe, world_size=placement.num_processes)
    check_sharding(recipe, placement)
    check_output_dir(recipe)

    # Imported here: torch and transformers take seconds, and a mistake in a YAML is told before.
    from fullshard.checkpoint.resume import find_checkpoint
    from fullshard.checkpoint.state import load_checkpoint
    from fullshard.data.batches import survey, train_batches
    from fullshard.data.held_out import evaluation_rows
    from fullshard.data.tokenizer import load_tokenizer
    from fullshard.model.bad_steps import BadSteps
    from fullshard.model.build import build_on_meta, llama_config
    from fullshard.model.document_mask import masked_document_end
    from fullshard.model.optim import build_optimizer, build_schedule
    from fullshard.parallel.accelerator import build_accelerator
    from fullshard.parallel.agree import on_main
    from fullshard.parallel.wrap import prepare_model
    from fullshard.train.log import check_trackers
    from fullshard.train.loop import train
    from fullshard.train.run import finish, start

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
