"""Calls of the small models here have few scores, which on a CPU are the stock forward's."""

from tests.cpu.conftest import short_calls_are_ours as short_calls_are_ours
