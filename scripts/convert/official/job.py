"""Conversion between the official format and ours: check everything, write aside, verify, then move in place."""

from pathlib import Path

from ...common.atomic_folder import check_destination, recover, staged_folder
from ...common.checkpoint_files import read_config
from ..common.companion_files import copy_companions
from ..common.comparison import Verification
from ..common.tensor_source import TensorSource
from ..common.writing import write_json, write_ours, write_weights
from .arguments import OfficialArguments
from .export import to_json
from .plan import Conversion, plan_forward, plan_reverse
from .reference import OfficialModel
from .verify import verify_logits


def convert_official(arguments: OfficialArguments) -> Conversion:
    """Converts one checkpoint folder; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    source, destination = Path(arguments.source).resolve(), Path(arguments.destination).resolve()
    raw = read_config(source)
    recover(destination)
    check_destination(destination, source, arguments.overwrite)
    conversion = plan_reverse(arguments, raw, source) if arguments.reverse else plan_forward(arguments, raw, source)
    with staged_folder(destination) as staging:
        write_weights(staging, conversion.source, conversion.steps, conversion.dtype, arguments.max_shard_size)
        write_config(conversion, staging, arguments)
        if arguments.verify:
            conversion.verification = verify(conversion, staging, arguments)
        conversion.sizes = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
    return conversion


def write_config(conversion: Conversion, folder: Path, arguments: OfficialArguments) -> None:
    """Writes the configuration, and what else belongs to the checkpoint."""
    copy_companions(conversion.source.folder, folder)
    if arguments.reverse:
        write_json(folder, to_json(conversion.official, conversion.dtype))
    else:
        conversion.warnings.extend(write_ours(folder, conversion.config, conversion.dtype))


def verify(conversion: Conversion, staging: Path, arguments: OfficialArguments) -> Verification:
    """Compares our side of the conversion with the official one, both as they were written."""
    folder, official = staging, conversion.source
    if arguments.reverse:
        folder, official = conversion.source.folder, TensorSource(staging)
    model = OfficialModel(
        conversion.official,
        official.headers,
        lambda key: official.read(key).to(conversion.dtype),
        window=conversion.config.sliding_window,
        prefer_merged=arguments.prefer_merged,
        keep_static=arguments.static == "keep",
    )
    return verify_logits(folder, conversion.dtype, model)
