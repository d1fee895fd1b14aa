"""Finds by `--distributed` and the launcher's environment if several processes train together. Nothing is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import UserMistake

# The number of processes, and the variables by which JAX, too, detects a launcher.
_LAUNCHERS = {
    "SLURM, {} tasks": ("SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"),
    "Open MPI, {} processes": ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri"),
}
_PLACE = re.compile(r"(?P<coordinator>[^,]+),(?P<count>[0-9]{1,6}),(?P<index>[0-9]{1,6})")
_ADDRESS = re.compile(r"([^][,:/\s]+|\[[^][,/\s]+\]):(?P<port>[0-9]{1,5})")
# Where JAX finds the address instead, for any launcher.
_ADDRESSES_OF_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS")


@dataclass(frozen=True)
class Launch:
    """Where this process stands among the processes of a run. All None: JAX finds it out from the environment."""

    coordinator: str | None = None
    """HOST:PORT at which process 0 listens."""
    count: int | None = None
    """Processes in all."""
    index: int | None = None
    """Of this process, from 0."""


def find_launch(distributed: str, environ: Mapping[str, str]) -> Launch | None:
    """How this process joins the others; None: it trains alone.

    Args:
      distributed: `--distributed`.
      environ: the environment.

    Raises:
      UserMistake: `distributed` is none of the forms, or its port or index can't be.

    >>> find_launch("node0:9876,2,1", {})
    Launch(coordinator='node0:9876', count=2, index=1)
    >>> find_launch("auto", {}) is None
    True
    """
    if distributed == "off":
        return None
    if distributed in ("auto", "on"):
        if distributed == "auto" and describe_launcher(environ) is None:
            return None
        for name in _ADDRESSES_OF_JAX:
            if name in environ:
                _check_address(environ[name], name)
        return Launch()
    given = _PLACE.fullmatch(distributed)
    if given is None:
        raise UserMistake(
            f"--distributed: expected auto, on, off or HOST:PORT,PROCESSES,INDEX, got {distributed!r}; "
            "for example node0:9876,2,0 on the first of two machines, and node0:9876,2,1 on the second"
        )
    _check_address(given["coordinator"], "--distributed")
    count, index = int(given["count"]), int(given["index"])
    if index >= count:
        raise UserMistake(
            f"--distributed: of {count} processes the indices are 0 to {count - 1}, got {index}"
            if count
            else "--distributed: expected at least 1 process, got 0"
        )
    return Launch(given["coordinator"], count, index) if count > 1 else None


def _check_address(address: str, source: str) -> None:
    """Refuses what processes would wait at until their time is over."""
    read = _ADDRESS.fullmatch(address)
    if read is None or not 0 < int(read["port"]) < 2**16:
        raise UserMistake(
            f"{source}: expected HOST:PORT with a port from 1 to 65535, such as node0:9876 or [::1]:9876, "
            f"got {address!r}"
        )


def describe_launcher(environ: Mapping[str, str]) -> str | None:
    """Names the launcher that has started several processes, and which of them this is; None: there is none.

    >>> describe_launcher({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3", "OMPI_COMM_WORLD_SIZE": "2"})
    'Open MPI, 2 processes'
    """
    for launcher, names in _LAUNCHERS.items():
        number = environ.get(names[0], "")
        if all(name in environ for name in names) and number.isdecimal() and int(number) > 1:
            return launcher.format(number)
    workers = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if len(workers) > 1 and "TPU_WORKER_ID" in environ:
        return f"a TPU slice, {len(workers)} workers"
    return None


def refuse_several(program: str, environ: Mapping[str, str]) -> None:
    """Refuses to run a command that is built for one process once in each of several.

    Raises:
      UserMistake: a launcher has started several processes.
    """
    launcher = describe_launcher(environ)
    if launcher is not None:
        raise UserMistake(
            f"{program} is built for one process, and was started by {launcher}: each would do the same work; "
            "start it once, without the launcher or with one task"
        )
