"""The package that is in the folder above, for versions of kernels that look for it here."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    f"{__name__}_above", Path(__file__).parents[1] / "__init__.py", submodule_search_locations=[str(Path(__file__).parents[1])]
)
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
globals().update({name: getattr(_module, name) for name in _module.__all__})
__all__ = list(_module.__all__)
