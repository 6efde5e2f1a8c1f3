"""Conversion as a library: `convert_official(OfficialArguments(source=..., destination=...))`."""

from .arguments import OfficialArguments
from .job import Conversion, convert_official

__all__ = ["Conversion", "OfficialArguments", "convert_official"]
