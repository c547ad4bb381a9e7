"""Runs tests in copies of the repository, one copy per fault."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .fault import Fault, StaleFault

PYTEST = ("-m", "pytest", "-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider")
AS_NOBODY = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
QUICK_SECONDS, FOLDER_SECONDS = 300.0, 3600.0
"""The longest that the first tests, and a whole folder, may take: with a fault, loops may not end."""

CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
"""How a process ends whose kernels have written where they should not."""

NO_SUCH_TEST, NOTHING_COLLECTED = 4, 5
"""Exit statuses of pytest."""
IMPORTS = 10
"""Seconds of processor time that imports may take beside the tests."""

CAUGHT, SURVIVED, STALE, BROKEN = "caught", "SURVIVED", "STALE", "BROKEN"


@dataclass(frozen=True)
class Outcome:
    """The result for one fault: CAUGHT; SURVIVED; STALE if it does not apply; BROKEN if the tests could not run."""

    fault: Fault
    status: str
    test: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class TestRun:
    """pytest's exit status (None after a timeout), the failed tests with their messages, and all output."""

    __test__ = False
    status: int | None
    failures: dict[str, str]
    output: str


def source_files(root: Path) -> list[str]:
    """Return tracked files, and untracked ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({name for name in listed if name and (root / name).is_file()})


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A temporary copy of the repository's source files, a repository itself with one commit."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        for name in source_files(root):
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target)
        for command in (("init", "-q"), ("add", "-A", "-f"), (*AS_NOBODY, "commit", "-q", "-m", "copy")):
            subprocess.run(("git", *command), cwd=folder, check=True)
        yield Path(folder).resolve()


def failures(output: str) -> dict[str, str]:
    """The failed tests in pytest's summary, with their messages."""
    lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {test: why for test, _, why in (line.partition(" - ") for line in lines) if "::" in test}  # else no test has run


@dataclass
class Runner:
    """Tries faults of the repository at root, whose tests import a package."""

    root: Path
    package: str
    ignored: tuple[str, ...] = ()
    """Files of tests that fail with any fault, because they are about faults."""
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Variables of the environment that tests need whose names contain a text."""
    quick_seconds: float = QUICK_SECONDS
    folder_seconds: float = FOLDER_SECONDS
    cpu_seconds: int | None = None
    """The processor time that each run of pytest may take; a fault that nothing notices in that time survives."""
    alone: tuple[str, ...] = ("TRITON_INTERPRET", "PYTHONPATH")
    """Variables of this process that its children do not get."""
    processes: set[subprocess.Popen[str]] = field(default_factory=set)
    stopped: bool = False

    def environment(self, tests: Iterable[str]) -> dict[str, str]:
        """The environment of tests that share a process: their variables, and only pytest's own plugins."""
        inherited = {name: value for name, value in os.environ.items() if name not in self.alone}
        common = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "1000"}
        own = [dict(variables) for text, variables in self.variables.items() if any(text in test for test in tests)]
        return {name: value for variables in (inherited, common, *own) for name, value in variables.items()}

    def run(self, arguments: Iterable[str], cwd: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Run Python; return its exit status (None after a timeout) and output. Its children are killed with it."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env=self.environment(tests),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=self.limit_time if self.cpu_seconds else None,
        )
        self.processes.add(process)
        if self.stopped:
            end(process)
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, f"no end after {seconds:.0f} s"
        finally:
            end(process)
            self.processes.discard(process)

    def limit_time(self) -> None:
        assert self.cpu_seconds is not None
        resource.setrlimit(resource.RLIMIT_CPU, (self.cpu_seconds + IMPORTS, self.cpu_seconds + IMPORTS + 5))

    def stop(self) -> None:
        """Kill all running tests, and start no others."""
        self.stopped = True
        for process in list(self.processes):
            end(process)

    def pytest(self, arguments: Iterable[str], cwd: Path, tests: Sequence[str], seconds: float) -> TestRun:
        """Run pytest with these arguments, in the environment of the tests."""
        status, output = self.run((*PYTEST, *(f"--ignore={file}" for file in self.ignored), *arguments), cwd, tests, seconds)
        return TestRun(status, failures(output), output)

    def check_imports(self) -> None:
        """Check that copies are tested, and not the installed package.

        Raises:
            RuntimeError: they are not.
        """
        with copied(self.root) as copy:
            where = f"import {self.package}; print({self.package}.__file__)"
            origin = Path(self.run(("-c", where), copy, (), self.quick_seconds)[1].strip().splitlines()[-1]).resolve()
            if copy not in origin.parents:
                raise RuntimeError(f"a copy in {copy} imports {origin}")

    def attempt(self, fault: Fault) -> Outcome:
        """Put a fault into a copy and run its tests there, and if they pass, or are not there, all of their folders."""
        started = time.monotonic()
        with copied(self.root) as copy:
            try:
                fault.apply(copy)
            except StaleFault as error:
                return Outcome(fault, STALE, detail=str(error))
            for tests in fault.stages:
                first = tests == fault.tests
                result = self.pytest(("-x", *tests), copy, tests, self.quick_seconds if first else self.folder_seconds)
                seconds = time.monotonic() - started
                if result.failures:
                    test, why = next(iter(result.failures.items()))
                    return Outcome(fault, CAUGHT, test, why, seconds)
                if result.status in CRASHES:
                    return Outcome(fault, CAUGHT, detail=f"ended by signal {-result.status}", seconds=seconds)
                if result.status == -signal.SIGXCPU:
                    detail = f"nothing in {self.cpu_seconds} CPU seconds of {' '.join(tests)}"
                    if first:
                        continue
                    return Outcome(fault, SURVIVED, detail=detail, seconds=seconds)
                if first and result.status in (NO_SUCH_TEST, NOTHING_COLLECTED):
                    continue
                if result.status != 0:  # an error of the import, or no end
                    return Outcome(fault, BROKEN, detail=result.output.strip().rpartition("\n")[2], seconds=seconds)
        ran = [test for tests in fault.stages if tests != fault.tests for test in tests]
        return Outcome(fault, SURVIVED, detail=f"all of {', '.join(ran)}", seconds=seconds)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
