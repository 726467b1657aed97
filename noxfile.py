"""Environments of nox beside .venv: the packages that docs/recipes.md is about, other versions of Python, torch.

    scripts/test --consumers quick            # `nox --tags quick`: environments and packages are tags
    scripts/test --stock                      # the engine "stock" on several versions of llama-cpp-python
    .venv/bin/nox --session versions          # the tests on each Python of the list that this machine has

The wheel of pypcd that scripts/install made goes into each, and the llama-cpp-python of pip's cache: nothing is compiled again. For
`stock` the wheel has no native part, and each llama-cpp-python is compiled once, into .cache.
Environments are kept in .nox between runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

# Environment: the first version of Python for it, and what is installed for each recipe, at the version that was tried. In one
# environment are packages that can live together. Their tests are tests/consumers.
CONSUMERS: dict[str, tuple[tuple[int, int], dict[str, tuple[str, ...]]]] = {
    "quick": (
        (3, 10),
        {
            # guidance's extra llamacpp wants another llama-cpp-python; outlines' brings numba, without which it does not constrain
            "guidance": ("guidance==0.3.1",),
            "outlines": ("outlines[llamacpp]==1.3.3",),
            "lm-format-enforcer": ("lm-format-enforcer==0.11.3",),
            "instructor": ("instructor==1.17.0",),
            "langchain": ("langchain-community==0.4.2", "langchain-openai==1.7.3"),
        },
    ),
    "agents": (
        (3, 11),
        {
            "llama-index": ("llama-index-llms-llama-cpp==0.7.0",),
            "haystack": ("llama-cpp-haystack==3.0.2", "haystack-ai==3.4.0"),
            "llm": ("llm==0.32.1", "llm-gguf==0.2"),
            "smolagents": ("smolagents[openai]==1.26.0",),
            "litellm": ("litellm==1.106.2",),
            "dspy": ("dspy==3.4.1",),
        },
    ),
    "lm-eval": ((3, 10), {"lm-evaluation-harness": ("lm-eval==0.4.13",)}),
    "txtai": ((3, 10), {"txtai": ("txtai==9.14.0", "torch==2.13.0")}),  # torch is named, so that one for the CPU fits
}
MORE_TESTS = {"lm-evaluation-harness": ["tests/integrations/test_lm_eval.py"]}


LLAMA_CPP_PYTHON = (
    "0.3.16",
    "0.3.28",
    "0.3.36",
)  # for the engine "stock": the oldest that it runs on, and the pinned one


def install(session: nox.Session, *requirements: str, extras: str = "") -> None:
    """pypcd's wheel and more; a session whose packages pip cannot install is skipped."""
    wheel = next((ROOT / ".cache/wheel").glob("llama_pcd-*.whl"), None)
    if wheel is None:
        session.error("there is no wheel of pypcd in .cache/wheel; scripts/install makes one")
    try:
        session.install("--force-reinstall", "--no-deps", str(wheel))  # of the same version, it would be left alone
        session.install(f"{wheel}{extras}", *requirements)
    except nox.command.CommandFailed:
        session.skip("pip cannot install its packages; the lines above say why")


def consumers(environment: str, first: tuple[int, int], packages: dict[str, tuple[str, ...]]) -> None:
    @nox.session(name=environment, tags=["consumers", environment, *packages])
    def tests(session: nox.Session) -> None:
        """The tests of these recipes, or of those that are named behind --."""
        if sys.version_info < first:
            session.skip(f"it needs Python {first[0]}.{first[1]}")
        asked = set(session.posargs)
        names = [name for name in packages if not asked or asked & {environment, name}]
        tools = ("pytest>=9", "hypothesis", "gguf>=0.10", "ruff==0.17.6")  # that the tests themselves need
        install(session, *tools, *(requirement for name in packages for requirement in packages[name]))
        more = [test for name in names for test in MORE_TESTS.get(name, [])]
        session.run("pytest", "tests/consumers", *more, env={"PYPCD_CONSUMERS": ",".join(names)})


for name, (first, packages) in CONSUMERS.items():
    consumers(name, first, packages)


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"], default=False)
def versions(session: nox.Session) -> None:
    """The tests, or those that are named behind --."""
    install(session, extras="[test]")
    session.run("pytest", *session.posargs)


@nox.session(default=False)
@nox.parametrize("version", LLAMA_CPP_PYTHON)
def stock(session: nox.Session, version: str) -> None:
    """Rows of the engine "stock", and what a user does first, on a llama-cpp-python as pip installs it."""
    kept = ROOT / ".cache/llama-cpp-python/stock"
    if not list(kept.glob(f"llama_cpp_python-{version}-*.whl")):
        without_common = f"CMAKE_PROJECT_llama_cpp_INCLUDE={(ROOT / 'cmake/llama-cpp-python.cmake').as_posix()}"
        env = {"SKBUILD_CMAKE_DEFINE": without_common, "CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
        session.run_install(
            "pip", "wheel", "--no-deps", "--wheel-dir", str(kept), f"llama-cpp-python=={version}", env=env
        )
    (llama,) = kept.glob(f"llama_cpp_python-{version}-*.whl")
    out = session.create_tmp()
    session.run_install("pip", "wheel", "--no-deps", "--wheel-dir", out, ".", "-C", "wheel.cmake=false")
    (wheel,) = Path(out).glob("llama_pcd-*.whl")
    session.install(str(llama), str(wheel), "pytest>=9", "hypothesis", "gguf>=0.10", "pyyaml")
    session.install("--force-reinstall", "--no-deps", str(wheel))  # of the same version, it would be left alone
    session.run("pypcd", "info", "demo", env={"PYPCD_ENGINE": ""})
    tests = session.posargs or ["tests/engine/test_stock.py", "tests/llama", "tests/integrations/test_texts.py"]
    session.run("pytest", "-m", "engine", *tests, env={"PYPCD_ENGINE": "stock"})
    if not session.posargs:  # what both engines read in one way
        session.run("pytest", "tests/engine/test_attention.py", env={"PYPCD_ENGINE": "stock"})


@nox.session(default=False)
def transformers(session: nox.Session) -> None:
    """scripts/recipes/compare_transformers.py: 5 GB, or 1.2 with an index in PIP_EXTRA_INDEX_URL that has torch for the CPU."""
    install(session, "torch==2.13.0", "transformers==5.17.0", "accelerate==1.15.0", "gguf>=0.17")
    session.run("python", "scripts/recipes/compare_transformers.py", *session.posargs)
