"""Profiles: configurations read from files, the files that are refused, and how files are written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import PATIENCE

pytest.importorskip("triton")

from triton_relattn._core import validation
from triton_relattn.kernels import configs, profiles
from triton_relattn.kernels.arguments import Call
from triton_relattn.kernels.configs import TileConfig
from triton_relattn.kernels.profiles import Entry, Key

ARCH = "sm_90"
CONFIG, OTHER = TileConfig(32, 32, 8, 3, "both"), TileConfig(16, 16, 2, 1, None)
KEY = Key("forward", ARCH, "bfloat16", 64, "no table", False, None, 512)
ENTRY = Entry(CONFIG, timed=True, milliseconds=0.5, default_milliseconds=1)
ROW: dict[str, Any] = {
    "kernel": "forward",
    "arch": ARCH,
    "dtype": "bfloat16",
    "width": 64,
    "coverage": "no table",
    "is_causal": False,
    "term_set": None,
    "length_bucket": 512,
    "config": {
        "block_m": 32,
        "block_n": 32,
        "num_warps": 8,
        "num_stages": 3,
        "carry": "both",
        "rotation": "gather",
        "max_registers": None,
    },
    "timed": True,
    "milliseconds": 0.5,
    "default_milliseconds": 1,
}
DOCUMENT: dict[str, Any] = {"format": "triton_relattn profile", "version": 2, "device": "a GPU", "entries": [ROW]}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Profiles of the user and of the package that are this test's own."""
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profiles, "PACKAGE_FOLDER", tmp_path / "tuned")
    (tmp_path / "tuned").mkdir()
    profiles.forget()
    yield
    profiles.forget()


def package_profile_path() -> Path:
    return profiles.PACKAGE_FOLDER / f"{ARCH}.json"


def select(length: int | None = 100) -> TileConfig:
    """Return the configuration that calls of KEY's kind get."""
    return configs.select("forward", ARCH, torch.bfloat16, 40, length=length)


def load_quietly(path: Path) -> dict[Key, TileConfig]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return profiles.load(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(DOCUMENT))
    assert load_quietly(path) == {KEY: CONFIG}


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert load_quietly(tmp_path / "none.json") == load_quietly(tmp_path / "file" / "none.json") == {}


def test_what_is_not_timed_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    untimed = {**ROW, "kernel": "dq", "timed": False, "milliseconds": None, "default_milliseconds": None}
    path.write_text(json.dumps({**DOCUMENT, "entries": [untimed, ROW]}))
    assert load_quietly(path) == {KEY: CONFIG}


def test_a_user_s_entry_wins() -> None:
    default = select()
    assert default not in (CONFIG, OTHER) and profiles.find(KEY) is None
    profiles.save(package_profile_path(), {KEY: ENTRY, replace(KEY, is_causal=True): ENTRY})
    assert select() == default  # read once
    profiles.forget()
    assert select() == CONFIG
    profiles.save(profiles.user_profile_path(ARCH), {KEY: replace(ENTRY, config=OTHER)})
    profiles.forget()
    assert select() == OTHER
    assert profiles.find(replace(KEY, is_causal=True)) == CONFIG
    assert select(length=None) == select(length=513) == default


def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def load(path: Path) -> dict[Key, TileConfig]:
        read.append(path)
        return {}

    monkeypatch.setattr(profiles, "load", load)
    for _ in range(3):
        select()
    assert read == [package_profile_path(), profiles.user_profile_path(ARCH)]


def test_length_buckets() -> None:
    lengths = (0, 1, 512, 513, 2048, 2049, 8192, 8193, 32768, 10**6)
    assert [profiles.length_bucket(length) for length in lengths] == [512] * 3 + [2048] * 2 + [8192] * 2 + [32768] * 3


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths are padded, and float32 is told from TF32, whose kernels are others."""
    assert configs.profile_key("forward", ARCH, torch.bfloat16, 40, "no table", False, None, 100) == KEY
    for precision, name in (("highest", "float32"), ("high", "tf32")):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        key = configs.profile_key("dq", ARCH, torch.float32, 80, "zero", True, "rel_bias", 3000)
        assert key == Key("dq", ARCH, name, 128, "zero", True, "rel_bias", 8192)


@pytest.mark.parametrize(("queries", "keys"), [(100, 600), (600, 100)])
def test_a_call_is_served_by_its_longest_sequence(queries: int, keys: int) -> None:
    query, key = torch.empty(1, 2, queries, 64, dtype=torch.bfloat16), torch.empty(1, 2, keys, 64, dtype=torch.bfloat16)
    resolved = validation.resolve(query, key, key, torch.empty(33, 64, dtype=torch.bfloat16), scale=0.1)
    call = Call(*resolved, arch=ARCH)
    assert call.coverage == "clamp"
    for kernel in configs.KERNELS:
        profiles.save(
            profiles.user_profile_path(ARCH),
            {
                replace(KEY, kernel=kernel, coverage="clamp", length_bucket=2048): ENTRY,
                replace(KEY, kernel=kernel, coverage="clamp"): replace(ENTRY, config=OTHER),
            },
        )
    assert {call.tile(kernel) for kernel in configs.KERNELS} == {CONFIG}
    assert call.tile("dq", OTHER) == OTHER
    assert Call(*resolved, arch="interpreter").tile("dq") == TileConfig(64, 64, 4, 1)


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if field != name}


def document(**changes: Any) -> bytes:
    return json.dumps({**DOCUMENT, **changes}).encode()


def row(**changes: Any) -> bytes:
    """A profile with this besides a good entry."""
    return document(entries=[ROW, {**ROW, **changes}])


def tile(**changes: Any) -> bytes:
    return row(config={**ROW["config"], **changes})


BAD = {
    "empty": (b"", "Expecting value"),
    "truncated": (document()[:-2], "delimiter"),
    "binary": (bytes(range(256)), "Expecting value"),
    "nested": (b"[" * 10**5, "recursion"),
    "list": (b"[]", "not an object"),
    "format": (document(format="another"), "format"),
    "version": (document(version=3), "version is 3"),
    "version_bool": (document(version=True), "version is True"),
    "entries": (document(entries={}), "entries is not a list"),
    "entry": (document(entries=[ROW, 1]), "1 is not an object"),
    "no_entries": (json.dumps(without(DOCUMENT, "entries")).encode(), "entries is not a list"),
    "missing": (document(entries=[without(ROW, "timed")]), "timed is missing"),
    "missing_carry": (row(config=without(ROW["config"], "carry")), "carry is missing"),
    "bool_for_int": (tile(num_stages=True), "num_stages must be int"),
    "float_for_int": (tile(block_m=32.0), "block_m must be int"),
    "int_for_bool": (row(is_causal=0), "is_causal must be bool"),
    "list_for_str": (row(dtype=["bfloat16"]), "dtype must be str"),
    "null_for_config": (row(config=None), "config must be TileConfig"),
    "nan": (row(milliseconds=float("nan")), "milliseconds must be float"),
    "infinite": (document().replace(b"0.5", b"1e999"), "milliseconds must be float"),
    "kernel": (row(kernel="sideways"), "sideways"),
    "length_bucket": (row(length_bucket=1000), "1000"),
    "not_a_power_of_two": (tile(block_m=48), "block_m must be a power of two"),
    "too_wide_for_a_table": (row(coverage="clamp", config={**ROW["config"], "block_m": 128}), "with a table"),
    "miscompiled": (row(arch="sm_100", config={**ROW["config"], "num_warps": 4}), "sm_100"),
}


def assert_warns_once(path: Path, reason: str) -> None:
    """Assert that the user's profile at path is ignored, with one warning, and that the package's still counts."""
    profiles.save(package_profile_path(), {KEY: ENTRY})
    with pytest.warns(RuntimeWarning) as caught:
        assert [select(), select(), select(length=1000)] == [CONFIG, CONFIG, select(length=None)]
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"{path} is ignored: ") and reason in message, message
    assert len(message) < 600


@pytest.mark.parametrize(("content", "reason"), BAD.values(), ids=BAD)
def test_bad_files(content: bytes, reason: str) -> None:
    path = profiles.user_profile_path(ARCH)
    path.parent.mkdir()
    path.write_bytes(content)
    assert_warns_once(path, reason)
    with pytest.warns(RuntimeWarning, match="is ignored"):
        profiles.save(path, {KEY: replace(ENTRY, config=OTHER)})
    assert load_quietly(path) == {KEY: OTHER}


def test_a_folder_in_the_file_s_place() -> None:
    path = profiles.user_profile_path(ARCH)
    path.mkdir(parents=True)
    assert_warns_once(path, "directory")
    with pytest.warns(RuntimeWarning), pytest.raises(OSError):
        profiles.save(path, {KEY: ENTRY})
    assert sorted(path.parent.iterdir()) == [path, path.with_name(path.name + ".lock")]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file() -> None:
    path = profiles.user_profile_path(ARCH)
    profiles.save(path, {KEY: ENTRY})
    path.chmod(0)
    assert_warns_once(path, "denied")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select() == select(length=None)
    with pytest.raises(OSError):
        profiles.save(profiles.user_profile_path(ARCH), {KEY: ENTRY})


def test_where_the_user_s_profiles_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles.triton, "__version__", "3.10.2+rocm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/of/xdg")
    monkeypatch.setenv("HOME", "/of/user")
    name = "profile-sm_90-triton-3.10.json"
    assert profiles.user_profile_path(ARCH) == Path(os.environ["TRITON_RELATTN_CACHE"], name)
    monkeypatch.delenv("TRITON_RELATTN_CACHE")
    assert profiles.user_profile_path(ARCH) == Path("/of/xdg/triton_relattn", name)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profiles.user_profile_path(ARCH) == Path("/of/user/.cache/triton_relattn", name)


def test_what_save_writes(tmp_path: Path) -> None:
    """New entries replace old ones, others stay, those that are not timed too."""
    path = tmp_path / "folder" / "of" / "profile.json"
    untimed = replace(KEY, kernel="dtable")
    profiles.save(path, {KEY: replace(ENTRY, config=OTHER), untimed: Entry(OTHER, timed=False)}, device="a GPU", commit="a")
    profiles.save(path, {KEY: ENTRY}, device="a GPU", commit=None)
    written = json.loads(path.read_text())
    kept = {**ROW, "kernel": "dtable", "config": vars(OTHER), "timed": False, "milliseconds": None, "default_milliseconds": None}
    assert written == {**DOCUMENT, "commit": None, "entries": [ROW, kept]}
    assert load_quietly(path) == {KEY: CONFIG}


def fails(*_: Any) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failed_save_changes_nothing(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    profiles.save(path, {KEY: ENTRY})
    before, files = path.read_bytes(), set(tmp_path.iterdir())
    monkeypatch.setattr(os, function, fails)
    with pytest.raises(OSError, match="no space left"):
        profiles.save(path, {KEY: replace(ENTRY, config=OTHER)})
    assert path.read_bytes() == before and set(tmp_path.iterdir()) == files


@pytest.mark.parametrize(
    "entry",
    [Entry(TileConfig(48, 16, 4, 1), True, 1.0, 1.0), replace(ENTRY, milliseconds=float("nan")), replace(ENTRY, timed=1)],
    ids=["tile", "nan", "type"],
)
def test_save_refuses_what_load_would(entry: Entry, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ValueError):
        profiles.save(path, {KEY: entry})
    assert not path.exists()


@pytest.mark.parametrize("suffix", ["lock", f"{os.getpid()}.tmp"], ids=["lock", "temporary"])
def test_links_are_not_followed(suffix: str, tmp_path: Path) -> None:
    """A link in the place of the lock or of the temporary file is not followed: the file that it points to does not change."""
    path, other = tmp_path / "profile.json", tmp_path / "other"
    other.write_text("precious")
    path.with_name(f"{path.name}.{suffix}").symlink_to(other)
    if suffix == "lock":
        with pytest.raises(OSError, match=r"profile\.json\.lock"):
            profiles.save(path, {KEY: ENTRY})
    else:
        profiles.save(path, {KEY: ENTRY})
        assert load_quietly(path) == {KEY: CONFIG} and not path.is_symlink()
    assert other.read_text() == "precious"


def test_save_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "fcntl", None)
    profiles.save(tmp_path / "profile.json", {KEY: ENTRY})
    assert load_quietly(tmp_path / "profile.json") == {KEY: CONFIG}


SAVER = """
import sys
from pathlib import Path
from triton_relattn.kernels.profiles import Entry, Key, save
from triton_relattn.kernels.tile_config import TileConfig
print(flush=True)
sys.stdin.readline()
for i in range(20):
    key = Key("forward", "sm_90", "bfloat16", 64, "no table", False, f"{sys.argv[2]} {i}", 512)
    save(Path(sys.argv[1]), {key: Entry(TileConfig(32, 32, 4, 1), True, 1.0, 1.0)})
"""


@pytest.mark.thorough
def test_processes_that_save_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    savers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SAVER, str(path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for name in "ab"
    ]
    for saver in savers:
        assert saver.stdout is not None and saver.stdout.readline()  # both have imported what they need
    for saver in savers:
        assert saver.stdin is not None
        saver.stdin.write("\n")
        saver.stdin.flush()
    for saver in savers:
        saver.communicate(timeout=PATIENCE)
        assert saver.returncode == 0
    assert {key.term_set for key in load_quietly(path)} == {f"{name} {i}" for name in "ab" for i in range(20)}
    assert sorted(tmp_path.glob("profile*")) == [path, tmp_path / "profile.json.lock"]


def made_up(tmp_path: Path) -> Path:
    path = tmp_path / f"{ARCH}.json"
    profiles.save(path, {KEY: ENTRY})
    return path


SHIPPED = sorted(Path(profiles.__file__).with_name("tuned").glob("*.json"))


@pytest.mark.parametrize("path", [*SHIPPED, made_up], ids=lambda path: getattr(path, "name", "made_up"))
def test_shipped_profiles(path: Path | Callable[[Path], Path], tmp_path: Path) -> None:
    """The package's, and one made up that would do: each is of one architecture, and serves calls that there are."""
    path = path if isinstance(path, Path) else path(tmp_path)
    loaded = load_quietly(path)
    assert loaded
    for key in loaded:
        assert f"{key.arch}.json" == path.name
        assert key.dtype in ("float16", "bfloat16", "float32", "tf32") and key.width in (64, 128, 256)
        assert key.coverage in ("no table", "full", "clamp", "zero")


@pytest.mark.thorough
def test_the_tests_do_not_read_the_user_s_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    child = [sys.executable, "-c", "from triton_relattn.kernels.profiles import cache_folder; print(cache_folder())"]
    output = subprocess.run(child, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout.strip()
    assert output == str(profiles.cache_folder()) and Path(output).name.startswith("triton_relattn-")
    assert list(Path(output).glob("profile-*")) == []  # other tests keep other things there
