"""Random streams: the same purpose gives the same numbers anywhere, two purposes never share a stream."""

import subprocess
import sys

import hypothesis.strategies as st
import torch
from hypothesis import given

from coterie.core.seeding import derive_seed, numpy_generator, torch_generator

parts = st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4)


@given(parts, parts)
def test_different_purposes_have_different_seeds(one, other):
    assert (derive_seed(7, *one) == derive_seed(7, *other)) == (one == other)


def test_a_number_and_its_text_are_different_purposes():
    assert derive_seed(7, "batches", 1) != derive_seed(7, "batches", "1")


def test_the_same_purpose_gives_the_same_numbers_in_another_process():
    script = "from coterie.core.seeding import derive_seed; print(derive_seed(7, 'batches', 3, 'site-a'))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(out.stdout) == derive_seed(7, "batches", 3, "site-a")


def test_generators_repeat():
    assert torch.equal(
        torch.rand(3, generator=torch_generator(1, "a")), torch.rand(3, generator=torch_generator(1, "a"))
    )
    assert numpy_generator(1, "a").random() == numpy_generator(1, "a").random()
    assert numpy_generator(1, "a").random() != numpy_generator(2, "a").random()
