"""The formats: which exporter of Transformers writes each one, and the options of its runtime."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import transformers

from ..common.errors import UserError, last_line

if TYPE_CHECKING:  # older versions of Transformers do not have them
    from transformers.exporters import DynamoConfig, HfExporter


@dataclass(frozen=True)
class Format:
    """One format of graphs.

    Attributes:
        prefix: `PREFIXExporter` and `PREFIXConfig` are its classes in `transformers.exporters`.
        extra: the extra of this package that installs what the format needs; None if PyTorch is all.
        options: fields of the exporter's configuration.
        runtime_options: further arguments with which the proof loads the graphs.
        patches: a module of this folder whose patches the exporter needs.
        is_pickled: whether files of the format can run code when they are loaded.
        most_rows: the largest batch size, for a format that plans memory for the largest inputs; None without a limit.
    """

    prefix: str
    extra: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    runtime_options: Mapping[str, Any] = field(default_factory=dict)
    patches: str | None = None
    is_pickled: bool = False
    most_rows: int | None = None

    def make_exporter(self) -> "HfExporter":
        """The exporter of Transformers for this format.

        Raises:
            UserError: this version of Transformers has none, or a package that it needs is missing.
        """
        exporters = _transformers_exporters()
        if self.patches is not None:
            import_module(f".{self.patches}", __package__)
        try:
            return getattr(exporters, f"{self.prefix}Exporter")()
        except ImportError as error:
            advice = f"; `pip install 'dynattn[{self.extra}]'` installs what was tested" if self.extra else ""
            raise UserError(f"{last_line(error)}{advice}") from error

    def make_config(self, dynamic_shapes: dict[str, Any]) -> "DynamoConfig":
        """The exporter's configuration for a graph whose inputs vary in `dynamic_shapes`."""
        config = getattr(_transformers_exporters(), f"{self.prefix}Config")
        return config(dynamic=True, dynamic_shapes=dynamic_shapes, **self.options)


FORMATS = {
    "torch": Format("Dynamo", is_pickled=True),
    "onnx": Format("Onnx", extra="export"),
    # Not stateful, so that the decoding graph can take the cache that the prefill graph returns.
    # On processors with bfloat16, OpenVINO computes in it by default, and the proof would reject its logits.
    "openvino": Format(
        "OpenVINO",
        extra="export",
        options={"stateful": False},
        runtime_options={"config": {"INFERENCE_PRECISION_HINT": "f32"}},
    ),
    # The proof has two rows.
    "executorch": Format("Executorch", extra="executorch", patches="executorch_patches", most_rows=2),
}


def _transformers_exporters() -> Any:
    """The module `transformers.exporters`.

    Raises:
        UserError: this version of Transformers has no such module, or its exporters cannot load what they wrote.
    """
    exporters: Any = None
    with suppress(ImportError):
        exporters = import_module("transformers.exporters")
    if not hasattr(exporters, "ExportedModel"):
        raise UserError(
            f"transformers {transformers.__version__} has no exporters that load what they wrote; "
            "install transformers 5.23 or newer"
        )
    return exporters
