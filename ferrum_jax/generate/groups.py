"""Requests that share the beginning of a prompt: it is read once, and the others go on from there."""

from collections.abc import Iterable

from ferrum_jax.contract.errors import FerrumError, ResourceExhaustedError
from ferrum_jax.generate.host_model import Backend
from ferrum_jax.generate.request import Request


def fork_from_group(request: Request, running: Iterable[Request], backend: Backend) -> None:
    """Lets a request begin with what one of its group that runs has read, if there is any and the model can.

    Raises:
        FerrumError: the model failed.
    """
    position = request.fork_position
    if not request.group or not position or request.num_read or request.copies:
        return
    for one in running:
        if one.group == request.group and one.can_share(position) and is_current(one, backend):
            try:
                backend.fork(one.cache_id, request.cache_id)
                if backend.kv_len(request.cache_id) != position:  # more than `num_read`, while scores are in flight
                    backend.truncate_kv(request.cache_id, position)
            except FerrumError as problem:
                if not problem.is_client_error and not isinstance(problem, ResourceExhaustedError):
                    raise
                backend.release(request.cache_id)  # it reads the prompt itself
            else:
                request.share(one)
            return


def take_over(heir: Request, request: Request, backend: Backend) -> bool:
    """Lets a request go on in the sequence of another of its group, which is done; returns whether it can.

    The two change their ids.
    """
    position = heir.fork_position
    if heir.is_begun or not 0 < position <= request.num_read or not is_current(request, backend):
        return False
    try:
        backend.truncate_kv(request.cache_id, position)
    except FerrumError:
        return False
    heir.share(request)
    heir.cache_id, request.cache_id = request.cache_id, heir.cache_id
    return True


def is_current(request: Request, backend: Backend) -> bool:
    """True of a request whose keys and values are of the weights that are there."""
    return request.kv_version == backend.params_version
