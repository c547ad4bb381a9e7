"""The main job: real music through one layer of relative attention, checked and measured. ``python -m triton_relattn``.

run           the whole of it, and the command line
environment   versions, device, and which implementation is chosen and why
music         Bach chorales as tokens
agreement     a layer's loss, output and gradients against the float64 reference
measure       time and peak memory of one method at one length, in a process of its own
sweep         all methods over all lengths, within limits of memory and time
report, plot  tables, CSV and figure, from the measured rows alone
"""
