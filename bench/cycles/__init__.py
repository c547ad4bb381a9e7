"""The model of tools/cycles for this package's kernels: calls.py has the time of a call, sensitivity.py
varies what is assumed, report.py prints."""
