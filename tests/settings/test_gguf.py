"""Reading a GGUF file's header, against the gguf package, llama.cpp itself, and damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
from conftest import Tiny
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import ARCHS

from pypcd.gguf import GGUF, Shape, read_gguf

PLAIN = Shape(4096, 0, 32, (32,) * 32, 128, 128, 128, 10000.0)  # a 7B Llama


@pytest.mark.parametrize("arch", ARCHS)
def test_it_has_what_the_gguf_package_reads(arch: str, tiny: Tiny) -> None:
    read, ours = gguf.GGUFReader(tiny(arch)), read_gguf(tiny(arch))
    assert ours.tensors == {tensor.name for tensor in read.tensors}
    assert ours.n_vocab == len(read.fields["tokenizer.ggml.tokens"].data)
    wanted = {}
    for name, field in read.fields.items():
        if not name.startswith("GGUF.") and not (len(field.types) == 2 and field.types[1] == gguf.GGUFValueType.STRING):
            wanted[name] = field.contents()
    assert ours.metadata == wanted
    assert ours.architecture == arch


@pytest.mark.parametrize("arch", ["llama", "gemma2", "stablelm", "phi3", "mamba", "bloom"])
def test_its_dimensions_are_those_of_the_loaded_model(arch: str, tiny: Tiny) -> None:
    llm = llama_cpp.Llama(str(tiny(arch)), n_ctx=64, n_threads=1, verbose=False)
    model, shape = llm.model, read_gguf(tiny(arch)).shape
    assert shape.n_vocab == llm.n_vocab() and shape.n_ctx_train == llama_cpp.llama_model_n_ctx_train(model)
    assert len(shape.n_head_kv) == llama_cpp.llama_model_n_layer(model)
    if arch != "mamba":
        assert shape.n_head == llama_cpp.llama_model_n_head(model)
        assert shape.n_head_kv[0] == llama_cpp.llama_model_n_head_kv(model)
        assert shape.n_embd_head_k * shape.n_head == llama_cpp.llama_model_n_embd(model)
    llm.close()


def write(path: Path, *tensors: str, **values: object) -> Path:
    """A file with these metadata, and tensors of as many dimensions as their names have letters."""
    writer, kinds = gguf.GGUFWriter(str(path), "llama"), gguf.GGUFValueType
    for name, value in values.items():
        kind = kinds.UINT32 if isinstance(value, int) else kinds.get_type(value)
        writer.add_key_value(f"llama.{name.replace('__', '.')}", value, kind)
    for tensor in tensors:
        writer.add_tensor(tensor, np.zeros(range(2, 2 + len(tensor)), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def test_a_layers_own_numbers_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", block_count=70, attention__head_count_kv=[1, 2, 0] * 23 + [4], vocab_size=77)
    shape = read_gguf(path).shape
    assert read_gguf(path).n_vocab == 77  # a vocabulary without tokens has the size that it says
    assert shape.n_head_kv == (1, 2, 0) * 23 + (4,)
    assert shape.key_bytes == 2 * sum(shape.n_head_kv) * 128 == shape.value_bytes


@pytest.mark.parametrize("value", ["many", 0x7FFFFFFF * 2, float("nan"), -1.0, [2**30, 2**30 + 1]])
def test_senseless_numbers_are_the_default_or_do_no_harm(value: object, tmp_path: Path) -> None:
    names = ("block_count", "context_length", "attention__head_count", "attention__key_length", "rope__freq_base")
    for name in names:
        shape = read_gguf(write(tmp_path / f"{name}.gguf", **{name: value})).shape
        assert len(shape.n_head_kv) <= 1024 and shape.key_bytes >= 0
        if not isinstance(value, (int, list)):
            assert shape == PLAIN


def test_a_long_list_of_numbers_is_left_out_and_what_follows_is_read(tmp_path: Path) -> None:
    read = read_gguf(write(tmp_path / "m.gguf", many=list(range(5000)), few=list(range(5)), block_count=3))
    assert "llama.many" not in read.metadata and read.metadata["llama.few"] == [0, 1, 2, 3, 4]
    assert len(read.shape.n_head_kv) == 3


def test_a_header_that_ends_early_is_empty(tiny: Tiny, tmp_path: Path) -> None:
    data = tiny("llama").read_bytes()
    whole = read_gguf(tiny("llama"))
    end = gguf.GGUFReader(tiny("llama")).data_offset  # of the weights, after a gap of less than 32 bytes
    for n in [*range(1, 60), *range(60, end - 32, 97), end - 32]:
        (tmp_path / "part.gguf").write_bytes(data[:n])
        assert read_gguf(tmp_path / "part.gguf") == GGUF(), n
    (tmp_path / "part.gguf").write_bytes(data[:end])  # the weights are not looked at
    assert read_gguf(tmp_path / "part.gguf") == whole
    for other in (b"", data[:4] + b"\1" + data[5:]):  # nothing, and the first version of the format
        (tmp_path / "part.gguf").write_bytes(other)
        assert read_gguf(tmp_path / "part.gguf") == GGUF()


@given(changes=st.lists(st.tuples(st.integers(4, 3000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_damage_does_no_harm(
    changes: list[tuple[int, bytes]], tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(tiny("llama").read_bytes()[:200_000])
    for at, new in changes:
        data[at : at + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    shape = read_gguf(path).shape
    assert len(shape.n_head_kv) <= 1024 and np.isfinite(shape.key_bytes)


def test_a_tensor_of_more_dimensions_than_ggml_has_is_passed_over(tmp_path: Path) -> None:
    assert read_gguf(write(tmp_path / "five.gguf", "abcde", "ab")).tensors == {"abcde", "ab"}
