"""Configurations of kernels: profiles of the user, which are read, written and refused, and the defaults below them.

Each default serves some call, and each call gets a configuration that its GPU allows.
"""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path

import pytest
import torch

from tests.compile.calls import call, call_of
from triton_relattn.kernels.call import call_of as kernels_call
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.architectures import ARCHITECTURES, architecture_of, rounds_terms
from triton_relattn.kernels.config.selection import CONDITIONS, COVERAGES, Row, conditions, config_of, defaults, fits, row_of
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig
from triton_relattn.kernels.tuning import save

ARCH = "sm_90"
CONFIG, OTHER = TileConfig(32, 32, 8, 3, "scores", max_registers=128), TileConfig(16, 16, 2, 1, None)
KIND = dict(zip(CONDITIONS, ("forward", "16 bits", "wgmma", "64", "none", "no table", "bfloat16", "False", "512"), strict=True))
ROW = row_of(KIND, CONFIG, 0.5, 1.0)
HEADER = (
    "kernel,precision,unit,width,term_set,coverage,dtype,is_causal,length,"
    "block_m,block_n,num_warps,num_stages,carry,rotation,max_registers,milliseconds,default_milliseconds\n"
)
LINE = "forward,16 bits,wgmma,64,none,no table,bfloat16,False,512,32,32,8,3,scores,gather,128,0.5,1\n"


def profile() -> Path:
    path = selection.profile_path(ARCH)
    assert path is not None
    return path


def select(length: int | None = 100, kernel: str = "forward", **changes: str) -> TileConfig:
    """Return the configuration of calls of ROW's kind, or of another. length, None: without a profile."""
    call = {**KIND, "length": str(selection.length_bucket(length or 0)), **changes}
    del call["kernel"]
    return selection.tables(ARCH).select(kernel, call, length is not None)


def load_quietly(path: Path) -> list[Row]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(selection.load(path, ARCH))


def test_a_file_is_read_and_written(tmp_path: Path) -> None:
    """A new row is written above others, and replaces one of the same kind."""
    path, general = tmp_path / "folder" / "of" / "profile.csv", row_of({}, OTHER)
    assert load_quietly(path) == []
    save(path, ARCH, ROW, "device: a GPU")
    assert path.read_text() == f"# device: a GPU\n{HEADER}{LINE}" and load_quietly(path) == [ROW]
    save(path, ARCH, row_of(KIND, OTHER), "yesterday")
    save(path, ARCH, general, "yesterday")
    save(path, ARCH, ROW, "date: today")
    assert load_quietly(path) == [ROW, general] and path.read_text().startswith("# date: today\nkernel,")


def test_the_user_s_row_wins() -> None:
    default = select()
    save(profile(), ARCH, ROW, "")
    assert select() == default != CONFIG  # read once
    selection.forget()
    assert select() == select(512) == CONFIG
    assert select(length=None) == select(length=513) == default
    assert select(is_causal="True") == select(length=None, is_causal="True")


def test_the_first_row_that_fits_wins() -> None:
    """A profile written by hand with the columns of defaults.csv, where a blank fits all calls."""
    default, header = select(length=None), selection.DEFAULTS.read_text().splitlines()[0]
    rows = ("forward,,,128,,,16,16,4,1,none,gather,", "forward,,,,,,32,32,4,2,scores,gather,", ",,,64,,,64,64,4,1,scores,gather,")
    text = "\n".join(("# by hand", "", header, rows[0], "# the others", *rows[1:]))
    profile().write_text(text, encoding="utf-8-sig")  # as a spreadsheet does
    selection.forget()
    assert select() == select(length=10**6) == TileConfig(32, 32, 4, 2) != default == select(length=None)
    assert select(width="128", precision="ieee", dtype="float32") == TileConfig(16, 16, 4, 1, None)
    assert select(kernel="dq", coverage="clamp", term_set="rel_bias") == TileConfig(64, 64, 4, 1)
    assert select(kernel="dq", width="128") == select(None, "dq", width="128")  # none fits


def test_conditions_of_calls() -> None:
    """They have padded widths, and distinguish float32 from TF32 and float16 from bfloat16."""
    call = {name: value for name, value in KIND.items() if name != "kernel"}
    assert conditions(ARCH, torch.bfloat16, "highest", 40) == call
    assert conditions(ARCH, torch.float16, "high", 40, length=513) == {**call, "dtype": "float16", "length": "2048"}
    for precision, name in (("highest", "ieee"), ("high", "tf32")):
        found = conditions(ARCH, torch.float32, precision, 80, "zero", True, "rel_bias", 40_000)
        assert list(found.values()) == [name, "wgmma", "128", "rel_bias", "zero", "float32", "True", "32768"]


@pytest.mark.parametrize(("queries", "keys"), [(100, 600), (600, 100)])
def test_a_call_is_served_by_its_longest_sequence(queries: int, keys: int) -> None:
    for row in (row_of({"length": "2048"}, CONFIG), row_of({"length": "512"}, OTHER)):
        save(profile(), ARCH, row, "")
    resolved = call_of(call(queries, num_keys=keys, positions=(-16, 16, "clamp"))).resolved()
    assert {kernels_call(*resolved, ARCH).tile(kernel) for kernel in KERNELS} == {CONFIG}


def changed(old: str, new: str) -> bytes:
    """A profile with a valid row, and then a changed one."""
    assert LINE.count(old) == 1
    return f"{HEADER}{LINE}{LINE.replace(old, new)}".encode()


BAD = {
    "empty": (b"", "line 0: the columns must be kernel,"),
    "binary": (bytes(range(256)), "can't decode byte 0x80"),
    "missing_column": (HEADER.replace("coverage,", "").encode(), "line 1: the columns must be kernel,"),
    "truncated": (f"# origin\n{HEADER}{LINE}{LINE[:-8]}".encode(), "line 4: 16 cells for 18 columns"),
    "huge_cell": (changed("0.5", "x" * 10**6), "line 3: field larger than field limit"),
    "no_number": (changed(",8,", ",eight,"), "line 3: invalid literal for int() with base 10: 'eight'"),
    "kernel_of_an_earlier_version": (
        changed("forward", "dq_from_ds"),
        "line 3: kernel must be one of forward, dkv, stored_dq, dtable, dp2c, dq, got 'dq_from_ds'",
    ),
    "dq_of_an_earlier_version": (
        changed(LINE, LINE.replace("forward", "stored_dq").replace("gather", "registers")),
        'line 3: rotation must be "gather" for stored_dq',
    ),
    "length": (changed("512", "1000"), "line 3: length must be one of 512, 2048, 8192, 32768, got '1000'"),
    "another_gpu_s": (changed("wgmma", "mma"), "line 3: unit must be one of wgmma, got 'mma'"),
    "not_a_power_of_two": (changed("32,32,", "48,32,"), "line 3: block_m must be a power of two"),
    "not_for_tables": (changed("no table,bfloat16,False,512,32", ",,,,128"), "line 3: with a table, block_m must be"),
}


def assert_warns_once(path: Path, reason: str) -> None:
    """Assert that the user's profile at path is ignored, with one warning: calls take the default."""
    with pytest.warns(RuntimeWarning) as caught:
        assert {select(), select(), select(length=1000)} == {select(length=None)}
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"{path} is ignored: ") and reason in message and len(message) < 700, message


@pytest.mark.parametrize(("content", "reason"), BAD.values(), ids=BAD)
def test_bad_files(content: bytes, reason: str) -> None:
    path = profile()
    path.write_bytes(content)
    assert_warns_once(path, reason)
    with pytest.warns(RuntimeWarning, match="is ignored"):
        save(path, ARCH, ROW, "")
    assert load_quietly(path) == [ROW]


def test_files_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in place of the file, and a file without permission."""
    profile().mkdir()
    assert_warns_once(profile(), "directory")
    selection.forget()
    read, path = Path.read_bytes, profile()

    def denied(file: Path) -> bytes:
        if file == path:
            raise PermissionError(13, "Permission denied", str(file))
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert_warns_once(path, "denied")


@pytest.mark.parametrize("folder", ["/dev/null/folder", "/proc/1/nothing", "a\0b"], ids=repr)
def test_a_folder_that_cannot_be(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls use the default configuration."""
    monkeypatch.setattr(selection, "cache_folder", lambda: Path(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert select() == select(length=None)
    with pytest.raises((OSError, ValueError)):
        save(profile(), ARCH, ROW, "")


@pytest.mark.parametrize(
    ("ours", "xdg", "home", "expected"),
    [
        ("/of/ours", "/of/xdg", "/of/user", "/of/ours"),
        ("", "/of/xdg", "/of/user", "/of/xdg/triton_relattn"),
        ("", "", "/of/user", "/of/user/.cache/triton_relattn"),
        ("~/folder", "", "/of/user", "/of/user/folder"),
        ("", "~/folder", "/of/user", "/of/user/folder/triton_relattn"),
        ("~/folder", "", "", None),
        ("/of/ours", "", "", "/of/ours"),
    ],
)
def test_where_the_user_s_profiles_are(
    ours: str, xdg: str, home: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty variables are ignored. Without a home there is no profile, neither in temporary files nor in a folder "~"."""
    for name, value in (("TRITON_RELATTN_CACHE", ours), ("XDG_CACHE_HOME", xdg), ("HOME", home)):
        monkeypatch.setenv(name, value)
    if not home:
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(selection.triton, "__version__", "3.10.2+rocm")
    path = selection.profile_path(ARCH)
    assert path == (None if expected is None else Path(expected, "profile-sm_90-triton-3.10.csv"))
    assert select() == select(length=None)


@pytest.mark.parametrize(
    ("arch", "config", "reason"),
    [
        ("sm_90", TileConfig(48, 16, 4, 1), "block_m must be a power of two, got 48"),
        ("gfx942", TileConfig(64, 64, 32, 2), "num_warps must be at most 16"),
        ("sm_90", TileConfig(64, 64, 4, 10**6), "num_stages must lie in"),
        ("sm_90", TileConfig(64, 64, -4, 1), "num_warps must be a power of two"),
        ("sm_90", CONFIG, "no space left"),
    ],
)
def test_a_failed_save_changes_nothing(
    arch: str, config: TileConfig, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no GPU can serve is not saved."""
    path = tmp_path / "profile.csv"
    save(path, arch, row_of({"kernel": "dq"}, OTHER), "")
    before, files = path.read_bytes(), set(tmp_path.iterdir())

    def fails(*_: object) -> None:
        raise ValueError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(ValueError, match=reason):
        save(path, arch, row_of({"kernel": "forward", "coverage": "no table"}, config), "")
    assert path.read_bytes() == before and set(tmp_path.iterdir()) == files


# The defaults.


TERM_SETS = ("none", "rel_value", "rel_p2c", "rel_query", "narrow rel_query", "rel_key and rel_bias", "rel_bias", "grid")
ARCHS = (*ARCHITECTURES, "interpreter", "sm_70")
PRECISIONS, WIDTHS = ("16 bits", "ieee", "tf32"), ("64", "128", "256")


def test_each_call_gets_a_valid_default_and_each_default_serves_a_call() -> None:
    """No row is hidden by rows above it. Calls without a table, and on a grid, exist only for some kernels."""
    reached = set()
    for kernel, precision, arch, width, terms, coverage in itertools.product(
        KERNELS, PRECISIONS, ARCHS, WIDTHS, TERM_SETS, COVERAGES
    ):
        kind = (kernel, precision, architecture_of(arch).unit, width, terms, coverage)
        number, row = next((number, row) for number, row in enumerate(defaults()) if fits(row, kind))
        reached.add(number)
        config, has_table = config_of(row), coverage != "no table"
        exists = terms != "grid" if has_table else terms in ("none", "grid") and kernel in ("forward", "dq", "dkv")
        if exists and arch != "interpreter":
            assert config.why_invalid(arch, has_table, kernel) is None, (arch, kind, config)
            assert config.rotation == "gather" or architecture_of(arch).rotates_in_registers, (arch, config)
    assert [row for number, row in enumerate(defaults()) if number not in reached] == []


def test_specific_defaults_stand_above_general_ones() -> None:
    """select takes the first row that fits."""
    assert select(None, coverage="full", term_set="rel_value").num_stages == 2
    assert select(None, coverage="full").max_registers == 168
    assert select(None).block_m == 128


def test_rounded_terms() -> None:
    """Terms are rounded to float16 only for bfloat16: in float16 the error of a table's gradient would exceed the error rule."""
    assert rounds_terms("sm_90", torch.bfloat16)
    assert not any(rounds_terms("sm_90", dtype) for dtype in (torch.float16, torch.float32))


def test_unknown_architectures(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown GPUs get small tiles that fit anywhere, and a line in the log."""
    for arch in ("sm_75", "sm_130", "gfx1201"):
        caplog.clear()
        for kernel in KERNELS:
            for width in (64, 128, 256):
                kind = conditions(arch, torch.bfloat16, "highest", width, "full")
                config = selection.tables(arch).select(kernel, kind, with_profile=False)
                assert max(config.block_m, config.block_n) <= 64 and config.rotation == "gather"
                assert config.why_invalid(arch, True, kernel) is None
        assert [record.getMessage() for record in caplog.records] == [
            f"the kernels have no configurations for {arch}; small tiles are used, which are slow"
        ]


def test_smaller_configurations_are_valid() -> None:
    """Halving a configuration gives valid ones, down to the smallest."""
    in_registers = TileConfig(128, 64, 8, 2, rotation="registers")  # whose warps have at least 16 rows
    for config in (TileConfig(128, 64, 8, 3), TileConfig(64, 64, 4, 1), TileConfig(32, 16, 4, 2, None), in_registers):
        steps = 0
        smaller: TileConfig | None = config
        while smaller is not None:
            assert smaller.why_invalid("sm_90", True) is None
            assert (smaller.carry, smaller.rotation) == (config.carry, config.rotation)
            assert smaller.num_warps == config.num_warps or smaller.num_warps * 16 == smaller.block_m
            last, smaller, steps = smaller, smaller.smaller(), steps + 1
        assert (last.block_m, last.block_n, last.num_stages) == (16, 16, 1) and steps < 9
