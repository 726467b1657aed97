"""The operations that PCD adds to graphs, and which of them a backend has no case for (docs/backends.md)."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import graph_nodes
import pytest
from conftest import SANITIZED, find_sdist

ADDED = {  # what llama.cpp's graph of the same model and cache does not have, and the settings that add it
    "CONCAT along 0": "window",
    "CONCAT along 1": "rerotated, window",
    "CONCAT along 2": "window",
    "FLASH_ATTN_EXT": "rerotated",
    "GET_ROWS": "rerotated",
    "MUL_MAT": "rerotated, window",
    "REPEAT": "rerotated, shared, window",
    "ROPE at an offset": "rerotated",
    "ROPE": "rerotated, shared",
    "SET_ROWS": "rerotated",
}
OPERATIONS = sorted({name.split()[0] for name in ADDED})  # as ggml names them
BACKENDS = {  # the function that decides what a backend takes, and the operations that it has no case for
    "ggml-cuda/ggml-cuda.cu": ("ggml_backend_cuda_device_supports_op", []),
    "ggml-metal/ggml-metal-device.m": ("ggml_metal_device_supports_op", []),
    "ggml-vulkan/ggml-vulkan.cpp": ("ggml_backend_vk_device_supports_op", []),
    "ggml-sycl/ggml-sycl.cpp": ("do_ggml_backend_sycl_device_supports_op", []),
    "ggml-opencl/ggml-opencl.cpp": ("ggml_opencl_supports_op", []),
    "ggml-webgpu/ggml-webgpu.cpp": ("ggml_backend_webgpu_device_supports_op", []),
    "ggml-hexagon/ggml-hexagon.cpp": ("ggml_backend_hexagon_device_supports_op", []),
    "ggml-cann/ggml-cann.cpp": ("ggml_backend_cann_supports_op", []),
    "ggml-et/ggml-et.cpp": ("ggml_backend_et_device_supports_op", []),
    "ggml-blas/ggml-blas.cpp": ("ggml_backend_blas_device_supports_op", sorted({*OPERATIONS} - {"MUL_MAT"})),
    "ggml-rpc/ggml-rpc.cpp": ("ggml_backend_rpc_device_supports_op", []),
}


@functools.cache
def sources() -> dict[str, str]:
    """The files that BACKENDS names, out of llama-cpp-python's sdist."""
    found = {}
    with tarfile.open(find_sdist()) as archive:
        for member in archive:
            name = member.name.partition("/vendor/llama.cpp/ggml/src/")[2]
            if name in BACKENDS:
                file = archive.extractfile(member)
                assert file
                found[name] = file.read().decode("utf-8")
    return found


@pytest.mark.skipif(SANITIZED, reason="what is preloaded there has to come first")
def test_pcd_adds_these_operations(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))[0]
    if not shutil.which(compiler):
        pytest.skip(f"no C compiler {compiler!r}")
    found = graph_nodes.table(graph_nodes.run(tmp_path))
    assert {name: modes for name, _, modes in found} == ADDED


@pytest.mark.parametrize("path", BACKENDS)
def test_what_a_backend_lacks_is_what_its_source_lacks(path: str) -> None:
    function, lacks = BACKENDS[path]
    body = re.search(rf"^(?:static )?bool {function}\(.*?^\}}", sources()[path], re.MULTILINE | re.DOTALL)
    assert body, f"{path} has no {function}() any more"
    if "switch" not in body[0]:
        assert not lacks and "return true" in body[0]
        return
    assert lacks == [name for name in OPERATIONS if not re.search(rf"case GGML_(UNARY_)?OP_{name}:", body[0])]
