"""A model as data: nothing is lost on the way through the codec, and only what may be averaged is in the flat
vector."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file
from torch import nn

from coterie.core.errors import ModelError
from coterie.core.model_state import ModelState, check_layout, read_archive, save_state_dict, split


class Everything(nn.Module):
    """BatchNorm, a 0-d integer buffer, a frozen layer, a half-precision parameter, a boolean mask and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.halved = nn.Parameter(torch.randn(4).half())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.tied = self.conv.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)


def there_and_back(state, *beside):
    with tempfile.TemporaryDirectory() as folder:
        state.save(Path(folder) / "model", *beside)
        return read_archive(Path(folder) / "model")


def test_flat_holds_trainable_parameters_then_floating_buffers():
    state = ModelState.from_module(Everything())
    assert [entry.name for entry in state.layout.parameters] == [
        "halved", "scale", "tied", "conv.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip
    assert [entry.name for entry in state.layout.buffers] == ["norm.running_mean", "norm.running_var"]
    assert state.layout.num_parameters == 4 + 1 + 27 + 3 + 3 + 3
    assert state.flat.shape == (state.layout.num_parameters + 6,)


def test_integer_boolean_and_frozen_tensors_are_never_averaged():
    fixed = ModelState.from_module(Everything()).fixed
    assert set(fixed) == {"frozen.weight", "frozen.bias", "mask", "norm.num_batches_tracked"}
    assert fixed["norm.num_batches_tracked"].shape == ()
    assert fixed["norm.num_batches_tracked"].dtype == torch.int64


def test_codec_keeps_every_dtype_and_shape():
    state = ModelState.from_module(Everything())
    back = there_and_back(state)[0]
    assert back.layout == state.layout
    assert back.sha256() == state.sha256()
    for name, tensor in state.tensors().items():
        other = back.tensors()[name]
        assert other.dtype == tensor.dtype
        assert other.shape == tensor.shape
        assert torch.equal(other, tensor)


def test_the_codec_keeps_what_the_declared_dtype_would_round():
    state = ModelState.from_module(Everything())
    state = state.with_flat(state.flat + 1e-3 * torch.randn_like(state.flat))
    back, _, _ = there_and_back(state)
    assert torch.equal(back.flat, state.flat)
    assert back.layout == state.layout


def test_encoding_the_same_state_gives_the_same_bytes(tmp_path):
    state = ModelState.from_module(Everything())
    for name in ("one", "other"):
        state.save(tmp_path / name, note={"round": 3, "clock": 1.5})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_what_was_read_stays_when_the_file_is_replaced_and_may_be_written_to(tmp_path):
    path = tmp_path / "model"
    state = ModelState.from_module(nn.Linear(300, 200))
    state.save(path)
    back, _, _ = read_archive(path)
    state.with_flat(state.flat * 2).save(tmp_path / "other")
    (tmp_path / "other").replace(path)
    assert back.sha256() == state.sha256()
    back.flat.add_(1)
    assert torch.equal(read_archive(path)[0].flat, state.flat * 2)


def test_extra_tensors_and_note_travel_beside_the_model():
    state = ModelState.from_module(nn.Linear(2, 1))
    back, extra, note = there_and_back(state, {"momentum": torch.arange(3.0)}, {"round": 7})
    assert torch.equal(extra["momentum"], torch.arange(3.0))
    assert note == {"round": 7}
    assert back.sha256() == state.sha256()


def test_load_into_gives_the_module_the_values():
    source, target = Everything(), Everything()
    state = ModelState.from_module(source)
    state.load_into(target)
    assert ModelState.from_module(target).sha256() == state.sha256()


def test_the_state_is_a_copy():
    module = nn.Linear(2, 1)
    state = ModelState.from_module(module)
    before = state.sha256()
    with torch.no_grad():
        module.weight.add_(1)
    assert state.sha256() == before


def test_sha256_sees_one_flipped_bit_and_a_renamed_tensor():
    state = ModelState.from_module(nn.Linear(2, 1))
    flat = state.flat.clone()
    flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))
    assert state.with_flat(flat).sha256() != state.sha256()
    assert ModelState.from_module(nn.Sequential(nn.Linear(2, 1))).sha256() != state.sha256()


def test_plain_safetensors_file_reads_back_as_a_state_dict(tmp_path):
    module = Everything()
    save_state_dict(ModelState.from_module(module), tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["norm.running_var"], module.norm.running_var)
    assert loaded["halved"].dtype == torch.float16


@pytest.mark.parametrize("data", [b"", b"not safetensors at all", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_foreign_bytes_are_refused(data, tmp_path):
    (tmp_path / "model").write_bytes(data)
    with pytest.raises(ModelError, match="not a model state"):
        read_archive(tmp_path / "model")


def test_a_layout_difference_is_named():
    wanted, _, _ = split(nn.Sequential(nn.Linear(2, 3)))
    given_, _, _ = split(nn.Sequential(nn.Linear(2, 4)))
    with pytest.raises(ModelError, match=r"expected 0.weight float32\[3, 2\], got 0.weight float32\[4, 2\]"):
        check_layout(wanted, given_)


def test_a_difference_in_what_is_not_averaged_is_named():
    module, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    other.num_batches_tracked = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ModelError, match=r"expected num_batches_tracked int64\[3\], got num_batches_tracked int64\[\]"):
        ModelState.from_module(module).load_into(other)
    bare = nn.BatchNorm1d(2)
    del bare.num_batches_tracked
    with pytest.raises(ModelError, match="expected none, got num_batches_tracked"):
        ModelState.from_module(module).load_into(bare)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ModelError, match="no trainable parameter"):
        ModelState.from_module(nn.Linear(2, 1).requires_grad_(False))


def test_a_lazy_layer_is_refused_with_the_remedy():
    with pytest.raises(ModelError, match="run one batch through lazy layers"):
        ModelState.from_module(nn.LazyLinear(2))


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_any_shapes_survive_the_codec(shapes, dtype):
    module = nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype)))
        module.register_buffer(f"b{i}", torch.randint(0, 9, shape))
    state = ModelState.from_module(module)
    back = there_and_back(state)[0]
    assert back.sha256() == state.sha256()
    assert {n: (t.dtype, t.shape) for n, t in back.tensors().items()} == {
        n: (t.dtype, t.shape) for n, t in state.tensors().items()
    }
