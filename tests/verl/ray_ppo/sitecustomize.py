"""Imported by every Python process that has this folder in PYTHONPATH: verl's platform is the CPU from its first moment on.

Ray starts workers in processes of their own, and verl asks for its platform before it imports external modules.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any

_PLATFORM_MANAGER = "verl.plugin.platform.platform_manager"


class _AfterPlatformManager(importlib.abc.MetaPathFinder):
    """Lets the harness install its platform right after that module has run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _PLATFORM_MANAGER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        upstream = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            from verl_harness.cpu import install_platform

            upstream(module)
            install_platform(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterPlatformManager())
