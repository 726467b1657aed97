"""The build backend: scikit-build-core's, which asks for llama-cpp-python only if there is a native part to build.

    pip wheel . -C wheel.cmake=false      # the wheel without one, for any llama-cpp-python

Its dependencies are then a range of versions in place of the one that libllama is built for (cmake/pin.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import *

Settings = dict[str, Any]  # those of `-C`

# pip tells its hooks of this folder, and every pip that a build starts would look for other packages' backends in it
for name in ("_PYPROJECT_HOOKS_BACKEND_PATH", "PEP517_BACKEND_PATH"):  # newer and older ones
    os.environ.pop(name, None)


def _is_native(settings: Settings | None) -> bool:
    """Whether the native part is built, which pin.py is told too: scikit-build-core shows it no settings."""
    value = str((settings or {}).get("wheel.cmake", "true"))
    os.environ["PYPCD_BUILDS_NATIVE"] = "0" if value.lower() in ("false", "off", "no", "0") else "1"
    return os.environ["PYPCD_BUILDS_NATIVE"] == "1"


def _more(settings: Settings | None) -> list[str]:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^native-requires = \[(.*)\]", text, re.MULTILINE)
    return re.findall(r'"([^"]+)"', listed) if _is_native(settings) else []


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    return [*_build.get_requires_for_build_wheel(config_settings), *_more(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return [*_build.get_requires_for_build_editable(config_settings), *_more(config_settings)]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    _is_native(config_settings)
    return _build.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    _is_native(config_settings)
    return _build.build_wheel(wheel_directory, config_settings, metadata_directory)
