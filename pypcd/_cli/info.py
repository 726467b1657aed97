"""pypcd info: the library, the machine, what PCD does to a model's frequencies, and a self-test."""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
from typing import Any

import llama_cpp
import numpy as np

import pypcd
from pypcd import PCDConfig, _machine, _native
from pypcd._cli import _options, _terminal
from pypcd._models import DEMO_MODEL, resolve_model
from pypcd._selftest import can_run, self_test

HELP = "show the library, the machine and what PCD does to a model, and test it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd info [MODEL] [--json] [--no-test]"
    parser.epilog = "Without MODEL the self-test runs on pypcd's demo model. The exit status is 1 if it fails."
    _options.add_model(parser, nargs="?")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-test", action="store_true", help="leave out the self-test")


def run(args: argparse.Namespace) -> int:
    _terminal.setup()
    record: dict[str, Any] = {"library": library_facts(), "machine": machine_facts()}
    path = resolve_model(args.model) if args.model else None
    tested = path or (str(DEMO_MODEL) if DEMO_MODEL.exists() else None)
    if tested and (path or not args.no_test):
        threads = 1 if os.path.getsize(tested) < 2**26 else None  # a tiny model only waits for a second one
        llm = _options.open_model(tested, n_ctx=512, n_threads=threads, n_threads_batch=threads)
        if path:
            record["model"] = model_facts(llm)
        if not args.no_test:
            record["self_test"] = self_test(llm)
    if args.json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        _terminal.write(report(record))
    return 0 if all(check["passed"] for check in record.get("self_test", {}).get("checks", [])) else 1


# -- facts -----------------------------------------------------------------------------------------------------------


def library_facts() -> dict[str, Any]:
    return {
        "pypcd": pypcd.__version__,
        "llama_cpp_python": llama_cpp.__version__,
        "built_for": _native.pinned_version(),
        "libllama": _native.lib._name,
        "pcd_hooks": True,  # importing pypcd has checked it
        "pcd_interface": _native.API_VERSION,
    }


def machine_facts() -> dict[str, Any]:
    backends, devices = _ggml()
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "threads": _machine.default_threads(),
        "memory": _machine.total_memory(),
        "gpu_offload": _machine.has_gpu(),
        "backends": backends,
        "devices": devices,
        "cpu_features": llama_cpp.llama_print_system_info().decode().strip(" |\n"),
        "amx": "off: present, but some compilers miscompile it (use_extra_bufts=True forces it on)"
        if _machine.has_amx()
        else "not in use here",
    }


def _ggml() -> tuple[list[str], list[dict[str, Any]]]:
    """ggml's backends and devices; llama_cpp has no names for these functions."""

    def call(name: str, restype: Any, *args: Any) -> Any:
        function = getattr(_native.lib, "ggml_backend_" + name)
        function.restype = restype
        return function(*args)

    text, handle, size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
    try:
        registries = [handle(call("reg_get", handle, size(i))) for i in range(call("reg_count", size))]
        backends = [call("reg_name", text, registry).decode() for registry in registries]
        devices = []
        for i in range(call("dev_count", size)):
            device = handle(call("dev_get", handle, size(i)))
            free, total = size(), size()
            call("dev_memory", None, device, ctypes.byref(free), ctypes.byref(total))
            name, what = (call(f, text, device).decode("utf-8", "replace") for f in ("dev_name", "dev_description"))
            devices.append({"name": name, "description": what, "memory": total.value})
        return backends, devices
    except AttributeError:  # Windows finds a symbol only in the library that defines it
        return [], []


def model_facts(llm: pypcd.Llama) -> dict[str, Any]:
    meta = llm.metadata
    arch = meta.get("general.architecture", "unknown")

    def number(key: str, default: float) -> float:
        try:
            return float(meta.get(f"{arch}.{key}", default))
        except ValueError:  # a list, one value per layer
            return default

    head = number("attention.key_length", number("embedding_length", 0) / max(number("attention.head_count", 1), 1))
    facts: dict[str, Any] = {
        "path": llm.model_path,
        "name": meta.get("general.name"),
        "architecture": arch,
        "parameters": llama_cpp.llama_model_n_params(llm.model),
        "size": llama_cpp.llama_model_size(llm.model),
        "context_length": llm._model.n_ctx_train(),
        "chat_template": "tokenizer.chat_template" in meta,
    }
    if llama_cpp.llama_model_rope_type(llm.model) != llama_cpp.LLAMA_ROPE_TYPE_NONE:
        n_rot, base = int(number("rope.dimension_count", head)), number("rope.freq_base", 10000.0)
        factor = 1 / (llama_cpp.llama_model_rope_freq_scale_train(llm.model) or 1.0)
        scaling = {
            "type": meta.get(f"{arch}.rope.scaling.type", "none"),
            "factor": factor,
            "factor_tensor": _has_factors(llm.model_path),
        }
        turned = pypcd.rho(n_rot)
        # YaRN leaves short wavelengths alone and stretches long ones; only linear scaling stretches all
        stretch = factor if scaling["type"] == "linear" else 1.0
        before = stretch * 2 * np.pi / pypcd.frequencies(n_rot, base)
        facts["rope"] = {
            "base": base,
            "n_rot": n_rot,
            "scaling": scaling,
            "frequencies": n_rot // 2,
            "turned": int((turned > 1.01).sum()),
            "rho": turned.tolist(),
            "wavelengths": before.tolist(),
            "wavelengths_over_rotated": (before / turned).tolist(),
        }
    facts["pcd"], facts["window"] = can_run(llm, PCDConfig()), can_run(llm, PCDConfig.windowed())
    return facts


def _has_factors(path: str) -> bool:
    """Whether the file's header names a tensor of per-frequency factors (Llama 3.1, LongRoPE)."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = min(len(data), 2**25)  # the header, and with a large vocabulary more than that rarely
        return any(data.find(name, 0, end) >= 0 for name in (b"rope_freqs.weight", b"rope_factors_long.weight"))


# -- text ------------------------------------------------------------------------------------------------------------


def report(record: dict[str, Any]) -> str:
    lib, machine = record["library"], record["machine"]
    gib = 2**30
    rows = [
        ("pypcd", f"{lib['pypcd']}, on llama-cpp-python {lib['llama_cpp_python']}"),
        ("library", lib["libllama"]),
        ("PCD hooks", f"present, interface {lib['pcd_interface']}"),
        ("system", f"{machine['system']}, {machine['threads']} threads, {machine['memory'] / gib:.1f} GiB"),
        ("backends", ", ".join(machine["backends"]) or "unknown"),
        *((f"device {d['name']}", f"{d['description']}, {d['memory'] / gib:.1f} GiB") for d in machine["devices"]),
        ("AMX", machine["amx"]),
    ]
    if "model" in record:
        m = record["model"]
        rope = m.get("rope")
        size = f"{m['parameters'] / 1e6:.4g} M parameters, {m['size'] / gib:.2f} GiB"
        rows += [
            ("", ""),
            ("model", f"{m['name'] or m['path']}: {m['architecture']}, {size}"),
            ("context", f"{m['context_length']} tokens"),
            ("chat template", "yes" if m["chat_template"] else "none: a base model, for 'pypcd generate'"),
            ("rope", _rope_text(rope) if rope else "none"),
            ("PCD", _yes(m["pcd"])),
            *([("PCD window", _yes(m["window"]))] if m["pcd"] not in ("yes", m["window"]) else []),
        ]
        if rope and m["pcd"] == "yes":
            rows += [
                ("turned", f"{rope['turned']} of {rope['frequencies']} frequencies by more than 1%"),
                *_wavelengths(rope),
            ]
    test = record.get("self_test")
    if test:
        rows += [("", ""), ("self-test", f"{test['model']} (differences in standard deviations of the logits)")]
        rows += [
            ("PASS" if c["passed"] else "FAIL", f"{c['what']} (difference {c['difference']:.1e})")
            for c in test["checks"]
        ]
        rows += [("skipped", test["skipped"])] if "skipped" in test else []
    return "".join(f"{name:<15}{text}".rstrip() + "\n" for name, text in rows)


def _yes(answer: str) -> str:
    return answer if answer == "yes" else f"no: {answer}"


def _rope_text(rope: dict[str, Any]) -> str:
    scaling = rope["scaling"]
    scaled = "none" if scaling["type"] == "none" else f"{scaling['type']}, factor {scaling['factor']:g}"
    factors = ", per-frequency factors" if scaling["factor_tensor"] else ""
    return f"base {rope['base']:g}, {rope['n_rot']} dimensions, scaling {scaled}{factors}"


def _wavelengths(rope: dict[str, Any]) -> list[tuple[str, str]]:
    """Up to eight of the frequencies, the last one among them."""
    n = rope["frequencies"]
    chosen = sorted({round(i) for i in np.linspace(0, n - 1, min(n, 8))})
    lines = [("wavelengths", "  frequency        standard    over-rotated  (tokens)")]
    for j in chosen:
        lines.append(
            ("", f"{j + 1:>11}  {rope['wavelengths'][j]:>14,.1f}  {rope['wavelengths_over_rotated'][j]:>14,.1f}")
        )
    return lines
