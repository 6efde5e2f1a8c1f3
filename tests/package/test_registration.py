"""Whatever is imported first, the Auto classes know every family, and importing the package is light."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dynattn
from dynattn import registration
from dynattn.families import FAMILIES

LIGHT = """
import sys, importlib, importlib.util
import dynattn
importlib.reload(dynattn)
assert not {"torch", "transformers"} & set(sys.modules)
assert set(dynattn.__all__) <= set(dir(dynattn))
assert sum(type(finder).__name__ == "ActionFinder" for finder in sys.meta_path) == 1
"""
# `modeling_layers` imports the Auto classes while it is itself half imported.
WITHIN_A_MODULE = (
    LIGHT
    + """
spec = importlib.util.find_spec("transformers.models.auto.modeling_auto")
assert spec.loader.get_filename().endswith("modeling_auto.py")
import transformers.modeling_layers
"""
)
# Transformers itself imports accelerate where it is installed, so what counts is that the package works without.
WITHOUT_OTHER_LIBRARIES = (
    """
import sys
absent = ("accelerate", "datasets", "evaluate", "lm_eval", "tensorboard", "matplotlib", "triton")
sys.modules.update(dict.fromkeys(absent))
"""
    + WITHIN_A_MODULE
    + """
import torch
model = dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig.from_size("tiny"))
assert model(torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 3, 2048)
assert not [name for name in sys.modules if name.startswith("dynattn.scripts")]
"""
)
TRANSFORMERS_FIRST = "from transformers import AutoConfig\nimport dynattn, importlib\nimportlib.reload(dynattn)"
BY_PATH = "from dynattn.configuration.configuration_rcmha import RCMHAConfig"
OP_BY_PATH = "import dynattn.modeling.ops.masking"
CODE_BY_PATH = "import dynattn.remote_code"
PUBLIC_NAME = "from dynattn import DCFormerForCausalLM"
LIBRARIES = "import dynattn, datasets, accelerate, peft, evaluate, lm_eval.models.huggingface"
THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import dynattn
import transformers  # whose own import is not made for threads
programs = (
    "from transformers import AutoModelForCausalLM; AutoModelForCausalLM._model_mapping[dynattn.DCPythiaConfig]",
    "from dynattn import RCMHAModel",
    "import transformers.modeling_utils",
    "from transformers import AutoConfig; AutoConfig.for_model('rcmha')",
)
barrier = Barrier(len(programs))
def run(program):
    barrier.wait()
    exec(program, {"dynattn": dynattn})
with ThreadPoolExecutor(len(programs)) as pool:
    list(pool.map(run, programs))
"""
PICKLED = """
import pickle, subprocess, sys
from dynattn import DCFormerConfig, DCFormerModel
config = DCFormerConfig.from_size("tiny", num_hidden_layers=1)
child = "import pickle, sys; from transformers import AutoModel; config, model = pickle.load(sys.stdin.buffer);"
child += "assert type(model) is type(AutoModel.from_config(config)), type(model)"
subprocess.run([sys.executable, "-c", child], input=pickle.dumps((config, DCFormerModel(config))), check=True)
"""
SPAWNED = """
import multiprocessing
from dynattn import DCFormerConfig
from transformers import AutoModel
with multiprocessing.get_context("spawn").Pool(1) as pool:
    config = DCFormerConfig.from_size("tiny", num_hidden_layers=1)
    assert type(pool.apply(AutoModel.from_config, (config,))).__name__ == "DCFormerModel"
"""
EVERYTHING_IS_KNOWN = """
import sys
import transformers
from dynattn.configuration.portable_config import PortableConfig
from dynattn.families import FAMILIES
for family in FAMILIES.values():
    config_class = type(transformers.AutoConfig.for_model(family.model_type))
    assert config_class is family.load_config_class()
    for auto in family.heads:
        mapping, model_class = getattr(transformers, auto)._model_mapping, family.load_model_class(auto)
        assert config_class in mapping and mapping[config_class] is model_class
        assert model_class in mapping._extra_content.values() and model_class in dict(mapping._extra_content).values()
assert PortableConfig.code_writer is not None
waiting = [finder.pending for finder in sys.meta_path if type(finder).__name__ == "ActionFinder"]
assert waiting == [{"peft.utils.constants"}] * ("peft" not in sys.modules), waiting  # what nobody has to import
module = sys.modules["transformers.models.auto.modeling_auto"]
assert {type(module.__loader__).__name__, type(module.__spec__.loader).__name__} == {"SourceFileLoader"}
"""


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(WITHOUT_OTHER_LIBRARIES, id="no library for training, evaluation or kernels"),
        pytest.param(WITHIN_A_MODULE, id="within a module of Transformers", marks=pytest.mark.slow),
        pytest.param(THREADS, id="threads", marks=pytest.mark.slow),
        pytest.param(BY_PATH, id="configuration by path", marks=pytest.mark.slow),
        pytest.param(TRANSFORMERS_FIRST, id="Transformers first", marks=pytest.mark.slow),
        pytest.param(OP_BY_PATH, id="op by path", marks=pytest.mark.slow),
        pytest.param(CODE_BY_PATH, id="remote code by path", marks=pytest.mark.slow),
        pytest.param(PUBLIC_NAME, id="public name", marks=pytest.mark.slow),
        pytest.param(LIBRARIES, id="other libraries", marks=pytest.mark.slow),
        pytest.param(PICKLED, id="pickled", marks=pytest.mark.slow),
        pytest.param(SPAWNED, id="spawned", marks=pytest.mark.slow),
    ],
)
def test_every_family_is_known_whatever_is_imported_first(first: str) -> None:
    program = f"if __name__ == '__main__':\n{indented(first + EVERYTHING_IS_KNOWN)}"
    finished = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def indented(program: str) -> str:
    return "".join(f"    {line}\n" for line in program.splitlines())


def test_an_error_of_an_action_is_told_at_every_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acted_upon.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registration.ACTIONS, "acted_upon", lambda module: 1 / 0)
    finder = registration.ActionFinder({"acted_upon"})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("acted_upon")
        assert finder in sys.meta_path
    done: list[ModuleType] = []
    monkeypatch.setitem(registration.ACTIONS, "acted_upon", done.append)
    assert done == [importlib.import_module("acted_upon")]
    assert finder not in sys.meta_path


def test_only_methods_that_adapt_what_lora_does_are_told_its_layers() -> None:
    constants: Any = ModuleType("constants")
    for method, adapted in {"LORA": ["q_proj"], "ADALORA": ["q_proj"], "IA3": ["down_proj"]}.items():
        name = f"TRANSFORMERS_MODELS_TO_{method}_TARGET_MODULES_MAPPING"
        setattr(constants, name, {"llama": adapted, "dcpythia": ["chosen"]})
    registration.name_lora_targets(constants)
    lora, adalora, ia3 = [table for name, table in vars(constants).items() if name.startswith("TRANSFORMERS")]
    assert (
        lora
        == adalora
        == {
            **{model_type: list(registration.LORA_TARGETS) for model_type in FAMILIES},
            "llama": ["q_proj"],
            "dcpythia": ["chosen"],
        }
    )
    assert ia3 == {"llama": ["down_proj"], "dcpythia": ["chosen"]}


def test_every_public_name_is_where_the_table_says() -> None:
    for name in dynattn.__all__:
        assert getattr(dynattn, name).__name__ == name if name != "__version__" else dynattn.__version__
    classes = {name for family in FAMILIES.values() for name in (family.config_name, *family.model_names.values())}
    assert classes <= set(dynattn.__all__)
    assert not hasattr(dynattn, "DCFormerForImages")
