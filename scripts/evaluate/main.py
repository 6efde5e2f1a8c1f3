"""Scores a checkpoint with lm-eval-harness, or several on texts of your own.

Run: `dynattn evaluate CHECKPOINT [--suite builtin|dcformer|pythia | --tasks NAME ...] [--output DIR]`
     `dynattn evaluate CHECKPOINT --dataset FILE [--others CHECKPOINT ...] [--output DIR]`
     `dynattn evaluate CHECKPOINT --suite long [--rope_parameters JSON | --others CHECKPOINT ...] [--output DIR]`
"""

import logging
from collections.abc import Sequence

from ..common.arguments import parse_arguments
from .arguments import EvaluateArguments


def main(argv: Sequence[str]) -> int:
    """Evaluates, prints the table and writes it on request; returns 1 if no task could be run."""
    prog = "dynattn evaluate CHECKPOINT"
    arguments = parse_arguments(EvaluateArguments, argv, prog=prog, description=__doc__, words=1)
    if arguments.kind == "tasks":
        return run(arguments)
    if arguments.kind == "--suite long":
        from .long_suite import evaluate_long as evaluate
    else:
        from .own_text import evaluate_text as evaluate
    evaluate(arguments)
    return 0


def run(arguments: EvaluateArguments) -> int:
    """Scores lm-eval tasks; torch, Transformers and lm-eval are imported only here, after the arguments are checked."""
    from .catalog import TaskCatalog
    from .harness import evaluate_model
    from .loading import load_named
    from .result_files import check_output, write_results
    from .result_table import format_table

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    catalog = TaskCatalog(arguments.task_names(), arguments.include_path)
    if arguments.output is not None:
        check_output(arguments.output, arguments.overwrite)
    model, tokenizer = load_named(arguments.model, arguments)
    results = evaluate_model(
        model,
        tokenizer,
        catalog,
        num_fewshot=arguments.shots(),
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        truncate=arguments.truncate,
        carry_memory=arguments.carry_memory,
        seed=arguments.seed,
        log_samples=arguments.log_samples,
        quoted=arguments.quoted_models(),
    )
    print(format_table(results))
    if not results.tasks:
        return 1
    if arguments.output is not None:
        print(f"written: {write_results(results, arguments.output, overwrite=arguments.overwrite)}")
    return 0
