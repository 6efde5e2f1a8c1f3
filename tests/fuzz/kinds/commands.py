"""Command lines with hostile options: one line and status 2, or success; never a traceback, nothing left half done."""

import os
import tempfile
from pathlib import Path
from random import Random

from ..commands import PRETRAIN, as_options, checkpoints, expect_one_line, run_command, snapshot
from ..harness import Case, FindingError, Kind, expect

# FOLDER stands for a fresh folder that holds `broken`, BASE for the checkpoints.
PATHS = (
    "FOLDER/none.txt",
    "FOLDER",
    "/dev/null",
    "",
    "FOLDER/" + "x" * 300,
    "FOLDER/a/b/c",
    "FOLDER/file",
    "FOLDER/binary",
)
PATHS += ("FOLDER/file/below", "/proc/none", "FOLDER/loop", "FOLDER/empty", "BASE/dcformer", "BASE/text.jsonl", "~")
NUMBERS = ("-1", "0", "1", "2", "1e400", "nan", "inf", "-inf", "99999999999999999999", "1.5", "x", "", "1e-320", "-0.0")
WORDS = (
    "",
    "x",
    "none",
    "auto",
    "LG",
    "{}",
    "[]",
    "{",
    '{"hidden_size": -1}',
    '{"a": NaN}',
    "\u00e9\u0001",
    "a/b",
    "true",
)
YAMLS = (
    "step: 3",
    "- 3",
    "seed: [",
    "seed: -1",
    "\ufffe",
    "a: &a [*a]",
    "output: {}",
    "!!python/object/apply:os.system ['true']",
)
YAMLS += ("seed: 1e99", "? [a]\n: 1", "overwrite: maybe", "x", "", "output: null")

NAMED: dict[str, dict[str, tuple[str, ...]]] = {
    "pretrain": {
        "numbers": (
            *(
                "seed",
                "batch_size",
                "max_steps",
                "epochs",
                "learning_rate",
                "warmup_steps",
                "sequence_length",
                "vocab_size",
            ),
            *("weight_decay", "adam_beta1", "adam_epsilon", "max_grad_norm", "validation_share", "keep_checkpoints"),
            *("min_learning_rate_ratio", "freeze_parent_steps", "log_every", "save_every", "dataloader_workers"),
        ),
        "paths": ("output", "dataset", "validation_dataset", "init_from", "tokenizer", "resume"),
        "words": ("model_type", "model_size", "model_config", "attn_implementation", "text_column", "mixed_precision"),
    },
    "convert llama": {
        "numbers": ("rank", "seed", "sliding_window", "max_shard_size"),
        "paths": ("source", "destination"),
        "words": ("init", "only", "layer_types", "dtype", "max_shard_size", "revision"),
    },
    "convert official": {
        "numbers": ("window", "max_shard_size"),
        "paths": ("source", "destination"),
        "words": ("family", "static", "dtype"),
    },
    "convert rcmha": {
        "numbers": ("max_position_embeddings", "official_positions", "max_shard_size"),
        "paths": ("source", "destination"),
        "words": ("memory_type", "dtype"),
    },
    "publish": {"numbers": (), "paths": ("checkpoint", "output"), "words": ("license", "repo", "revision")},
    "evaluate": {
        "numbers": ("num_fewshot", "limit", "batch_size", "max_length", "seed"),
        "paths": ("model", "tokenizer", "include_path", "output"),
        "words": ("suite", "tasks", "dtype", "device"),
    },
    "benchmark": {
        "numbers": ("threads", "window", "batch_size", "layers", "vocabulary", "rounds", "budget", "seed"),
        "paths": ("output", "redraw"),
        "words": ("subjects", "shapes", "implementations", "dtype", "device", "preset"),
    },
    "quickstart": {"numbers": ("max_steps", "seed"), "paths": ("output",), "words": ()},
    "reproduce tiny-shakespeare": {"numbers": ("max_steps", "seeds"), "paths": ("output",), "words": ("groups",)},
    "reproduce upcycling": {"numbers": ("max_steps", "seeds"), "paths": ("output",), "words": ()},
}
# Jobs that take long even where nothing is wrong are only run with something that is.
LONG = ("evaluate", "benchmark", "quickstart", "reproduce tiny-shakespeare", "reproduce upcycling")


def generate(random: Random) -> Case:
    job = random.choice(("pretrain",) * 4 + tuple(NAMED))
    options = {}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        kind = random.choice([kind for kind, names in NAMED[job].items() if names])
        pool = {"numbers": NUMBERS, "paths": PATHS, "words": WORDS}[kind]
        options[random.choice(NAMED[job][kind])] = random.choice(pool)
    yaml = random.choice(YAMLS) if random.random() < 0.15 else None
    if job in LONG:  # something that certainly ends it
        options["seed"] = "no-number"
    return {"class": job, "options": options, "yaml": yaml}


def check(case: Case) -> None:
    checkpoints()
    with tempfile.TemporaryDirectory(prefix="dynattn-fuzz-") as name:
        folder = Path(name)
        prepare(folder)
        if case["yaml"] is not None:
            (folder / "file.yaml").write_text(case["yaml"], encoding="utf-8", errors="surrogatepass")
        before, base = snapshot(folder), snapshot(checkpoints())
        # Whatever a path says, nothing is written elsewhere: the working folder is the case's.
        argv = command_line(case, folder)
        label = f"{case['class']} | {' '.join(argv)[:300]}"
        try:
            ended = run_command(argv, KIND.seconds - 5, lambda: os.chdir(folder))
        except TimeoutError:
            raise FindingError(f"hangs: {label}") from None
        except EOFError:
            raise FindingError(f"crashes: {label}") from None
        try:
            expect_one_line(ended)
        except FindingError as error:
            raise FindingError(f"{case['class']}: {error} | {' '.join(argv)[:400]}") from error
        expect(base == snapshot(checkpoints()), f"a source was changed: {label}")
        # A run whose loss is not finite anymore has begun, and keeps its folder with what to look at.
        if ended.status == 2 and "training stopped" not in ended.errors:
            new = sorted(path for path in snapshot(folder).keys() - before.keys() if not path.startswith("a/b"))
            expect(
                not new,
                f"{case['class']}: leaves {Path(new[0]).parts[0] if new else ''} after a refusal | {new} {label}",
            )


def prepare(folder: Path) -> None:
    (folder / "file").write_text("text")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")


def command_line(case: Case, folder: Path) -> list[str]:
    """The job with options that would do, but for those of the case."""
    base = checkpoints()
    job, *sub = case["class"].split()
    good: dict[str, str] = {}
    if job == "pretrain":
        good = {**PRETRAIN, "max_steps": "2", "dataset": f"{base}/text.jsonl", "output": f"{folder}/run"}
        if "epochs" in case["options"]:
            del good["max_steps"]
        if "init_from" in case["options"]:
            good = {name: value for name, value in good.items() if not name.startswith("model_")}
    if job == "convert":
        source = {"llama": "llama", "official": "official-dcformer", "rcmha": "official-rcmha"}[sub[0]]
        good = {"source": f"{base}/{source}", "destination": f"{folder}/out"}
    if job == "publish":
        good = {"checkpoint": f"{base}/dcformer", "output": f"{folder}/out"}
    if job == "evaluate":
        good = {"model": f"{base}/dcformer"}
    options = {**good, **case["options"]}
    filled = {name: text.replace("FOLDER", str(folder)).replace("BASE", str(base)) for name, text in options.items()}
    file = [str(folder / "file.yaml")] if case["yaml"] is not None else []
    switches = ["--no_verify"] if job in ("convert", "publish") else []
    return [job, *sub, *file, *as_options(filled), *switches]


KIND = Kind("commands", generate, check, checkpoints, fast=8, seconds=90, batch=25)
