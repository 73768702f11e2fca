"""Requests that share the beginning of a prompt: one of them prefills it, the others fork from its sequence."""

from collections.abc import Iterable

from ferrum_jax.contract.errors import FerrumError, ResourceExhaustedError
from ferrum_jax.generate.host_model import Backend
from ferrum_jax.generate.request import Request


def fork_from_group(request: Request, running: Iterable[Request], backend: Backend) -> None:
    """Forks a new request from a running one of its group, if there is one and the model can fork.

    Raises:
        FerrumError: the model failed.
    """
    position = request.fork_position
    if not request.group or not position or request.num_read or request.copies:
        return
    for one in running:
        if one.group == request.group and one.can_share(position) and one.kv_version == backend.params_version:
            try:
                backend.fork(one.cache_id, request.cache_id)
                if backend.kv_len(request.cache_id) != position:  # it exceeds `num_read` while scores are in flight
                    backend.truncate_kv(request.cache_id, position)
            except FerrumError as problem:
                if not problem.is_client_error and not isinstance(problem, ResourceExhaustedError):
                    raise
                backend.release(request.cache_id)  # it will prefill the prompt itself
            else:
                request.share(one)
            return


def take_over(heir: Request, request: Request, backend: Backend) -> bool:
    """Hands `heir` the sequence of `request`, which is done and of the same group; returns whether it could.

    The two requests swap their cache ids.
    """
    position = heir.fork_position
    if heir.is_begun or not 0 < position <= request.num_read or request.kv_version != backend.params_version:
        return False
    try:
        backend.truncate_kv(request.cache_id, position)
    except FerrumError:
        return False
    heir.share(request)
    heir.cache_id, request.cache_id = request.cache_id, heir.cache_id
    return True
