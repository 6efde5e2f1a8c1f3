"""Ports and environments of processes that tests start."""

import socket


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def torchrun_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun tells one of its processes in its environment."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in {**places, **address}.items()}
