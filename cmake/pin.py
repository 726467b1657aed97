"""Makes the runtime requirements from the pin in pyproject.toml's build requirements (a scikit-build-core provider)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any


def dynamic_metadata(
    field: str, settings: dict[str, Any] | None = None, _project: dict[str, Any] | None = None
) -> list[str]:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    pin = re.search(r'"(llama-cpp-python==[^"]+)"', text)
    if field != "dependencies" or pin is None:
        raise ValueError(f"cmake/pin.py provides the dependencies from pyproject.toml's pin, not {field!r}")
    if os.environ.get("PYPCD_BUILDS_NATIVE") == "0":  # cmake/backend.py says so
        llama = "llama-cpp-python>=0.3.16"  # scripts/test --stock tries it
    else:
        llama = pin.group(1)
    # All that pypcd/ imports but for extras, and nothing else. What the command line alone needs is no extra: pip installs extras only where
    # they are asked for, and `pip install .` is to give a `pypcd` whose every command runs, on its default tasks.
    return [
        llama,
        "numpy>=1.24",
        "jinja2>=2.11.3",  # chat templates
        "typing_extensions>=4.5",
        "bm25s>=0.3",  # keyword search
        "sentencex>=1.0.32",  # where a sentence ends, in any script
        "rich>=14.3",  # tables, bars and columns on a terminal, and how wide a text is there
        "wonderwords>=3",  # RULER, among the default tasks of `pypcd tune`, makes its needles (the sentences to find) from these words
        "prompt_toolkit>=3.0.36",  # the chat's line editing
        "mammoth>=1.11",  # DOCX
        "pypdfium2>=5",  # PDF
        "python-calamine>=0.3",  # XLSX, XLS and ODS
    ]
