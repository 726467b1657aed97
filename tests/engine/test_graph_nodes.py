"""docs/lab/backends.md: the operations that PCD adds to graphs, and which of them a backend has no case for."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import graph_nodes
import pytest
from conftest import SANITIZED, find_sdist

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "backends.md"
FUNCTIONS = {  # that decide what a backend takes
    "ggml-cuda/ggml-cuda.cu": "ggml_backend_cuda_device_supports_op",
    "ggml-metal/ggml-metal-device.m": "ggml_metal_device_supports_op",
    "ggml-vulkan/ggml-vulkan.cpp": "ggml_backend_vk_device_supports_op",
    "ggml-sycl/ggml-sycl.cpp": "do_ggml_backend_sycl_device_supports_op",
    "ggml-opencl/ggml-opencl.cpp": "ggml_opencl_supports_op",
    "ggml-webgpu/ggml-webgpu.cpp": "ggml_backend_webgpu_device_supports_op",
    "ggml-hexagon/ggml-hexagon.cpp": "ggml_backend_hexagon_device_supports_op",
    "ggml-cann/ggml-cann.cpp": "ggml_backend_cann_supports_op",
    "ggml-et/ggml-et.cpp": "ggml_backend_et_device_supports_op",
    "ggml-blas/ggml-blas.cpp": "ggml_backend_blas_device_supports_op",
    "ggml-rpc/ggml-rpc.cpp": "ggml_backend_rpc_device_supports_op",
}


def rows_of(heading: str) -> Iterator[list[str]]:
    """The cells of the table under a heading, without its titles."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(lines) > 2, heading
    yield from ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[2:])


def operations() -> list[str]:
    """Of the first table, as ggml names them."""
    return sorted({row[0].strip("` ").split()[0] for row in rows_of("What PCD adds to a graph")})


@functools.cache
def sources() -> dict[str, str]:
    """The files that FUNCTIONS names, out of llama-cpp-python's sdist."""
    found = {}
    with tarfile.open(find_sdist()) as archive:
        for member in archive:
            name = member.name.partition("/vendor/llama.cpp/ggml/src/")[2]
            if name in FUNCTIONS:
                file = archive.extractfile(member)
                assert file
                found[name] = file.read().decode("utf-8")
    return found


@pytest.mark.skipif(SANITIZED, reason="what is preloaded there has to come first")
def test_the_docs_have_the_operations_that_pcd_adds(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))[0]
    if not shutil.which(compiler):
        pytest.skip(f"no C compiler {compiler!r}")
    found = graph_nodes.table(graph_nodes.run(tmp_path))
    assert {name for name, _, _ in found} >= {"ROPE", "GET_ROWS", "CONCAT along 2", "ACC"}
    assert [(f"`{name}`", modes) for name, _, modes in found] == [
        (row[0], row[1]) for row in rows_of("What PCD adds to a graph")
    ]


@pytest.mark.parametrize("row", list(rows_of("What each backend's code lacks")), ids=lambda row: row[0].strip())
def test_what_a_backend_lacks_is_what_its_source_lacks(row: list[str]) -> None:
    _, code, lacks = (cell.strip() for cell in row)
    path = code.strip("`")
    body = re.search(rf"^(?:static )?bool {FUNCTIONS[path]}\(.*?^\}}", sources()[path], re.MULTILINE | re.DOTALL)
    assert body, f"{path} has no {FUNCTIONS[path]}() any more"
    if "switch" not in body[0]:
        assert lacks == "" and "return true" in body[0]
        return
    found = [name for name in operations() if not re.search(rf"case GGML_(UNARY_)?OP_{name}:", body[0])]
    assert "ROPE" in operations() and len(operations()) > 10
    expected = (
        [name for name in operations() if name != "MUL_MAT"]
        if lacks == "all but `MUL_MAT`"
        else re.findall(r"`(\w+)`", lacks)
    )
    assert found == expected
