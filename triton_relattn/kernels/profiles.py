"""Profiles: files of launch configurations that were timed, shipped with the package or in the user's cache folder.

A profile is a JSON object with "format", "version", the origin of its entries (device, versions, date, ...) and "entries". An
entry has the fields of a Key, "config" (a TileConfig), "timed", "milliseconds" and "default_milliseconds" (null: not measured).
A file is used whole or not at all.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
import os
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import triton

from .._core.cache import cache_folder
from .tile_config import KERNELS, TileConfig

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

FORMAT, VERSION = "triton_relattn profile", 2
PACKAGE_FOLDER = Path(__file__).parent / "tuned"
LENGTH_BUCKETS = (512, 2048, 8192, 32768)


@dataclass(frozen=True)
class Key:
    """Properties of a call that configs.select depends on; configs.profile_key makes one from a call."""

    kernel: str
    arch: str
    dtype: str  # "bfloat16", ...; "tf32": float32 whose products are computed so
    width: int  # of the tile: 64, 128 or 256
    coverage: str
    is_causal: bool
    term_set: str | None
    length_bucket: int


@dataclass(frozen=True)
class Entry:
    """A configuration, with the times of the kernel in this and in the default configuration; load skips entries not timed."""

    config: TileConfig
    timed: bool
    milliseconds: float | None = None
    default_milliseconds: float | None = None


_TYPES = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int), "None": (type(None),), "TileConfig": (dict,)}


def length_bucket(length: int) -> int:
    """Return the smallest of LENGTH_BUCKETS that is not below a length; the last one also stands for everything longer."""
    return LENGTH_BUCKETS[bisect.bisect_left(LENGTH_BUCKETS[:-1], length)]


def user_profile_path(arch: str) -> Path | None:
    """Return the path of the user's profile of an architecture; None for a user without a home.

    Times depend on the version of Triton, so each minor version has a profile of its own.
    """
    folder, version = cache_folder(), ".".join(triton.__version__.split(".")[:2])
    return None if folder is None else folder / f"profile-{arch}-triton-{version}.json"


def _values(kind: type, data: Any) -> dict[str, Any]:
    """Return the fields of a dataclass (of this module, or TileConfig) from a JSON object; ValueError if any is missing or
    wrong."""
    if type(data) is not dict:
        raise ValueError(f"{data!r:.100} is not an object")
    for field in fields(kind):
        if field.name not in data:
            raise ValueError(f"{field.name} is missing from {data!r:.200}")
        value = data[field.name]
        allowed = [python_type for name in str(field.type).split(" | ") for python_type in _TYPES[name]]
        if type(value) not in allowed or (type(value) is float and not math.isfinite(value)):
            raise ValueError(f"{field.name} must be {field.type}, got {value!r:.100}")
    return {field.name: data[field.name] for field in fields(kind)}


def _parse(content: bytes) -> dict[Key, Entry]:
    """Return the entries of a profile; ValueError says what is wrong with it."""
    document = json.loads(content)
    if type(document) is not dict or document.get("format") != FORMAT:
        raise ValueError(f'it is not an object whose format is "{FORMAT}"')
    if type(document.get("version")) is not int or document["version"] != VERSION:
        raise ValueError(f"its version is {document.get('version')!r:.100}, not {VERSION}")
    if type(document.get("entries")) is not list:
        raise ValueError("entries is not a list")
    entries = {}
    for data in document["entries"]:
        key, values = Key(**_values(Key, data)), _values(Entry, data)
        config = TileConfig(**_values(TileConfig, values["config"]))
        if key.kernel not in KERNELS or key.length_bucket not in LENGTH_BUCKETS:
            raise ValueError(f"no call has the kernel and the length bucket of {key}")
        if reason := config.why_invalid(key.arch, key.coverage != "no table", key.kernel):
            raise ValueError(f"{config} for {key}: {reason}")
        entries[key] = Entry(**{**values, "config": config})
    return entries


def _read(path: Path) -> dict[Key, Entry]:
    """Return the entries of a file. If anything is wrong with it, warn and return none; if it does not exist, return none."""
    try:
        return _parse(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"{path} is ignored: {error}", RuntimeWarning, stacklevel=3)
    return {}


def load(path: Path) -> dict[Key, TileConfig]:
    """Return the timed configurations of a file. If anything is wrong with it, warn and return none."""
    return {key: entry.config for key, entry in _read(path).items() if entry.timed}


@functools.cache
def _profiles(arch: str) -> dict[Key, TileConfig]:
    paths = (PACKAGE_FOLDER / f"{arch}.json", user_profile_path(arch))
    return {key: config for path in paths if path is not None for key, config in load(path).items()}


def exist(arch: str) -> bool:
    """Return whether there is any timed configuration for an architecture."""
    return bool(_profiles(arch))


def find(key: Key) -> TileConfig | None:
    """Return the timed configuration for calls with this key, the user's before the package's; None if there is none.

    Files are read at an architecture's first call.
    """
    return _profiles(key.arch).get(key)


def forget() -> None:
    """Forget the files that were read: they are read again when they are next needed."""
    _profiles.cache_clear()


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _replace(path: Path, content: bytes) -> None:
    """Write a file in one step: a process that reads it meanwhile gets the old content or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # what a link of that name points to is not ours
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(path: Path, entries: dict[Key, Entry], **provenance: str | None) -> None:
    """Add entries to a file, in place of those it has under the same keys; find knows them after forget.

    If the system has file locks, processes that save at the same time do not lose each other's entries.

    Args:
        provenance: where these entries come from: device, torch, triton, package, commit, date.

    Raises:
        OSError: the folder cannot be made or written, or the lock file is a link.
        ValueError: an entry is one that load would not take; nothing is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "ab", opener=_not_through_a_link) as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [{**asdict(key), **asdict(entry)} for key, entry in {**_read(path), **entries}.items()]
        document = {"format": FORMAT, "version": VERSION, **provenance, "entries": rows}
        content = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
        _parse(content)
        _replace(path, content)
