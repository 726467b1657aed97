"""pypcd info: the library, the machine, what PCD does to a model's frequencies, and a self-test."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import llama_cpp

import pypcd
from pypcd import PCDConfig, engine, library
from pypcd.bench import placements, self_test
from pypcd.cli import _loading, _options, _terminal
from pypcd.find.heads import heads_of
from pypcd.gguf import DEMO_MODEL, read_gguf, resolve_model
from pypcd.llama import threads as threads_module
from pypcd.llama.machine import devices, total_memory
from pypcd.settings import formula

_IDLE = "found: there is none, or its driver is missing or older than this build needs; models run on the devices above"
_GIB = 2**30


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
    amx, backends = engine.configure_amx(), engine.backends()
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "threads": threads.decode,
        "threads_batch": threads.batch,
        "threads_why": threads.why,
        "memory": total_memory(),
        "backends": list(backends),
        # RPC has none until servers are named
        "idle_backends": [name for name, n in backends.items() if n == 0 and name != "RPC"],
        "devices": devices(),
        "amx": f"{'on' if amx.on else 'off' if amx.exists else 'none'}: {amx.why}",
    }


def model_facts(llm: pypcd.Llama) -> dict[str, Any]:
    shape, has_heads = read_gguf(llm.model_path).shape, heads_of(llm) is not None
    rope = None
    if engine.rotates(llm):
        turned = int((formula.rho(shape.n_rot) > 1.01).sum())
        rope = {"base": shape.rope_freq_base, "n_rot": shape.n_rot, "frequencies": shape.n_rot // 2, "turned": turned}
    by_search = f"by keyword search; pypcd probe {llm.model_path} finds which of its heads retrieve"
    return {
        "path": llm.model_path,
        "name": llm.metadata.get("general.name"),
        "architecture": llm.metadata.get("general.architecture", "unknown"),
        "parameters": engine.n_parameters(llm),
        "size": engine.n_bytes(llm),
        "context_length": engine.n_ctx_train(llm),
        "chat_template": "tokenizer.chat_template" in llm.metadata,
        "rope": rope,
        "pcd": engine.pcd_refusal(llm, PCDConfig()) or "yes",
        "window": engine.pcd_refusal(llm, PCDConfig.preset("window")) or "yes",
        "replay": "by attention and keyword search" if has_heads else by_search,
    }


# -- text ------------------------------------------------------------------------------------------------------------


def report(record: dict[str, Any]) -> str:
    parts = [_library_rows(record["library"]) + _machine_rows(record["machine"])]
    parts += [_model_rows(record["model"])] if "model" in record else []
    parts += [_test_rows(record["self_test"])] if "self_test" in record else []
    if record.get("placements"):  # what the CPU runs of a model that is on another device
        what = "operations of a graph of PCD's, beside those of plain decoding, though the model is on a device"
        left = {way: [f"{n} {name}" for name, n in sorted(of.items())] for way, of in record["placements"].items()}
        parts += [[("on the CPU", what), *(("", f"{way}: {', '.join(of) or 'nothing'}") for way, of in left.items())]]
    return "\n".join("".join(f"{name:<15}{text}\n" for name, text in rows) for rows in parts)


def _library_rows(lib: dict[str, Any]) -> list[tuple[str, str]]:
    chosen = f"native: all settings but cache=separate, which the stock one has; PCD interface {lib['pcd_interface']}"
    if lib["engine"] != "native":
        chosen = f"stock: unsure, window, paper, but not all settings ({lib['why_stock']})"
    return [
        ("pypcd", f"{lib['pypcd']}, on llama-cpp-python {lib['llama_cpp_python']}"),
        ("library", lib["libllama"]),
        ("engine", chosen),
    ]


def _machine_rows(machine: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("system", f"{machine['system']}, {machine['memory'] / _GIB:.1f} GiB"),
        ("threads", f"{machine['threads']}, {machine['threads_batch']} for prompts; {machine['threads_why']}"),
        ("backends", ", ".join(machine["backends"]) or "unknown"),
        *((f"device {d['name']}", f"{d['description']}, {d['memory'] / _GIB:.1f} GiB") for d in machine["devices"]),
        *((f"no {name} device", _IDLE) for name in machine["idle_backends"]),
        ("AMX", machine["amx"]),
    ]


def _model_rows(m: dict[str, Any]) -> list[tuple[str, str]]:
    size = f"{m['parameters'] / 1e6:.4g} M parameters, {m['size'] / _GIB:.2f} GiB"
    rope, pcd, window = m["rope"], m["pcd"], m["window"]
    base = rope and f"base {rope['base']:g}, {rope['n_rot']} dimensions"
    turned = rope and f"; PCD turns {rope['turned']} of {rope['frequencies']} frequencies by more than 1%"
    return [
        ("model", f"{m['name'] or m['path']}: {m['architecture']}, {size}"),
        ("context", f"{m['context_length']} tokens"),
        ("chat template", "yes" if m["chat_template"] else "none: a base model, for 'pypcd generate'"),
        ("rope", f"{base}{turned if pcd == 'yes' else ''}" if rope else "none"),
        ("PCD", "yes; 'pypcd tune' tells whether it helps this model" if pcd == "yes" else f"no: {pcd}"),
        *([("PCD window", window if window == "yes" else f"no: {window}")] if pcd not in ("yes", window) else []),
        (
            "documents",
            f"a question about one gets replay: its passages stand once more before it, found {m['replay']}",
        ),
    ]


def _test_rows(test: dict[str, Any]) -> list[tuple[str, str]]:
    rounding = f"; rounding here: up to {test['limit']:.1e}" if "limit" in test else ""
    checks = [
        ("PASS" if c["passed"] else "FAIL", f"{c['what']} (difference {c['difference']:.1e})") for c in test["checks"]
    ]
    skipped = [("skipped", test["skipped"])] if "skipped" in test else []
    head = f"{test['model']} (differences in standard deviations of the logits{rounding})"
    return [("self-test", head), *checks, *skipped]
