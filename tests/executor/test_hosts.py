"""A model on the devices of several processes: it answers as on one, and the loss of a process is an error, no hang."""

import json
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import ferrum_jax
from ferrum_jax.config.processes import ProcessSettings
from ferrum_jax.contract.errors import ConfigError, DeviceError, InvalidFormatError
from ferrum_jax.executor import plan_engine
from ferrum_jax.executor.hosts import packed_key, unpacked_key
from ferrum_jax.models import Point, adapters
from ferrum_jax.sharding import processes
from ferrum_jax.sharding.processes import Message, read_message
from tests import tiny
from tests.executor.conftest import CFG, REUSING
from tests.executor.hosts_process import MODEL
from tests.executor.test_mesh import agree
from tests.long import SEED

pytestmark = pytest.mark.devices

ROOT = Path(ferrum_jax.__file__).parents[1]
LIMIT = 30.0  # seconds from the loss of a process to the end of the other
JAX_SAYS = "JAX distributed service detected fatal errors"  # which ends a process other than 0 as soon as ours does


class Job:
    """Processes of one job, which are killed in the end."""

    def __init__(self, job: dict[str, Any], *, count: int, logs: Path):
        self.logs = [logs / f"process{index}.log" for index in range(count)]
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("FERRUM_", "JAX_"))}
        variables |= {"FERRUM_ARTIFACTS": "0", "FERRUM_START_SECONDS": "20", "PYTHONPATH": str(ROOT)}
        if count > 1:
            variables |= {"FERRUM_COORDINATOR": f"127.0.0.1:{free_port()}", "FERRUM_NUM_PROCESSES": str(count)}
        self.processes = []
        for index, log in enumerate(self.logs):
            own = variables | ({"FERRUM_PROCESS_ID": str(index)} if count > 1 else {})
            with log.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.executor.hosts_process", json.dumps(job)],
                        env=own, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def end(self, index: int, seconds: float) -> int:
        """Waits for a process; returns its exit code."""
        try:
            return self.processes[index].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {index} has not ended after {seconds} s: {self.output(index)}") from None

    def output(self, index: int) -> str:
        """What a process has written."""
        return self.logs[index].read_text(errors="replace")

    def await_output(self, index: int, text: str, seconds: float) -> None:
        """Waits until a process has written something."""
        deadline = time.monotonic() + seconds
        while text not in self.output(index):
            assert self.processes[index].poll() is None, self.output(index)
            assert time.monotonic() < deadline, self.output(index)
            time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, an adapter of it, tokens, and a folder for compiled steps, as `hosts_process` takes them."""
    folder, cfg, draw = tmp_path_factory.mktemp("hosts"), tiny.model_config(MODEL), np.random.RandomState(3)
    targets, tensors = ("q_proj", "k_proj", "o_proj", "down_proj"), {}
    for module, weight in adapters.projections(cfg).items():
        if module.rpartition(".")[2] in targets:
            for half, shape in (("A", (3, weight.shape[1])), ("B", (weight.shape[0], 3))):
                drawn = draw.normal(size=shape).astype(np.float32) / 3
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = drawn
    (folder / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": list(targets)}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    return {
        "do": "contract",
        "model": str(tiny.write_folder(folder / "model", tiny.CONFIGS[MODEL])),
        "adapter": str(folder / "adapter"),
        "tokens": np.random.default_rng(3).integers(97, size=40).tolist(),
        "artifacts": str(folder / "steps"),
        "file": str(folder / "answers"),
    }


def answered(job: dict[str, Any], logs: Path, count: int) -> dict[str, Any]:
    """Runs a job to its end; returns what process 0 has found."""
    Path(job["file"]).unlink(missing_ok=True)
    with Job(job, count=count, logs=logs) as running:
        for index in range(count):
            assert running.end(index, 240) == 0, running.output(index)
    return pickle.loads(Path(job["file"]).read_bytes())


def test_two_processes_answer_as_one(job: dict[str, Any], tmp_path: Path):
    one, two = (answered(job | {"artifacts": False}, tmp_path, count) for count in (1, 2))
    agree(two["answers"], one["answers"])
    assert len(one["answers"]) >= 20
    assert two["stats"]["compiled"] == one["stats"]["compiled"] > 0


@pytest.mark.slow
def test_two_processes_compile_nothing_when_they_start_again(job: dict[str, Any], tmp_path: Path):
    two, again = (answered(job, tmp_path, 2) for _ in range(2))
    agree(again["answers"], two["answers"])
    assert again["stats"]["compiled"] == 0
    assert again["stats"]["loaded"] == two["stats"]["compiled"]


def check_loss(job: dict[str, Any], logs: Path, victim: int, *, after: float | None, how: int = signal.SIGKILL) -> str:
    """Ends a process, so many seconds after the start or in the midst of generation; returns what the other says."""
    with Job(job | {"do": "generate"}, count=2, logs=logs) as running:
        if after is None:
            running.await_output(0, "generating", 240)
        else:
            time.sleep(after)
        running.processes[victim].send_signal(how)
        other = 1 - victim
        assert running.end(other, LIMIT) != 0, running.output(other)
        return running.output(other)


@pytest.mark.parametrize("victim", [1, 0])
def test_the_loss_of_a_process_is_an_error_in_the_other(job: dict[str, Any], tmp_path: Path, victim: int):
    said = check_loss(job, tmp_path, victim, after=None)
    if victim == 1:
        assert "DeviceError: " in said
        assert "process 1 of 2 (host " in said
        assert "all processes must be started again" in said.partition("then DeviceError: ")[2]  # reset() says so
    else:
        assert "process 0 of 2 (host 127.0.0.1) is gone: " in said or JAX_SAYS in said


@pytest.mark.parametrize("who", ["1", "0"])
def test_what_one_process_refuses_to_load_no_other_waits_for(job: dict[str, Any], tmp_path: Path, who: str):
    with Job(job | {"do": "refuse", "who": who}, count=2, logs=tmp_path) as running:
        running.await_output(0, "DeviceError: process 1 of 2" if who == "1" else "NotFoundError: ", 60)
        assert running.end(1, 60) != 0
        assert "NotFoundError: nowhere does not exist" in running.output(0), running.output(0)
        assert "NotFoundError: nowhere does not exist" in running.output(1), running.output(1)
        assert "ended before process 0 did" not in running.output(1)
        assert running.processes[0].poll() is None  # it goes on after the error


@pytest.mark.parametrize("victim", [1, 0])
def test_a_signal_to_end_ends_the_job(job: dict[str, Any], tmp_path: Path, victim: int):
    said = check_loss(job, tmp_path, victim, after=None, how=signal.SIGTERM)
    assert f"process {victim} of 2" in said or JAX_SAYS in said


def test_a_program_that_ends_while_it_generates_ends_the_job_in_order(job: dict[str, Any], tmp_path: Path):
    with Job(job | {"do": "leave"}, count=2, logs=tmp_path) as running:
        assert [running.end(at, 240) for at in (0, 1)] == [3, 0], running.output(0) + running.output(1)


def test_an_interrupt_of_process_0_ends_the_job_in_order(job: dict[str, Any], tmp_path: Path):
    with Job(job | {"do": "prefill"}, count=2, logs=tmp_path) as running:
        running.await_output(0, "generating", 240)
        time.sleep(3)  # past what is compiled
        running.processes[0].send_signal(signal.SIGINT)
        assert running.end(0, LIMIT) in (1, -signal.SIGINT), running.output(0)
        assert running.end(1, LIMIT) == 0, running.output(1)
        assert "KeyboardInterrupt" in running.output(0)
        assert "terminate called" not in running.output(0)


def test_processes_with_different_meshes_are_told(job: dict[str, Any], tmp_path: Path):
    model = str(tiny.write_folder(tmp_path / "model", tiny.CONFIGS["qwen3_moe"]))
    other = {"model": model, "do": "refuse", "who": "1", "mesh": {"expert": 2, "model": 2}}
    with Job(job | other, count=2, logs=tmp_path) as running:
        running.await_output(0, "process 1 has a mesh other than process 0", 60)
        assert running.end(1, 60) != 0
        assert "ConfigError: process 1 has a mesh other than process 0" in running.output(1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_process_that_stands_still_is_lost_too(job: dict[str, Any], tmp_path: Path, victim: int):
    said = check_loss(job, tmp_path, victim, after=None, how=signal.SIGSTOP)
    assert f"process {victim} of 2 (host " in said
    assert "it has sent nothing for 15 s" in said


@pytest.mark.slow
def test_a_process_that_is_lost_at_any_moment_is_an_error_in_the_other(job: dict[str, Any], tmp_path: Path):
    draw, longest = random.Random(SEED), 0.0
    print(f"SEED={SEED}")
    for _ in range(20):
        victim, after = draw.randrange(2), draw.uniform(0.5, 6.0)
        began = time.monotonic()
        said = check_loss(job, tmp_path, victim, after=after)
        longest = max(longest, time.monotonic() - began - after)
        print(f"process {victim} killed after {after:.1f} s: {said.splitlines()[-1][:150]}")
        other = f"process {1 - victim} of 2"
        clear = (f"process {victim} of 2", f"{other} ends: the others", f"{other} cannot be connected", JAX_SAYS)
        assert any(one in said for one in clear), said
    print(f"the other ended within {longest:.1f} s")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket]):
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.float32), np.array(3.5, "float64")]
    arrays.append(np.array([1.5, -2, 3], jnp.bfloat16))
    sent = Message("step", {"key": ["StepKey", [1, 2, [3]]]}, arrays)
    for piece in sent.pack():
        pair[0].sendall(piece)
    found = read_message(pair[1], 1.0)
    assert (found.op, found.facts) == (sent.op, sent.facts)
    for mine, theirs in zip(found.arrays, arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)


def test_what_is_no_message_is_refused(pair: tuple[socket.socket, socket.socket]):
    pair[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError, match="a header of 1,195,725,856 bytes came"):
        read_message(pair[1], 1.0)
    for piece in Message("step", {}, [np.zeros(1 << 10)]).pack():
        pair[1].sendall(piece)
    with pytest.raises(ValueError, match="at most 4,096 are expected"):
        read_message(pair[0], 1.0, 1 << 12)


def test_silence_and_an_end_are_told_apart(pair: tuple[socket.socket, socket.socket]):
    with pytest.raises(TimeoutError, match="it has sent nothing for 0 s"):
        read_message(pair[1], 0.05)
    pair[0].close()
    with pytest.raises(ConnectionError, match="its connection was closed"):
        read_message(pair[1], 1.0)


def test_every_programs_key_survives_the_way():
    plan = plan_engine(replace(REUSING, spec_tokens=2), CFG, platform="cpu", free_bytes=10**9)
    capturing = replace(plan.buckets.decode(1), capture=(Point("pattern", 1), Point("z", 2)))
    keys = [*plan.declared(), *plan.buckets.masks(drafts=True), capturing]
    for key in keys:
        assert unpacked_key(json.loads(json.dumps(packed_key(key)))) == key
    assert len({type(key) for key in keys}) >= 8
    with pytest.raises(LookupError):
        unpacked_key(["open", ["/etc/passwd"]])


PLAIN = {"FERRUM_COORDINATOR": "a:1", "FERRUM_NUM_PROCESSES": "2", "FERRUM_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (PLAIN, (2, 1, "a:1", True)),
        (PLAIN | {"FERRUM_NUM_PROCESSES": "1", "FERRUM_PROCESS_ID": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, (4, 3, None, False)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "FERRUM_COORDINATOR": "b:2"}, (2, 0, "b:2", False)),
        (PLAIN | {"FERRUM_COORDINATOR": "[fe80::1]:65535"}, (2, 1, "[fe80::1]:65535", True)),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, (2, 1, None, False)),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "FERRUM_NUM_PROCESSES": "1"}, None),
        ({"SLURM_NTASKS": "4"}, None),  # a shell that `salloc` began
        ({"PMI_SIZE": "4", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, (2, 1, None, False)),
        ({"OMPI_COMM_WORLD_RANK": "1"}, None),
    ],
)
def test_the_environment_says_which_process_this_is(environment: dict[str, str], expected: Any):
    found = ProcessSettings.from_environment(environment)
    assert (None if found is None else (found.count, found.index, found.coordinator, found.is_plain)) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"FERRUM_NUM_PROCESSES": "two"}, "FERRUM_NUM_PROCESSES='two' cannot be used: expected a number"),
        ({"FERRUM_PROCESS_ID": "2"}, "FERRUM_NUM_PROCESSES=2 and FERRUM_PROCESS_ID=2: expected"),
        ({"FERRUM_COORDINATOR": "a"}, "FERRUM_COORDINATOR='a' cannot be used: expected host:port"),
        ({"FERRUM_COORDINATOR": "5555"}, "FERRUM_COORDINATOR='5555' cannot be used: expected host:port"),
        ({"FERRUM_COORDINATOR": "::1"}, "FERRUM_COORDINATOR='::1' cannot be used: expected host:port"),
        ({"FERRUM_COORDINATOR": ":5555"}, "FERRUM_COORDINATOR=':5555' cannot be used: expected host:port"),
        ({"FERRUM_COORDINATOR": "h:99999"}, "FERRUM_COORDINATOR='h:99999' cannot be used: expected host:port"),
        ({"FERRUM_START_SECONDS": "9" * 11}, "FERRUM_START_SECONDS='9+' cannot be used: expected a number of at most"),
        ({"FERRUM_NUM_PROCESSES": "1" * 5000}, "FERRUM_NUM_PROCESSES='1+.* cannot be used"),
        ({"FERRUM_START_SECONDS": "-1"}, "FERRUM_START_SECONDS='-1' cannot be used"),
    ],
)
def test_a_wrong_variable_is_named(changed: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        ProcessSettings.from_environment(PLAIN | changed)


def test_a_load_that_fails_tells_processes_that_jax_has_joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Their channel is opened with the placement, not by this package's variables."""

    class Told:
        are_several, leads, told = True, True, ""

        @property
        def channel(self) -> "Told":
            return self

        def abandon(self, reason: str) -> None:
            self.told = reason

        def check_placement(self, _: Any) -> None:
            raise InvalidFormatError("a tensor is missing")

    hosts = Told()
    monkeypatch.setattr("ferrum_jax.loading.Hosts.of", lambda *_: hosts)
    with pytest.raises(InvalidFormatError):
        ferrum_jax.load(tiny.write_folder(tmp_path, tiny.CONFIGS["llama2"]))
    assert hosts.told == "InvalidFormatError: a tensor is missing"


@pytest.mark.parametrize("missing", PLAIN)
def test_a_missing_variable_is_named(missing: str):
    rest = {name: value for name, value in PLAIN.items() if name != missing}
    if missing == "FERRUM_NUM_PROCESSES":
        missing = "FERRUM_NUM_PROCESSES=None"
    with pytest.raises(ConfigError, match=missing):
        ProcessSettings.from_environment(rest)


def test_plain_variables_without_a_mesh_are_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ProcessSettings, "from_environment", lambda: ProcessSettings(
        count=2, index=0, coordinator="a:1", is_plain=True))  # fmt: skip
    with pytest.raises(ConfigError, match="FERRUM_NUM_PROCESSES=2, but no mesh divides the model"):
        processes.join({})


def test_strangers_neither_end_nor_hold_up_the_start():
    told: dict[str, Any] = {}

    class Store:
        def key_value_set(self, _: str, value: str) -> None:
            told.update(json.loads(value))
            threading.Thread(target=come, daemon=True).start()

    def come() -> None:
        def connect(*pieces: Any) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", told["port"]), 10)
            for piece in pieces:
                connection.sendall(piece)
            return connection

        held.append(connect(b"\0"))  # and no more, but the connection stays
        deep = b"[" * 4000
        held.append(connect(processes._FRAME.pack(len(deep), 0), deep))
        large = json.dumps(["hello", {}, [["float32", [1 << 45]]]]).encode()
        held.append(connect(processes._FRAME.pack(len(large), 1 << 47), large))
        held.append(connect(*Message("hello", {"token": "wrong", "process": 1, "host": "x", "pid": 1}).pack()))
        held.append(connect(*Message("hello", {"token": told["token"], "process": 1}).pack()))
        facts = {"token": told["token"], "process": 1, "host": "here", "pid": 7}
        held.append(connect(*Message("hello", facts).pack()))

    held: list[socket.socket] = []
    began = time.monotonic()
    channel = processes._accept("127.0.0.1", Store(), 2, 30.0)
    assert time.monotonic() - began < 20
    assert channel._names == {1: channel._names[1]}
    assert channel._names[1].startswith("host here, pid 7, from 127.0.0.1")
    channel.close()
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    ("host", "meant"),  # this host's name may stand for a loopback address of its own, such as Debian's 127.0.1.1
    [
        ("localhost", "127.0.0.1"), ("here.example", "127.0.0.1"), ("here.example", "127.0.1.1"),
        ("here.example", "::1"), ("::1", "::1"),
    ],
)  # fmt: skip
def test_process_0_can_be_reached_by_every_address_that_its_name_may_mean(host: str, meant: str):
    try:
        socket.create_server((meant, 0), family=socket.AF_INET6 if ":" in meant else socket.AF_INET).close()
    except OSError as problem:
        pytest.skip(f"this machine has no address {meant}: {problem}")

    class Store:
        def key_value_set(self, _: str, value: str) -> None:
            told = json.loads(value)
            self.peer = socket.create_connection((meant, told["port"]), 10)
            facts = {"token": told["token"], "process": 1, "host": "there", "pid": 7}
            self.peer.sendall(b"".join(Message("hello", facts).pack()))

    store = Store()
    channel = processes._accept(host, store, 2, 30.0)
    assert re.fullmatch(r"host there, pid 7, from (127\.0\.\d\.1|::1)", channel._names[1])
    channel.close()
    store.peer.close()


def test_a_peer_that_nobody_can_hear_counts_as_gone(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise MemoryError("no room for it")

    monkeypatch.setattr(processes, "read_message", fail)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        channel = processes.Channel({1: mine}, {1: "elsewhere"}, 0, 2)
        channel.is_starting = False
        with pytest.raises(DeviceError, match=r"process 1 of 2 .elsewhere. is gone: no room for it"):
            channel.receive(1)
        channel.lost, channel._is_ending = "", True  # nothing of it is to end this process
