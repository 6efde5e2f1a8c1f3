"""The code that travels with a checkpoint: which files, and how their imports are rewritten."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.dynamic_module_utils import get_relative_import_files

import dynattn
from dynattn import remote_code
from dynattn.modeling.ops.dcmha.chunked.csrc import sources
from dynattn.modeling.ops.relative import chunked as relative
from dynattn.modeling.ops.relative.eager import relative_eager
from dynattn.remote_code import flat_code, flatten_imports, owner_of, registered_classes, travels_with, write_code

CONFIGS = [
    value for name in dynattn.__all__ if (value := getattr(dynattn, name)) and name.endswith("Config")
]  # every family of the package
MODULE = "dynattn.modeling.modeling_dcformer"


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda cls: cls.__name__)
def test_every_family_becomes_one_flat_folder(config_class: type, tmp_path: Path) -> None:
    config = config_class()
    names = write_code(config, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        for dots, module in re.findall(r"^ *from (\.*)([\w.]*) import", (tmp_path / name).read_text(), re.MULTILINE):
            assert not module.startswith("dynattn")
            assert not dots or (dots == "." and f"{module}.py" in names)
    entries = {f"{reference.split('.')[0]}.py" for reference in config.auto_map.values()}
    seen = {Path(file).name for entry in entries for file in get_relative_import_files(tmp_path / entry)}
    assert seen | entries == set(names)


def test_c_code_travels_as_the_text_that_the_package_compiles() -> None:
    flat: dict[str, str] = {}
    exec(flat_code([dynattn.DCFormerModel])["ops_dcmha_chunked_csrc_sources.py"], flat)
    assert {name: flat[name] for name in sources.FLAT_CONSTANTS} == {
        "COMPOSE": sources.COMPOSE,
        "DECODE": sources.DECODE,
        "PASSES": sources.PASSES,
    }
    assert "FLAT_CONSTANTS" not in flat  # nothing there reads files


def test_copies_of_the_code_keep_their_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch frees an operator when another one takes its name. The package and two copies of it are used by turns."""
    monkeypatch.syspath_prepend(tmp_path)
    copies = [relative]
    for name in ("first_copy", "second_copy"):
        (tmp_path / name).mkdir()
        write_code(dynattn.RCMHAConfig(), tmp_path / name)
        copies.append(import_module(f"{name}.ops_relative_chunked"))
    namespaces = {copy._forward_op._qualname.partition("::")[0] for copy in copies}
    assert len(namespaces) == 3 and "dynattn" in namespaces
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    masking = {"attention_mask": None, "is_causal": True, "sliding_window": None}
    expected, _ = relative_eager(query, key, value, scaling=0.5, **masking)
    for copy in copies:
        torch.testing.assert_close(copy.relative_chunked(query, key, value, scaling=0.5, **masking)[0], expected)


def test_auto_map_names_every_registered_head_but_those_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: Any = AutoModelForImageClassification._model_mapping
    monkeypatch.setitem(entries._extra_content, dynattn.DCFormerConfig, LlamaForCausalLM)
    classes = registered_classes(dynattn.DCFormerConfig)
    assert next(iter(classes)) == "AutoConfig"
    assert classes["AutoModel"] is dynattn.DCFormerModel
    assert classes["AutoModelForCausalLM"] is dynattn.DCFormerForCausalLM
    assert "AutoModelForSequenceClassification" in classes
    assert "AutoModelForImageClassification" not in classes


def test_other_peoples_configurations_get_no_code(tmp_path: Path) -> None:
    class Theirs(dynattn.DCFormerConfig):
        pass

    assert write_code(LlamaConfig(), tmp_path) == []
    assert write_code(Theirs(), tmp_path) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("registered", ["model", "configuration", "composed in place"])
def test_registered_classes_save_the_code_that_publishing_writes(
    registered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLaMA-Factory registers what it loads from folders with code, and Transformers' guide to custom models does."""
    model: Any = dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig.from_size("tiny", num_hidden_layers=1))
    if registered == "composed in place":
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
        model = dynattn.with_composed_heads(LlamaForCausalLM)(LlamaConfig(vocab_size=9, **sizes))
    owner = type(model.config if registered == "configuration" else model)
    monkeypatch.setattr(dynattn.DCFormerConfig, "code_registered", False)  # so that it is as before after the test
    owner.register_for_auto_class()
    model.save_pretrained(tmp_path / "saved")
    code = set(write_code(model.config, tmp_path / "code"))
    assert code == {path.name for path in (tmp_path / "saved").glob("*.py")}
    assert AutoConfig.from_pretrained(tmp_path / "saved").auto_map == model.config.auto_map


def test_code_travels_unless_transformers_has_loaded_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a configuration whose model type a variant has taken over."""
    variant: Any = type("Variant", (dynattn.DCFormerConfig,), {"__module__": "somewhere.configurations"})
    loaded: Any = type("Loaded", (dynattn.DCFormerConfig,), {"__module__": "transformers_modules.configurations"})
    for registered, travelling in ((variant, True), (loaded, False)):
        monkeypatch.setitem(CONFIG_MAPPING._extra_content, "dcformer", registered)
        assert remote_code.travels(registered) == travelling
        assert remote_code.travels(dynattn.DCFormerConfig)


def test_imports_keep_names_indentation_and_parentheses() -> None:
    source = "from ..configuration.configuration_dcformer import (\n    DCFormerConfig,\n)\n" + (
        "def f():\n    from .ops.masking import Structure as S  # late\n    return S\nimport torch\n"
    )
    flat, imported = flatten_imports(source, MODULE)
    assert flat == source.replace("..configuration.configuration_dcformer", ".configuration_dcformer").replace(
        ".ops.masking", ".ops_masking"
    )
    assert imported == ["dynattn.configuration.configuration_dcformer", "dynattn.modeling.ops.masking"]


def test_variants_import_the_package_and_their_own_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_code, "_is_package", lambda module: False)
    source = (
        "import torch\nif torch:\n    from dynattn import (DCFormerConfig as Base,\n"
        "        Composition, DCPythiaConfig)\n"
        "from dynattn.modeling.ops.masking import Structure\nfrom .layers import x\nfrom variant.heads import y\n"
    )
    flat, imported = flatten_imports(source, "variant.model")
    assert flat == (
        "import torch\nif torch:\n    from .configuration_dcformer import DCFormerConfig as Base\n"
        "    from .ops_dcmha_composition import Composition\n    from .configuration_dcpythia import DCPythiaConfig\n"
        "from .ops_masking import Structure\nfrom .variant_layers import x\nfrom .variant_heads import y\n"
    )
    assert imported == [
        "dynattn.configuration.configuration_dcformer",
        "dynattn.modeling.ops.dcmha.composition",
        "dynattn.configuration.configuration_dcpythia",
        "dynattn.modeling.ops.masking",
        "variant.layers",
        "variant.heads",
    ]


def test_files_beside_each_other_are_one_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration and a model in two files beside a package of layers, as a first experiment has them."""
    base = "from dynattn import DCFormerConfig, DCFormerForCausalLM\n"
    config = 'class LooseConfig(DCFormerConfig):\n    model_type = "loose"\n'
    model = "class LooseForCausalLM(Loosely, DCFormerForCausalLM):\n    config_class = LooseConfig\n"
    imports = "from loose_config import LooseConfig\nfrom loose_parts.layers import Loosely\nimport safetensors\n"
    (tmp_path / "loose_config.py").write_text(base + config)
    (tmp_path / "loose_parts").mkdir()
    (tmp_path / "loose_parts" / "__init__.py").touch()
    (tmp_path / "loose_parts" / "layers.py").write_text("class Loosely:\n    pass\n")
    (tmp_path / "loose_model.py").write_text(base + imports + model)
    monkeypatch.syspath_prepend(tmp_path)
    found: Any = import_module("loose_model")
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "loose", found.LooseConfig)
    entries: Any = AutoModelForCausalLM._model_mapping
    monkeypatch.setitem(entries._extra_content, found.LooseConfig, found.LooseForCausalLM)

    registered = registered_classes(found.LooseConfig)
    assert registered == {"AutoConfig": found.LooseConfig, "AutoModelForCausalLM": found.LooseForCausalLM}
    assert owner_of(found.LooseConfig) == "loose_model"
    files = flat_code(registered.values())
    assert {"loose_config.py", "loose_parts_layers.py", "loose_model.py", "modeling_dcformer.py"} <= files.keys()
    assert "safetensors.py" not in files
    assert "from .loose_config import LooseConfig\nfrom .loose_parts_layers import Loosely\n" in files["loose_model.py"]


def test_installed_projects_do_not_travel_with_each_other() -> None:
    assert not travels_with("typing_extensions", "safetensors.torch")
    assert not travels_with("ast", "dynattn.configuration.configuration_dcformer")
    assert not travels_with("json", "__main__")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from . import composition", "imports from the package dynattn.modeling"),
        ("from .ops import masking", "imports from the package dynattn.modeling.ops"),
        ("from dynattn.modeling import ops", "imports from the package dynattn.modeling"),
        ("import torch, dynattn", "line 1 of .* imports dynattn; write `from MODULE import NAME`"),
    ],
)
def test_imports_without_a_flat_form_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flatten_imports(source, MODULE)


def test_equal_file_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {MODULE: "from .ops.masking import x\nfrom .ops_masking import y"}
    monkeypatch.setattr(remote_code, "_source", lambda module: sources.get(module, ""))
    monkeypatch.setattr(remote_code, "_is_package", lambda module: False)
    with pytest.raises(ValueError, match=r"would both be ops_masking\.py"):
        flat_code([dynattn.DCFormerModel])


def test_text_that_transformers_would_take_for_an_import_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = '"""An example:\n\nfrom .nowhere import something\n"""\n'
    monkeypatch.setattr(remote_code, "_source", lambda module: source)
    with pytest.raises(ValueError, match="nowhere"):
        write_code(dynattn.DCFormerConfig(), tmp_path)
