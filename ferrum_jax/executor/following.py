"""How a process other than 0 serves a model: it runs the commands that process 0 sends, until the end."""

import sys
from typing import Any

from ferrum_jax.contract.errors import FerrumError
from ferrum_jax.executor.device import DeviceState
from ferrum_jax.executor.hosts import Hosts, unpacked_key
from ferrum_jax.sharding.processes import Message


def follow(device: DeviceState, hosts: Hosts) -> None:
    """Runs the commands of process 0 until it ends, then ends this process; in process 0, does nothing.

    An error here ends this process with code 1 and tells process 0 why; only a failed build is answered instead.

    Raises:
        SystemExit: with code 0, at the end.
    """
    if hosts.leads:
        return
    latest: Any = None  # outputs of the last step: programs chained on a step follow before the next step
    while (message := hosts.channel.receive(0)).op != "end":
        try:
            latest, problem = _do(message, device, latest), ""
        except FerrumError as refusal:
            if message.op != "build":
                hosts.channel.fail(f"{message.op}: {refusal}")
            problem = str(refusal)
        except Exception as trouble:  # this process has missed a command that the others have run
            hosts.channel.fail(f"{message.op}: {type(trouble).__name__}: {trouble}")
            raise
        if "number" in message.facts:
            hosts.channel.send(Message("done", {"number": message.facts["number"], "problem": problem}))
    sys.exit(0)


def _do(message: Message, device: DeviceState, latest: Any) -> Any:
    """Runs one command; returns the outputs of the latest step."""
    facts, arrays = message.facts, message.arrays
    key: Any = unpacked_key(facts["key"]) if "key" in facts else None
    match message.op:
        case "step":
            return device.step(key, arrays[0])
        case "sample" | "distributions" | "score_processed":
            getattr(device, message.op)(key, latest, *arrays)
        case "write" | "multi_step":
            getattr(device, message.op)(key, *arrays)
        case "copy_blocks":
            device.copy_blocks(key, arrays[0].tolist())
        case "gather":
            device.begin_gather(key, facts["layer"], arrays[0])
        case "install":
            device.adapters.install(facts["row"], arrays)
        case "put_param":
            device.put_param(facts["at"], arrays)
        case "take_params" | "reallocate" | "free":
            getattr(device, message.op)()
        case "build":
            keys, how = map(unpacked_key, facts["keys"]), facts["how"]
            if how.get("is_warmup"):
                device.programs.warmup(keys, load=how["load"])
            else:
                device.programs.ensure(keys)
        case _:
            raise ValueError(f"no command is called {message.op!r}")
    return latest
