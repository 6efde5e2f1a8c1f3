"""Leaves out tests that cannot be imported with the Transformers that is installed."""

from cases.versions import is_before

# Its imports need what Transformers has had since 5.23.
collect_ignore = ["test_continuous_batching.py"] if is_before("5.23") else []
