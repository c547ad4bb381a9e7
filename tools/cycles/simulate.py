"""A loop on one multiprocessor, instruction by instruction: how long a turn takes once it runs, and what the time goes into.

A warp's next instruction is issued when the pause after its last one is over, and the scoreboards that it waits for and its pipe
are free. A scheduler issues one instruction a cycle: of the warp that issued last if it can go on, else of the oldest that can.
The four schedulers have as many warps each and do the same at the same time. So one of them is simulated, and what it asks of
shared memory and L2 is asked four times.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from . import decode
from .decode import PIPES, Step
from .machine import Machine
from .sass import Instruction

PHASES = 6
"""Programs that share a multiprocessor run in step or not, as they began: so many beginnings are simulated, for the mean."""
TURNS, FIRST_TURNS = 8, 2
"""Turns of each simulation, and how many do not count, because the programs have just begun."""
_TENSOR = PIPES.index("tensor")


@dataclass(frozen=True)
class Steady:
    """A loop that has been running for a while.

    Attributes:
        instructions: of one warp in a turn.
        operations: of the matrix units for a turn of one program; l2_bytes: that it fetches.
        cycles: of the multiprocessor for a turn of one program, with as many programs as there are.
        spread: of the simulations around their mean, relative: how much depends on how the programs began.
        alone: cycles for a turn of a program that has the multiprocessor to itself.
        busy: share of the time in which each unit is busy; "issue" is the scheduler's.
        waits: share of the time in which the scheduler issues nothing, by what the next warp waits for.
    """

    instructions: int
    operations: float
    l2_bytes: float
    cycles: float
    spread: float
    alone: float
    busy: dict[str, float]
    waits: dict[str, float]


def steady(loop: Sequence[Instruction], machine: Machine, warps: int, programs: int) -> Steady:
    """Run so many programs of so many warps each until a turn takes as long as the one before, on average."""
    steps = [decode.decode(instruction, machine) for instruction in loop]
    alone = _Run(steps, machine, warps, 1, 0.0, 0)
    alone.run(4, 1)
    phases = PHASES if programs > 1 else 2
    runs = [_Run(steps, machine, warps, programs, alone.cycles * phase / phases, phase) for phase in range(phases)]
    for run in runs:
        run.run(TURNS, FIRST_TURNS)
    found, time = [run.cycles for run in runs], sum(run.now for run in runs)
    l2_bytes = warps * sum(step.l2_bytes for step in steps)
    cycles = max(fmean(found), l2_bytes / machine.l2_sustained)
    busy = {unit: sum(run.busy[unit] for run in runs) / time for unit in runs[0].busy}
    reasons = dict.fromkeys(reason for run in runs for reason in run.waits)
    waits = {reason: sum(run.waits[reason] for run in runs) / time for reason in reasons}
    return Steady(
        instructions=len(steps),
        operations=warps * sum(step.operations for step in steps),
        l2_bytes=l2_bytes,
        cycles=cycles,
        spread=(max(found) - min(found)) / 2 / fmean(found),
        alone=alone.cycles,
        busy=busy | {"fma": busy["fma"] / machine.fma_pipes, "L2": l2_bytes / machine.l2_sustained / cycles},
        waits=waits,
    )


class _Warp:
    """Where a warp is, and from when on its next instruction can be issued as far as the warp itself is concerned."""

    __slots__ = (
        *("program", "position", "turn", "ready", "reason", "at_barrier", "pipe", "other_pipe"),
        *("scoreboards", "owners", "groups", "last_wgmma", "copies", "last_copy"),
    )

    def __init__(self, program: int, start: float, pending: int) -> None:
        self.program, self.ready, self.reason = program, start, "start"
        self.position = self.turn = 0
        self.pipe = self.other_pipe = 0  # of the next instruction; wgmma are queued and do not wait for theirs
        self.at_barrier = False
        self.scoreboards = [0.0] * 6  # when each will be free
        self.owners = ["control"] * 6  # the units that set them
        self.groups = [0.0] * (pending + 1)  # when the last groups of wgmma will be done
        self.copies = [0.0] * (pending + 1)  # when the last groups of copies will have arrived
        self.last_wgmma = self.last_copy = 0.0


class _Run:
    """One simulation, of programs that begin ``offset`` cycles after each other."""

    def __init__(self, steps: Sequence[Step], machine: Machine, warps: int, programs: int, offset: float, seed: int) -> None:
        self.steps, self.machine, self.programs = steps, machine, programs
        self.random = random.Random(seed).random
        own_programs = programs if warps >= 4 else max(1, round(programs * warps / 4))  # of this scheduler
        self.own_warps = max(1, warps // 4)  # of each of them
        pending = max(step.count for step in steps)
        self.warps = [_Warp(program, program * offset, pending) for program in range(own_programs) for _ in range(self.own_warps)]
        self.share = programs * warps / len(self.warps)  # schedulers that do the same, this one among them
        self.free = [0.0] * len(PIPES)  # from when on
        self.shared_free = self.l2_free = self.now = self.cycles = 0.0
        self.last = self.warps[0]
        self.arrived: list[list[_Warp]] = [[] for _ in range(own_programs)]
        self.ends: list[float] = []  # of turns, of any program
        self.busy: dict[str, float] = dict.fromkeys(("issue", "shared memory", *PIPES), 0.0)
        self.waits: defaultdict[str, float] = defaultdict(float)

    def run(self, turns: int, first_turns: int) -> None:
        """Until the programs have had so many turns on average; ``cycles`` is of one after the first ones."""
        next_warp, issue, programs = self._next, self._issue, len(self.arrived)
        while len(self.ends) <= turns * programs:
            warp, time = next_warp()
            if time > self.now:
                self.waits[warp.reason if warp.ready >= time else self.steps[warp.position].unit] += time - self.now
            issue(warp, time)
        period = (self.ends[turns * programs] - self.ends[first_turns * programs]) / (turns - first_turns)
        self.cycles = period / self.programs
        self.busy["issue"] = 1.0 * sum(warp.turn * len(self.steps) + warp.position for warp in self.warps)

    def _next(self) -> tuple[_Warp, float]:
        """The warp that can issue first, and when."""
        now, free, last = self.now, self.free, self.last
        first, chosen = float("inf"), last
        for warp in self.warps:
            if warp.at_barrier:
                continue
            time = free[warp.pipe]
            if free[warp.other_pipe] < time:
                time = free[warp.other_pipe]
            if warp.ready > time:
                time = warp.ready
            if time < now:
                time = now
            if time < first or (time == first and warp is last):
                first, chosen = time, warp
        return chosen, first

    def _issue(self, warp: _Warp, time: float) -> None:
        """Issue the warp's next instruction, and see from when on it can issue the one after that."""
        step = self.steps[warp.position]
        instruction, action = step.instruction, step.action
        self.last, self.now = warp, time + 1
        ready = time + instruction.stall
        if step.pipe:
            done = self._serve(step, time)
            if action == decode.WGMMA:
                warp.last_wgmma = done
                if step.count:
                    warp.groups = [*warp.groups[1:], done]
            elif action == decode.COPY and done > warp.last_copy:
                warp.last_copy = done
        else:
            done = time + step.latency
            if action == decode.END_COPIES:
                warp.copies = [*warp.copies[1:], warp.last_copy]
        if instruction.sets is not None:
            number = instruction.sets
            warp.scoreboards[number] = max(warp.scoreboards[number], done, ready)
            warp.owners[number] = step.unit
        if instruction.reads is not None:
            number = instruction.reads
            warp.scoreboards[number] = max(warp.scoreboards[number], time + self.machine.operands)
            warp.owners[number] = step.unit
        warp.position += 1
        if warp.position == len(self.steps):
            ready = max(ready, time + self.machine.branch)
            self._end_turn(warp, time)
        self._await(warp, ready)
        if action == decode.BARRIER:
            self._arrive(warp, time)

    def _serve(self, step: Step, time: float) -> float:
        """Book the units that an instruction needs; return when its result is there."""
        machine, free, start = self.machine, self.free, time
        is_wgmma = step.action == decode.WGMMA
        if is_wgmma:
            start = max(time, free[_TENSOR], self.shared_free - machine.wgmma_ahead)
            free[_TENSOR] = start + step.busy
        else:
            pipe = step.pipe if free[step.pipe] <= free[step.other_pipe] else step.other_pipe
            free[pipe] = time + step.busy
        self.busy[step.counted] += step.busy
        if step.shared:
            cycles = step.shared * self.share
            begin = max(time, self.shared_free)
            self.shared_free = begin + cycles
            self.busy["shared memory"] += cycles
            if not is_wgmma:  # half of the others come first, on average
                start = begin + (cycles + step.shared) / 2
                free[step.pipe] = max(free[step.pipe], self.shared_free - machine.shared_queue)
        if step.l2_bytes:
            self.l2_free = max(time, self.l2_free) + step.l2_bytes * self.share / machine.l2_rate
            start = self.l2_free + (2 * self.random() - 1) * machine.l2_spread * machine.l2_latency
        return start + step.latency

    def _end_turn(self, warp: _Warp, time: float) -> None:
        """The turn of a program is over when the last of its warps has ended it."""
        warp.position = 0
        warp.turn += 1
        if all(other.turn >= warp.turn for other in self.warps if other.program == warp.program):
            self.ends.append(time)

    def _await(self, warp: _Warp, ready: float) -> None:
        """Return what the warp's next instruction waits for."""
        step, reason = self.steps[warp.position], "dependencies"
        if self.random() < self.machine.late_share:
            ready += self.machine.late
        if step.action == decode.AWAIT_WGMMA and warp.groups[-1 - step.count] > ready:
            ready, reason = warp.groups[-1 - step.count], "tensor"
        elif step.action == decode.AWAIT_COPIES and warp.copies[-1 - step.count] > ready:
            ready, reason = warp.copies[-1 - step.count], "L2"
        for number in step.instruction.waits:
            if warp.scoreboards[number] > ready:
                ready, reason = warp.scoreboards[number], warp.owners[number]
        warp.ready, warp.reason = ready, reason
        warp.pipe, warp.other_pipe = (0, 0) if step.action == decode.WGMMA else (step.pipe, step.other_pipe)

    def _arrive(self, warp: _Warp, time: float) -> None:
        """At a barrier: the warps of a program go on when all of them are there."""
        arrived = self.arrived[warp.program]
        arrived.append(warp)
        warp.at_barrier = True
        if len(arrived) == self.own_warps:
            for each in arrived:
                each.at_barrier = False
                if each.ready < time + self.machine.barrier:
                    each.ready, each.reason = time + self.machine.barrier, "barrier"
            arrived.clear()
