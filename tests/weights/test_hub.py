import errno
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

from ferrum_jax.contract.errors import (
    AuthError,
    ConfigError,
    InvalidFormatError,
    IOError,
    NetworkError,
    NotFoundError,
    RateLimitError,
)
from ferrum_jax.weights import hub, wheel_model

COMMIT, TAG_COMMIT = "a1" * 20, "b2" * 20
WANTED = {
    "config.json": b"{}",
    "generation_config.json": b'{"a": 1}',
    "tokenizer.json": b"tokens",
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"second",
}
UNWANTED = {
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle too",
    "consolidated.safetensors": b"again",
    "onnx/model.safetensors": b"and again",
    "onnx/config.json": b"{  }",
}
REPOSITORIES = {
    "org/tiny": {**WANTED, **UNWANTED},
    "org/gated": {"config.json": b"{}"},
    "org/ggufs": {"model.gguf": b"GGUF"},
}


class FakeHub(ThreadingHTTPServer):
    """As much of the Hub as a snapshot needs; `broken` maps a repository to the status of everything below it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubRequest)
        self.asked: list[str] = []
        self.broken: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class FakeHubRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, FakeHub)
        path = unquote(urlsplit(self.path).path).strip("/")
        server.asked.append(path)
        is_api = path.startswith("api/models/")
        org, name, kind, *rest = path.removeprefix("api/models/").split("/")
        repo_id = f"{org}/{name}"
        if status := server.broken.get(repo_id):
            return self.answer(status)
        if (files := REPOSITORIES.get(repo_id)) is None:
            return self.answer(404, X_Error_Code="RepoNotFound")
        commit = {"main": COMMIT, COMMIT: COMMIT, "v2": TAG_COMMIT, TAG_COMMIT: TAG_COMMIT}.get(rest[0])
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if not is_api:
            if repo_id == "org/gated":
                return self.answer(403, X_Error_Code="GatedRepo")
            content = files["/".join(rest[1:])]
            return self.answer(200, content, ETag=f'"{sha1(content).hexdigest()}"', X_Repo_Commit=commit)
        if kind == "revision":
            siblings = [{"rfilename": file} for file in files]
            reply: object = {"id": repo_id, "sha": commit, "siblings": siblings}
        else:
            reply = [
                {"type": "file", "path": file, "size": len(content), "oid": sha1(content).hexdigest()}
                for file, content in files.items()
            ]
        self.answer(200, json.dumps(reply).encode(), Content_Type="application/json")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        use_endpoint(monkeypatch, server.url, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield server
        server.shutdown()
        thread.join()
        huggingface_hub.close_session()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    real = SNAPSHOT_DOWNLOAD
    monkeypatch.setattr(huggingface_hub, "snapshot_download", partial(real, endpoint=url, cache_dir=cache, token=False))


SNAPSHOT_DOWNLOAD = huggingface_hub.snapshot_download


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_model_is_the_default_model_in_the_user_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def fetch(model: object, folder: Path, *, progress: bool) -> Path:
        asked.extend([model, folder, progress])
        return folder / "file"

    monkeypatch.setattr(hub, "fetch_wheel_model", fetch)
    monkeypatch.setattr(hub, "user_cache_dir", lambda name: str(tmp_path / name))
    assert hub.resolve(None) == tmp_path / "ferrum_jax" / "models" / "file"
    assert asked == [wheel_model.DEFAULT_MODEL, tmp_path / "ferrum_jax" / "models", False]  # stderr is no terminal


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises a KeyError: the system does not know the user
    with pytest.raises(IOError, match=r"the default model cannot be kept: .*; set XDG_CACHE_HOME, or name a model"):
        hub.resolve(None)


def test_the_default_model_is_what_it_was() -> None:
    assert wheel_model.DEFAULT_MODEL.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert wheel_model.DEFAULT_MODEL.size == 98_362_432


def test_an_existing_folder_or_gguf_file_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "a@b.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert hub.resolve("org/name") == Path("org/name")
    assert hub.resolve("./org") == Path("org")
    assert hub.resolve(tmp_path / "org") == tmp_path / "org"
    assert hub.resolve(str(tmp_path / "a@b.gguf")) == tmp_path / "a@b.gguf"
    assert hub.resolve("~/org/name") == tmp_path / "org" / "name"


@pytest.mark.parametrize(
    "absent", ["./model", "../model", "/a/model", "~/model", "model.gguf", "org/name.GGUF", "a/b/c", Path("org/name")]
)
def test_what_looks_like_a_path_and_is_absent_is_not_looked_for_on_the_hub(absent: str | Path, server: FakeHub) -> None:
    with pytest.raises(NotFoundError) as caught:
        hub.resolve(absent)
    assert os.path.expanduser(absent).removeprefix("./") in str(caught.value)
    assert server.asked == []


@pytest.mark.parametrize("wrong", ["", "@main", "org/name@"])
def test_what_is_neither_a_path_nor_an_id_is_refused(wrong: str, server: FakeHub) -> None:
    with pytest.raises(InvalidFormatError):
        hub.resolve(wrong)
    assert server.asked == []


@pytest.mark.parametrize("wrong", ["org/na me", "org/name--x", "-org/name"])
def test_an_id_the_hub_cannot_have_is_not_found(wrong: str, server: FakeHub) -> None:
    with pytest.raises(NotFoundError, match=wrong):
        hub.resolve(wrong)
    assert server.asked == []


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(InvalidFormatError, match=r"model\.bin"):
        hub.resolve(tmp_path / "model.bin")


def test_only_what_is_needed_is_downloaded(server: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    folder = hub.resolve("org/tiny")
    assert files_below(folder) == WANTED
    assert capfd.readouterr() == ("", "")  # stderr is no terminal


def test_a_revision_is_followed(server: FakeHub) -> None:
    assert hub.resolve("org/tiny@v2").name == TAG_COMMIT
    assert hub.resolve("org/tiny").name == COMMIT
    assert hub.resolve(f"org/tiny@{TAG_COMMIT}").name == TAG_COMMIT


def test_a_snapshot_is_called_by_its_id_and_others_by_their_own_name(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked in ("org/tiny", "org/tiny@v2"):
        assert hub.model_name(hub.resolve(asked)) == "org/tiny"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to("elsewhere")
    names = {"linked": "linked", ".": tmp_path.name, "..": tmp_path.parent.name, "models--gpt2/snapshots/a1": "gpt2"}
    names["models--org--ggufs/snapshots/a1/model.gguf"] = "model.gguf"
    assert {path: hub.model_name(Path(path)) for path in names} == names


def test_the_second_time_works_when_the_server_is_gone(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub.resolve("org/tiny")
    use_endpoint(monkeypatch, closed_port(), tmp_path / "cache")
    assert hub.resolve("org/tiny") == folder
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("org/tiny@main") == folder


def test_an_incomplete_download_is_not_returned_when_the_server_is_gone(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub.resolve("org/tiny")
    (folder / "model-00002-of-00002.safetensors").unlink()
    use_endpoint(monkeypatch, closed_port(), tmp_path / "cache")
    with pytest.raises(NetworkError, match="org/tiny"):
        hub.resolve("org/tiny")


@pytest.mark.parametrize("model", ["org/absent", "absent"])
def test_a_missing_repository_is_not_found(model: str, server: FakeHub) -> None:
    with pytest.raises(NotFoundError, match=model):
        hub.resolve(model)


def test_a_missing_revision_is_not_found(server: FakeHub) -> None:
    with pytest.raises(NotFoundError, match=r"org/tiny@v9: .*revision"):
        hub.resolve("org/tiny@v9")
    with pytest.raises(NotFoundError, match=r"org/tiny@refs/pr/9: the repository exists"):
        hub.resolve("org/tiny@refs/pr/9")


def test_a_repository_without_a_config_is_not_found(server: FakeHub) -> None:
    with pytest.raises(NotFoundError, match=r"org/ggufs has no config\.json"):
        hub.resolve("org/ggufs")


def test_a_gated_repository_is_an_auth_error(server: FakeHub) -> None:
    with pytest.raises(AuthError, match="org/gated is gated"):
        hub.resolve("org/gated")


@pytest.mark.parametrize(("status", "kind"), [(403, AuthError), (429, RateLimitError), (503, NetworkError)])
def test_a_refusal_is_named_by_its_status(server: FakeHub, status: int, kind: type[Exception]) -> None:
    server.broken["org/tiny"] = status
    with pytest.raises(kind, match="org/tiny"):
        hub.resolve("org/tiny")


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_dead_server_is_a_network_error_that_says_why(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_endpoint(monkeypatch, closed_port(), tmp_path / "cache")
    with pytest.raises(NetworkError, match=r"org/tiny@v2.*refused"):
        hub.resolve("org/tiny@v2")


def test_being_told_to_stay_offline_is_a_network_error(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NetworkError, match=r"org/tiny.*offline mode"):
        hub.resolve("org/tiny")
    assert server.asked == []


def test_an_answer_that_is_no_hub_is_a_network_error(server: FakeHub) -> None:
    server.broken["org/tiny"] = 200  # an empty page where JSON should be
    with pytest.raises(NetworkError, match="org/tiny"):
        hub.resolve("org/tiny")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), IOError),
        (PermissionError(errno.EACCES, "Permission denied"), IOError),
        (PermissionError("token expired"), AuthError),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), NetworkError),
        (OSError("Consistency check failed"), NetworkError),
        (RuntimeError("Data processing error"), NetworkError),
    ],
)
def test_what_a_download_raises_half_way_is_sorted(
    raised: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(kind, match="org/some") as caught:
        hub.resolve("org/some")
    assert caught.value.__cause__ is raised


def test_a_bug_is_not_called_a_network_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(TypeError):
        hub.resolve("org/some")


@pytest.mark.parametrize("stream", [None, object()])
def test_a_model_is_found_without_a_standard_error(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert hub.resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("model", [5, ["a"], b"/x"])
def test_what_is_no_path_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="expected the path of a model"):
        hub.resolve(model)
