"""Calls of the package in the emulator (tools/emulator), and tests of the emulator."""
