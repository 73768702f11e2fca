"""The connections between processes where many files are open, and a JAX that has no key-value store for them."""

import fcntl
import resource
import socket
import sys

import numpy as np
import pytest

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.sharding.processes import Message, open_channel, read_message

MANY = 1024  # descriptors; `select.select` takes none above


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= MANY + 8:
        pytest.skip(f"a process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY + 8), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_messages_arrive_where_many_files_are_open(many_files: None):
    near, far = socket.socketpair()
    with near, far, socket.socket(fileno=fcntl.fcntl(far, fcntl.F_DUPFD, MANY)) as high:
        assert high.fileno() >= MANY
        for piece in Message("step", {}, [np.arange(3)]).pack():
            near.sendall(piece)
        np.testing.assert_array_equal(read_message(high, 1.0).arrays[0], np.arange(3))


def test_a_jax_without_its_key_value_store_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
    with pytest.raises(UnsupportedError, match=r"need jax\._src\.distributed\.global_state, which JAX \d.* does not"):
        open_channel(2, 0)
