"""The runs of the study: a tokenizer, initial weights for each seed and arm, and their training.

A run is a folder that `dynattn pretrain` completes by a rename, so it is either whole or goes on.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dynattn import DCModernBertConfig, DCModernBertForMaskedLM

from ...common.atomic_file import partial_path, put_in_place
from ...compare.job import train_once
from ...pretrain import PretrainArguments
from ...pretrain.data.documents import iterate_texts, load_documents
from ...pretrain.data.tokenizer import load_tokenizer, train_bpe
from ...pretrain.model_config import build_config
from ..model_training import begin_alike, matched_width
from .arguments import ARMS, MaskedLMArguments

LENGTH, BATCH = 128, 16
VOCABULARY = 2048
# One in WARMUP updates is warmup.
WARMUP = 12


@dataclass(frozen=True)
class Runs:
    """Makes the runs of a study, each once."""

    output: Path
    arguments: MaskedLMArguments

    def settings(self) -> dict[str, Any]:
        """What all runs have in common: for the record, and to recognize the folder by."""
        arguments = self.arguments
        data = {name: getattr(arguments, name) for name in ("dataset", "validation_dataset")}
        shares = {"length": LENGTH, "batch": BATCH, "vocabulary": VOCABULARY, "warmup_share": 1 / WARMUP}
        names = {name: None if value is None else Path(value).name for name, value in data.items()}
        lengths = {"steps": arguments.steps, "validations": arguments.validations}
        return {**lengths, "model": arguments.model, **names, **shares}

    def trained(self, seed: int, arm: str, rate: float) -> Path:
        """The folder of a finished run; `seed` decides initial weights, masks and the order of the data."""
        self._make_initial(seed, arm)
        return train_once(self._training(seed, arm, rate))

    def planned(self) -> list[PretrainArguments]:
        """The runs from which a study may be made, each arm with each learning rate.

        Raises:
            UserError: a learning rate is refused.
        """
        given = self.arguments
        cells = product((given.tuning_seed, *given.seeds), given.arms, given.learning_rates)
        return [self._training(*cell) for cell in cells]

    def _training(self, seed: int, arm: str, rate: float) -> PretrainArguments:
        folder, initial = self._folder(seed, f"{arm}-{rate:g}"), self._initial(seed, arm)
        steps = self.arguments.steps
        every = steps // self.arguments.validations
        lengths: dict[str, Any] = {"max_steps": steps, "warmup_steps": steps // WARMUP}
        saves: dict[str, Any] = {"eval_every": every, "save_every": every, "keep_checkpoints": 1}
        start: dict[str, Any] = {"seed": seed, "learning_rate": rate, "init_from": str(initial)}
        return self._options(output=str(folder), **start, **lengths, **saves)

    def _options(self, **options: Any) -> PretrainArguments:
        return PretrainArguments(
            objective="masked_lm",
            dataset=self.arguments.dataset,
            validation_dataset=self.arguments.validation_dataset,
            sequence_length=LENGTH,
            batch_size=BATCH,
            **options,
        )

    def _initial(self, seed: int, arm: str) -> Path:
        return self._folder(seed, f"initial-{arm}")

    def _make_initial(self, seed: int, arm: str) -> None:
        """Saves an arm before training, with the plain model's weights where it has such weights, and the tokenizer."""
        folder = self._initial(seed, arm)
        if not folder.exists():
            tokenizer = self._tokenizer()
            torch.manual_seed(seed)
            plain = DCModernBertForMaskedLM(self._config("plain", tokenizer))
            model = DCModernBertForMaskedLM(self._config(arm, tokenizer))
            begin_alike(model, plain)
            partial = partial_path(folder)
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            put_in_place(partial, folder)

    def _config(self, arm: str, tokenizer: PreTrainedTokenizerBase) -> DCModernBertConfig:
        fields = {**self.arguments.model, **ARMS[arm][1]}
        if arm == "wide":
            full, plain = (self._config(one, tokenizer) for one in ("all", "plain"))
            fields["intermediate_size"] = matched_width(DCModernBertForMaskedLM, full, plain)
        config: Any = build_config(self._options(output="unused", model_config=fields), tokenizer)
        return config

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """A byte-level BPE of the training text, made once."""
        folder = self.output / "tokenizer"
        if not folder.exists():
            documents = load_documents(self._options(output="unused")).train["train"]
            partial = partial_path(folder)
            train_bpe(iterate_texts(documents), VOCABULARY, masks=True).save_pretrained(partial)
            put_in_place(partial, folder)
        return load_tokenizer(folder)

    def _folder(self, seed: int, name: str) -> Path:
        return self.output / f"seed-{seed}" / name
