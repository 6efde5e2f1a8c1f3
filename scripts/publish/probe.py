"""Measures the answers of a checkpoint (outputs for fixed inputs) in the same way with the package and without it.

Run by path (`python -I probe.py JOB.json`), it loads a folder with `trust_remote_code=True`, in a process that cannot
import the package, and writes the answers. So this module must not import anything of the package.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

PACKAGE = "dynattn"
ROWS, LENGTH, DECODED, GENERATED, IMAGE_SIZE = 3, 24, 4, 8, 64
TEXT = "Heads are composed before and after the softmax; 2405.08553."


class PackageBlocker(MetaPathFinder):
    """Makes the package impossible to import, however it is installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] == PACKAGE:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


@torch.no_grad()
def measure(model: Any, tokenizer: Any = None) -> dict[str, Tensor]:
    """Returns a model's outputs for fixed inputs, by the way in which it is called ("plain", "left-padded" ...).

    An answer is the model's first output: logits `[B, T, V]`, hidden states `[B, T, E]` without a head, or class scores
    `[B, C]`. Outputs at padding mean nothing and are set to zero. "generated" and "tokenizer" are token ids.

    Args:
        model: a model in evaluation mode.
    """
    if model.main_input_name == "pixel_values":
        return _measure_images(model)
    tokens = _probe_tokens(model)  # [B, T]
    mask = torch.ones_like(tokens)
    for row in range(len(tokens)):
        mask[row, : (row + (len(tokens) == 1)) * tokens.shape[1] // 4] = 0
    target = _target(model, tokens)
    cached = {"use_cache": True} if "use_cache" in signature(model.forward).parameters else {}
    texts, shown, images = _as_texts(model, tokens), _as_texts(model, mask), _images_beside(model)
    plain = model(texts, **target, **cached, **images)
    padded = model(texts, attention_mask=shown, **target, **images)
    answers = {"plain": plain[0], "left-padded": _hide_padding(padded[0], mask)}
    if _cache_of(plain) is not None:
        answers["cached"] = _decode(model, tokens)
    if model.can_generate():
        answers["generated"] = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=GENERATED,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            pad_token_id=0,
        )
    if tokenizer is not None:
        answers["tokenizer"] = torch.tensor(tokenizer(TEXT)["input_ids"], dtype=torch.int64)
    return {name: answer.contiguous() for name, answer in answers.items()}


def load_remote(folder: str, job: dict[str, Any]) -> tuple[Any, Any]:
    """Loads the model of `folder` with the code in the folder, and its tokenizer if it has one.

    Raises:
        RuntimeError: Transformers took the model class from elsewhere.
    """
    auto = getattr(transformers, job["auto_class"])
    model = auto.from_pretrained(folder, dtype="auto", trust_remote_code=True)
    require_code_of_folder(model)
    tokenizer = None
    if job["has_tokenizer"]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    return model.eval(), tokenizer


def require_code_of_folder(model: Any) -> None:
    """Raises RuntimeError if Transformers took the class of a model from elsewhere."""
    if not type(model).__module__.startswith("transformers_modules."):
        raise RuntimeError(
            f"{type(model).__name__} comes from {type(model).__module__}, not from the folder's own code"
        )


def load_encoder(folder: str | Path, class_name: str, **options: Any) -> Any:
    """Loads a folder with a class of Sentence Transformers, which only models of that library need."""
    sentence_transformers = importlib.import_module("sentence_transformers")
    return getattr(sentence_transformers, class_name)(str(folder), device="cpu", **options)


def embed(encoder: Any) -> Tensor:
    """What a model of Sentence Transformers makes of two texts.

    Embeddings `[2, E]`, or `[N, E]` of all their tokens, or scores `[2]` or `[2, C]` of pairs.
    """
    texts = [TEXT, TEXT[:20]]
    if hasattr(encoder, "predict"):
        scores: Tensor = encoder.predict(list(zip(texts, reversed(texts), strict=True)), convert_to_tensor=True)
        return scores
    if type(encoder).__name__ == "MultiVectorEncoder":
        return torch.cat(encoder.encode(texts))
    embeddings: Tensor = encoder.encode(texts, convert_to_tensor=True)
    return embeddings.to_dense() if embeddings.is_sparse else embeddings.contiguous()


def refuse_package(roots: Sequence[str]) -> None:
    """Raises RuntimeError if this process can import the package, or has loaded a file from its folders `roots`."""
    try:
        importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        pass
    else:
        raise RuntimeError(f"{PACKAGE} can be imported, so that loading without it was not tried")
    own = Path(__file__).resolve()
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = {Path(path).resolve() for path in paths if path}
    if borrowed := sorted(str(file) for file in files - {own} if any(file.is_relative_to(root) for root in roots)):
        raise RuntimeError(f"{borrowed[0]} of {PACKAGE} was loaded, so that loading without it was not tried")


def answer_twice(job: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The answers of the model in the folder, and those of a copy into which the loaded model was saved.

    A model of Sentence Transformers is loaded and saved by that library as well.

    Raises:
        RuntimeError: the classes are not those of the folder, or the saved copy lacks code.
    """
    model, tokenizer = load_remote(job["folder"], job)
    answers = measure(model, tokenizer)
    model.save_pretrained(job["copy"])
    if tokenizer is not None:
        tokenizer.save_pretrained(job["copy"])
    code, copied = ({path.name for path in Path(job[name]).glob("*.py")} for name in ("folder", "copy"))
    if absent := code - copied:
        raise RuntimeError(f"saved again, the model lacks the code files {sorted(absent)}")
    del model
    copy_answers = measure(*load_remote(job["copy"], job))
    if job["sentence_class"] is not None:
        for folder, found in ((job["folder"], answers), (job["copy"], copy_answers)):
            encoder = load_encoder(folder, job["sentence_class"], trust_remote_code=True)
            require_code_of_folder(encoder[0].model)
            found["embeddings"] = embed(encoder)
            if folder == job["folder"]:
                encoder.save_pretrained(job["copy"])
    return answers, copy_answers


def main(job_file: str) -> None:
    """Does the job in a JSON file that `verify_folder` has written."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    sys.meta_path.insert(0, PackageBlocker())
    refuse_package(job["roots"])
    torch.set_num_threads(job["threads"])
    transformers.AutoConfig.from_pretrained(job["folder"], trust_remote_code=True)
    answers, copy_answers = answer_twice(job)
    refuse_package(job["roots"])
    save_file(answers, job["answers"])
    save_file(copy_answers, job["copy_answers"])


def _cache_of(output: Any) -> Any:
    """The cache in a model's output, which Transformers calls `cache` since 5.24; None if there is none."""
    return next((output[name] for name in ("cache", "past_key_values") if name in output), None)


def _probe_tokens(model: Any) -> Tensor:
    """Random tokens `[B, T]`; one row if the model does not generate.

    A classifier without a padding token could not find the ends of several rows.
    """
    config = model.config.get_text_config()
    length = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH))  # positions need not be limited
    shape = (ROWS if model.can_generate() else 1, length)
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def _as_texts(model: Any, rows: Tensor) -> Tensor:
    """`rows` `[B, T]` as a model of one text in each row reads them; with one choice, `[B, 1, T]`, if it chooses."""
    return rows[:, None] if type(model).__name__.endswith("ForMultipleChoice") else rows


def _target(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """The decoder's inputs of an encoder-decoder, fewer than its source `tokens` `[B, S]`; empty for other models."""
    if not model.config.is_encoder_decoder:
        return {}
    return {"decoder_input_ids": tokens.flip(1)[:, : tokens.shape[1] // 2]}


def _measure_images(model: Any) -> dict[str, Tensor]:
    """First outputs for random images `[B, C, h, w]`, and if the model takes them of twice as many patches each way."""
    answers = {"plain": model(_probe_images(model))[0]}
    if "interpolate_pos_encoding" in signature(model.forward).parameters:
        answers["larger"] = model(_probe_images(model, enlarged=2), interpolate_pos_encoding=True)[0]
    return {name: answer.contiguous() for name, answer in answers.items()}


def _probe_images(model: Any, enlarged: int = 1) -> Tensor:
    """Random images `[B, C, h, w]`, so many times as high and wide as the model's own."""
    config = getattr(model.config, "vision_config", model.config)  # a part, if the model could read texts, too
    height, width = (enlarged * size for size in _image_shape(config))
    shape = (ROWS, getattr(config, "num_channels", 3), height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(enlarged - 1))


def _images_beside(model: Any) -> dict[str, Tensor]:
    """The images that a model of two towers, such as CLIP, compares texts with; empty for all others."""
    is_pair = hasattr(model.config, "vision_config") and not model.can_generate()
    needs_both = is_pair and "pixel_values" in signature(model.forward).parameters
    return {"pixel_values": _probe_images(model)} if needs_both else {}


def _image_shape(config: Any) -> tuple[int, int]:
    """Height and width of images, or a size of our choice for a model that reads any."""
    size = getattr(config, "image_shape", None) or getattr(config, "image_size", None) or IMAGE_SIZE
    return (size, size) if isinstance(size, int) else tuple(size)


def _decode(model: Any, tokens: Tensor) -> Tensor:
    """First outputs `[B, T, V]` with the cache: a prompt is read at once, the rest token by token.

    A decoder reads `tokens` `[B, T]`; for an encoder-decoder they are the source, and its decoder reads `_target`.
    """
    target = _target(model, tokens)
    source = {"input_ids": tokens} if target else {}
    name, sequence = next(iter(target.items()), ("input_ids", tokens))
    prompt = max(1, sequence.shape[1] - DECODED)
    argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    step = model(**source, **{name: sequence[:, :prompt]}, use_cache=True)
    outputs = [step[0]]
    for token in sequence[:, prompt:].split(1, dim=1):
        step = model(**source, **{name: token, argument: _cache_of(step)}, use_cache=True)
        outputs.append(step[0])
    return torch.cat(outputs, dim=1)


def _hide_padding(output: Tensor, mask: Tensor) -> Tensor:
    """`output` `[B, T, V]` with zeros where `mask` `[B, T]` is 0; unchanged if it is `[B, C]`, one for each row."""
    if output.shape[:2] != mask.shape:
        return output
    return output.masked_fill(~mask.bool()[..., None], 0.0)


if __name__ == "__main__":
    main(sys.argv[1])
