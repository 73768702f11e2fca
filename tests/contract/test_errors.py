import builtins
import subprocess
import sys

import ferrum_jax
from ferrum_jax import contract
from ferrum_jax.contract import errors
from ferrum_jax.contract.errors import FerrumError

KINDS = {
    "Config",
    "Model",
    "Tokenizer",
    "Backend",
    "Device",
    "Scheduler",
    "RequestValidation",
    "ResourceExhausted",
    "Timeout",
    "Auth",
    "RateLimit",
    "IO",
    "Serialization",
    "Network",
    "Internal",
    "Cancelled",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "Unsupported",
    "InvalidFormat",
    "InvalidParameter",
}
RETRYABLE = {"ResourceExhausted", "Timeout", "Network"}
CLIENT = {"RequestValidation", "Auth", "RateLimit", "NotFound", "AlreadyExists", "PermissionDenied", "Unsupported"}
SERVER = {"Model", "Backend", "Device", "Scheduler", "ResourceExhausted", "Timeout", "Internal"}


def test_every_kind_of_the_contract_is_a_class():
    assert {kind.__name__.removesuffix("Error") for kind in FerrumError.__subclasses__()} == KINDS


def test_a_kind_says_who_is_to_blame_and_is_a_builtin_too():
    for kind in KINDS:
        cls = getattr(errors, f"{kind}Error")
        error = cls("what happened")
        assert error.kind == kind
        assert error.is_retryable == (kind in RETRYABLE), kind
        assert error.is_client_error == (kind in CLIENT), kind
        assert error.is_server_error == (kind in SERVER), kind
        natural = [base for base in cls.__mro__ if base.__module__ == "builtins" and base not in (Exception, object)]
        assert natural, kind
        assert all(getattr(builtins, base.__name__) is base for base in natural)


def test_exhaustion_carries_its_numbers():
    error = errors.ResourceExhaustedError("short", needed=3, free=1)
    assert (error.needed, error.free) == (3, 1)


def test_the_errors_can_be_imported_by_their_public_name():
    code = (
        "import sys; from ferrum_jax.errors import RequestValidationError, TimeoutError; import ferrum_jax.errors; "
        "from ferrum_jax.contract import errors; assert ferrum_jax.errors.FerrumError is errors.FerrumError; "
        "assert ferrum_jax.errors.TimeoutError is errors.TimeoutError; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    from ferrum_jax import errors as public

    assert [name for name in dir(errors) if name.endswith("Error") and not hasattr(public, name)] == []


def test_a_star_import_has_what_is_imported_when_first_asked_for():
    names: dict[str, object] = {}
    exec("from ferrum_jax import *", names)
    wanted = {*ferrum_jax._LAZY, *contract.__all__, "errors"}
    assert wanted - names.keys() == set()
