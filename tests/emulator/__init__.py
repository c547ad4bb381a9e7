"""This package's calls in the emulator (tools/emulator), and the emulator's own tests."""
