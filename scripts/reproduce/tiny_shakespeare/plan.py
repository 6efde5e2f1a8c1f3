"""What the study trains: settings, the variants of a group, and the list of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

TYPES = ("mha", "mdha", "rmha", "rcmha")
WIDTH = 128
# Fields of the configuration that all models share. The initializer range is about that of PyTorch's linear layers of
# this width, which the official code uses.
MODEL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "initializer_range": 0.05,
}
OFFICIAL_WARMUP = 2000
# The share of warmup in the updates of a run, unless its setting is the official one.
WARMUP_SHARE = 0.1
# The peak of the Noam schedule, which is WIDTH ** -0.5 * warmup ** -0.5.
PEAK_RATE = (WIDTH * OFFICIAL_WARMUP) ** -0.5


@dataclass(frozen=True)
class Setting:
    """How a model is trained and scored.

    Attributes:
        segment, mem_len: tokens of a segment, and tokens kept from before it.
        streams, evaluation_streams: parallel streams of the text in training and in scoring.
        steps: updates.
        warmup: updates until the learning rate is at its peak.
        evaluation_tokens: the most tokens of either split that are scored; None scores the whole validation split.
        patience: training ends earlier when so many passes over the text in a row have not lowered the validation loss,
            and the validation scores are those after the best pass; None trains for all `steps`.
    """

    segment: int
    mem_len: int
    memory_type: str
    hidden_act: str
    streams: int
    evaluation_streams: int
    steps: int
    warmup: int
    evaluation_tokens: int | None = None
    patience: int | None = None

    @property
    def model(self) -> dict[str, Any]:
        """Fields of the configuration."""
        segmented = self.memory_type == "segment"
        # Official tables have 8,192 rows. Those for distances that this setting never reaches get no gradient and are
        # left out.
        rows = {"max_position_embeddings": self.mem_len + self.segment} if segmented else {}
        return {"mem_len": self.mem_len, "memory_type": self.memory_type, "hidden_act": self.hidden_act, **rows}


SETTINGS = {
    "sensible": Setting(128, 128, "streaming", "relu2", 4, 32, steps=700, warmup=70),
    "official": Setting(2, 32, "segment", "relu", 32, 128, steps=2000, warmup=OFFICIAL_WARMUP),
}
QUICK = {
    "sensible": replace(SETTINGS["sensible"], steps=60, warmup=6, evaluation_tokens=16384),
    "official": replace(SETTINGS["official"], steps=100, evaluation_tokens=4096),
}


_FOUR = {kind: {"attention_type": kind} for kind in TYPES}


@dataclass(frozen=True)
class Group:
    """Runs that are compared with one another.

    Attributes:
        setting: name of a setting.
        baseline: group and variant that variants are compared with, seed by seed; see `baseline_of`.
        variants: fields of the configuration, by name of the variant; the four types if not given.
        corpus: name of a text.
        longer: factor on the updates of the setting.
        patience: as in `Setting`; such a group runs for hours or days, and only when it is asked for by name.
        note: a remark for the readers of the table.
    """

    title: str
    setting: str
    baseline: tuple[str, str]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _FOUR)
    corpus: str = "tiny-shakespeare"
    longer: int = 1
    patience: int | None = None
    note: str = ""

    def baseline_of(self, variant: str) -> tuple[str, str]:
        """What a variant is compared with: `rcmha, ReLU` with `rcmha` if the group has it, others with `baseline`."""
        unchanged = variant.partition(",")[0]
        is_change = unchanged != variant and unchanged in self.variants
        return (self.baseline[0], unchanged) if is_change else self.baseline


PATIENCE = 3
# More passes than any run needs to stop improving.
MOST_PASSES = 200


def _without_end(name: str, title: str, setting: str, label: str, hidden_act: str) -> Group:
    """The four types until validation stops improving, with the activation of the setting and with another one."""
    other = {f"{kind}, {label}": {**fields, "hidden_act": hidden_act} for kind, fields in _FOUR.items()}
    title = f"{title}, until validation stops improving"
    return Group(title, setting, (name, "mha"), {**_FOUR, **other}, patience=PATIENCE)


GROUPS = {
    "sensible": Group(
        "segment 128, memory 128",
        "sensible",
        ("sensible", "mha"),
        note="An update of the official 32 streams would read 8 times as many characters.",
    ),
    "longer": Group("segment 128, memory 128, three times the updates", "sensible", ("longer", "mha"), longer=3),
    "official": Group(
        "segment 2, memory 32",
        "official",
        ("official", "mha"),
        note="The official run makes ten passes, 156,850 updates. Official position tables have 8,192 rows (7,496,897 "
        "parameters for RCMHA), of which those out of reach get no gradient; they are left out here.",
    ),
    "official-longer": Group(
        "segment 2, memory 32, eight times the updates", "official", ("official-longer", "mha"), longer=8
    ),
    "ablations": Group(
        "changes to RCMHA, and MHA with rotary positions",
        "sensible",
        ("sensible", "rcmha"),
        {
            "rcmha, ReLU": {"attention_type": "rcmha", "hidden_act": "relu"},
            "rcmha, kernel 1": {"attention_type": "rcmha", "conv_kernel_size": 1},
            "rcmha, kernel 5": {"attention_type": "rcmha", "conv_kernel_size": 5},
            "mha, rotary": {"attention_type": "mha", "position_scheme": "rope"},
        },
    ),
    "plateau": _without_end("plateau", "segment 128, memory 128", "sensible", "ReLU", "relu"),
    "plateau-official": _without_end("plateau-official", "segment 2, memory 32", "official", "squared ReLU", "relu2"),
    "wikitext-2": Group("segment 128, memory 128", "sensible", ("wikitext-2", "mha"), corpus="wikitext-2"),
}


@dataclass(frozen=True)
class Run:
    """One model to train.

    Attributes:
        seed: decides the initial weights, and at which segment of the text training starts.
        changes: fields of the configuration that differ from those of the setting and of all models.
    """

    group: str
    variant: str
    seed: int
    corpus: str
    setting: Setting
    changes: Mapping[str, Any]

    @property
    def file_name(self) -> str:
        """The file of its result in the folder of the study."""
        return f"runs/{self.group}/{self.variant.replace(', ', '-').replace(' ', '-')}-seed-{self.seed}.json"

    @property
    def model(self) -> dict[str, Any]:
        """All fields of the configuration except the vocabulary."""
        return {**MODEL, **self.setting.model, **self.changes}

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, in JSON types."""
        protocol = {name: value for name, value in asdict(self.setting).items() if name not in self.setting.model}
        if self.setting.patience is None:  # results that are older than it do not name it
            del protocol["patience"]
        return {
            "group": self.group,
            "variant": self.variant,
            "seed": self.seed,
            "corpus": self.corpus,
            **protocol,
            "peak_learning_rate": PEAK_RATE,
            "model": self.model,
        }


def plan(settings: Mapping[str, Setting], seeds: Sequence[int]) -> list[Run]:
    """The runs in their order: group by group, inside a group seed by seed, so that an early end leaves equal seeds.

    Args:
        settings: by group.
    """
    return [
        Run(name, variant, seed, GROUPS[name].corpus, setting, changes)
        for name, setting in settings.items()
        for seed in seeds
        for variant, changes in GROUPS[name].variants.items()
    ]
