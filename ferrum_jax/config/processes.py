"""This process's index among several, from the environment: variables of this package or of a launcher."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ferrum_jax.config.engine import ENVIRONMENT
from ferrum_jax.contract.errors import ConfigError, safe_repr

COORDINATOR, COUNT, INDEX = "FERRUM_COORDINATOR", "FERRUM_NUM_PROCESSES", "FERRUM_PROCESS_ID"
START, START_SECONDS = "FERRUM_START_SECONDS", 300
LAUNCHERS = (  # variables of count and index: this package's, Open MPI's, MPICH's and Intel MPI's, SLURM's
    (COUNT, INDEX),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)
_ADDRESS = re.compile(r"(?:\[[^\[\]]+\]|[^:\s]+):(\d{1,5})")  # host and port; an address with colons in brackets


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """One of several processes that serve a model together."""

    count: int
    index: int
    coordinator: str | None  # `host:port` of process 0; None: JAX asks the launcher
    is_plain: bool  # count and index are from this package's variables, not a launcher's
    start_seconds: int = START_SECONDS  # within which all processes must have started

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = ENVIRONMENT) -> "ProcessSettings | None":
        """Reads the environment; returns None if this process is alone.

        Raises:
            ConfigError: a variable is missing or is not a valid number or address.
        """
        for count_name, index_name in LAUNCHERS:
            given = environment.keys() & {count_name, index_name}
            if not given or (count_name != COUNT and len(given) < 2):
                continue  # half of a launcher's variables, as in a shell of SLURM's `salloc`, says nothing
            count, index = _number(environment, count_name), 0
            if count > 1:
                index = _number(environment, index_name)
            if count < 1 or index >= count:
                raise ConfigError(
                    f"{count_name}={count} and {index_name}={index}: expected a count of at least 1 and an index below"
                )
            coordinator = environment.get(COORDINATOR)
            address = None if coordinator is None else _ADDRESS.fullmatch(coordinator)
            if coordinator is not None and (address is None or not 1 <= int(address[1]) < 1 << 16):
                raise ConfigError(f"{COORDINATOR}={coordinator!r} cannot be used: expected host:port")
            is_plain = count_name == COUNT
            if count > 1 and is_plain and coordinator is None:
                raise ConfigError(f"{COUNT}={count}, but {COORDINATOR} is not set: expected host:port of process 0")
            if count == 1:
                return None
            seconds = _number(environment, START) if START in environment else START_SECONDS
            where = {"coordinator": coordinator, "is_plain": is_plain}
            return cls(count=count, index=index, start_seconds=seconds, **where)
        return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not text.strip().isdecimal() or len(text.strip()) > 9:
        raise ConfigError(f"{name}={safe_repr(text)} cannot be used: expected a number of at most nine digits")
    return int(text)
