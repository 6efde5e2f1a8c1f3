"""What people run: thin command lines over small libraries, one folder a job."""

import sys

# Their locks, signals and processes are those of POSIX systems.
if sys.platform == "win32":
    raise ImportError(
        "the commands of dynattn need Linux or macOS; on Windows run them in WSL, or use its models alone"
    )
