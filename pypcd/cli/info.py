"""pypcd info: the library, the machine, what PCD does to a model's frequencies, and a self-test."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from typing import Any

import llama_cpp

import pypcd
from pypcd import PCDConfig, engine, library
from pypcd.bench import placements, self_test
from pypcd.cli import _loading, _options, _terminal
from pypcd.find.heads import heads_of
from pypcd.gguf import DEMO_MODEL, read_gguf, resolve_model
from pypcd.llama import threads as threads_module
from pypcd.llama.machine import devices, has_gpu, total_memory
from pypcd.settings import formula

_IDLE = "found: there is none, or its driver is missing or older than this build needs; models run on the devices above"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd info [MODEL] [--json] [--no-test] [--rpc HOST:PORT,...]"
    parser.epilog = "Without MODEL the self-test runs on pypcd's demo model. The exit status is 1 if it fails."
    _options.add_model(parser, nargs="?")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-test", action="store_true", help="skip the self-test")
    _options.add_rpc(parser)


def run(args: argparse.Namespace) -> int:
    path = resolve_model(args.model) if args.model else None
    record: dict[str, Any] = {"library": library_facts(), "machine": machine_facts()}
    tested = path or (str(DEMO_MODEL) if DEMO_MODEL.exists() else None)
    if tested and (path or not args.no_test):
        llm = _loading.open_model(tested, n_ctx=512, rpc_servers=args.rpc)
        if path:
            record["model"] = model_facts(llm)
        if not args.no_test:
            with _terminal.Bar(None, "testing"):
                record["self_test"] = self_test(llm)
                if path and engine.is_native():
                    record["placements"] = placements(llm)
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
        "built_for": library.pinned_version(),
        "libllama": engine.library_path(),
        "engine": engine.choose_engine(None),
        "why_stock": library.why_stock(),
        "pcd_interface": library.API_VERSION,
    }


def machine_facts() -> dict[str, Any]:
    """What models are computed on here, and with how many threads."""
    threads = threads_module.choose({"n_gpu_layers": 0})
    amx = engine.configure_amx()
    features, backends = engine.cpu_features(), engine.backends()
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "threads": threads.decode,
        "threads_batch": threads.batch,
        "threads_why": threads.why,
        "memory": total_memory(),
        "gpu_offload": has_gpu(),
        "backends": list(backends),
        # RPC has none until servers are named
        "idle_backends": [name for name, n in backends.items() if n == 0 and name != "RPC"],
        "devices": devices(),
        "cpu_features": features,
        "amx": f"{'on' if amx.on else 'off' if amx.exists else 'none'}: {amx.why}",
        "repacked": "REPACK = 1" in features,
    }


def model_facts(llm: pypcd.Llama) -> dict[str, Any]:
    meta, file = llm.metadata, read_gguf(llm.model_path)
    arch, shape = meta.get("general.architecture", "unknown"), file.shape
    facts: dict[str, Any] = {
        "path": llm.model_path,
        "name": meta.get("general.name"),
        "architecture": arch,
        "parameters": engine.n_parameters(llm),
        "size": engine.n_bytes(llm),
        "context_length": engine.n_ctx_train(llm),
        "chat_template": "tokenizer.chat_template" in meta,
    }
    if engine.rotates(llm):
        n_rot, base = shape.n_rot, shape.rope_freq_base
        factor = 1 / engine.rope_freq_scale(llm)
        scaling = {
            "type": meta.get(f"{arch}.rope.scaling.type", "none"),
            "factor": factor,
            "factor_tensor": file.has_rope_factors,
        }
        facts["rope"] = {
            "base": base,
            "n_rot": n_rot,
            "scaling": scaling,
            "frequencies": n_rot // 2,
            "turned": int((formula.rho(n_rot) > 1.01).sum()),
        }
    for name, config in (("pcd", PCDConfig()), ("window", PCDConfig.preset("window"))):
        facts[name] = engine.pcd_refusal(llm, config) or "yes"
    facts["replay"] = _finder(llm)
    return facts


def _finder(llm: pypcd.Llama) -> str:
    """How replay finds passages."""
    if heads_of(llm) is None:
        return f"by keyword search; pypcd probe {llm.model_path} finds which of its heads retrieve"
    return "by attention and keyword search"


# -- text ------------------------------------------------------------------------------------------------------------


def report(record: dict[str, Any]) -> str:
    lib, machine = record["library"], record["machine"]
    gib = 2**30
    rows = [
        ("pypcd", f"{lib['pypcd']}, on llama-cpp-python {lib['llama_cpp_python']}"),
        ("library", lib["libllama"]),
        ("engine", _engine_text(lib)),
        ("system", f"{machine['system']}, {machine['memory'] / gib:.1f} GiB"),
        ("threads", f"{machine['threads']}, {machine['threads_batch']} for prompts; {machine['threads_why']}"),
        ("backends", ", ".join(machine["backends"]) or "unknown"),
        *((f"device {d['name']}", f"{d['description']}, {d['memory'] / gib:.1f} GiB") for d in machine["devices"]),
        *((f"no {name} device", _IDLE) for name in machine["idle_backends"]),
        ("AMX", machine["amx"]),
        ("other kernels", "repacked weights" if machine["repacked"] else "no repacked weights in this build"),
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
            ("PCD", _yes(m["pcd"]) + ("; 'pypcd tune' tells whether it helps this model" if m["pcd"] == "yes" else "")),
            *([("PCD window", _yes(m["window"]))] if m["pcd"] not in ("yes", m["window"]) else []),
            (
                "documents",
                f"a question about one gets replay: its passages stand once more before it, found {m['replay']}",
            ),
        ]
        if rope and m["pcd"] == "yes":
            rows.append(("turned", f"{rope['turned']} of {rope['frequencies']} frequencies by more than 1%"))
    test = record.get("self_test")
    if test:
        rounding = f"; rounding here: up to {test['limit']:.1e}" if "limit" in test else ""
        rows += [
            ("", ""),
            ("self-test", f"{test['model']} (differences in standard deviations of the logits{rounding})"),
        ]
        rows += [
            ("PASS" if c["passed"] else "FAIL", f"{c['what']} (difference {c['difference']:.1e})")
            for c in test["checks"]
        ]
        rows += [("skipped", test["skipped"])] if "skipped" in test else []
    rows += _places(record.get("placements", {}))
    return "".join(f"{name:<15}{text}".rstrip() + "\n" for name, text in rows)


def _places(found: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """What the CPU runs of a model that is on another device; nothing where there is none."""
    lines = [
        ("", ""),
        (
            "on the CPU",
            "operations of a graph of PCD's, beside those of plain decoding, though the model is on a device",
        ),
    ]
    for way, operations in found.items():
        left = ", ".join(f"{n} {what}" for what, n in sorted(operations.items()))
        lines.append(("", f"{way}: {left or 'nothing'}"))
    return lines if found else []


def _engine_text(lib: dict[str, Any]) -> str:
    if lib["engine"] == "native":
        return f"native: all settings; PCD interface {lib['pcd_interface']}"
    return f"stock: unsure, window, paper, but not all settings ({lib['why_stock']})"


def _yes(answer: str) -> str:
    return answer if answer == "yes" else f"no: {answer}"


def _rope_text(rope: dict[str, Any]) -> str:
    scaling = rope["scaling"]
    scaled = "none" if scaling["type"] == "none" else f"{scaling['type']}, factor {scaling['factor']:g}"
    factors = ", per-frequency factors" if scaling["factor_tensor"] else ""
    return f"base {rope['base']:g}, {rope['n_rot']} dimensions, scaling {scaled}{factors}"
