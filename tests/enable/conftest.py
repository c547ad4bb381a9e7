"""Calls of the small models have few scores; on a CPU these would use the stock forward."""

from tests.cpu.conftest import short_calls_are_ours as short_calls_are_ours
