"""The programs of `docs/moves.md`: the same on clean data before and after, and garbage harms only before."""

import functools

import jax
import jax.numpy as jnp
import moves
import numpy as np
import pytest
import results
from comparisons import assert_close

import masksafe
from masksafe.testing import assert_mask_safe

BY_DEFAULT = ("losses of DETR",)
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name not in BY_DEFAULT)) for name in moves.PROGRAMS]
SIDES = ("before", "after")


@functools.cache
def case(name):
    program = moves.PROGRAMS[name]
    return jax.jit(functools.partial(program.make, **program.SIZES["tiny"]))(jax.random.key(0))


@functools.cache
def program_of(name, side):
    return jax.jit(jax.value_and_grad(getattr(moves.PROGRAMS[name], side)))


def assert_safe(name, side):
    """Of the value, and of its gradients by the parameters and by the batch."""
    program, (params, batch) = moves.PROGRAMS[name], case(name)
    masked = {1: program.padding(batch)}
    assert_mask_safe(getattr(program, side), params, batch, masked=masked, order=1, transforms=("jit",))


@pytest.mark.parametrize("name", EACH)
def test_clean_data_have_the_value_and_the_gradients_of_before(name):
    before, after = (program_of(name, side)(*case(name)) for side in SIDES)
    assert_close(after, before)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(before[1]))  # else the test would not see a parameter


@pytest.mark.parametrize("name", EACH)
def test_garbage_in_the_padding_changes_no_bit(name):
    assert_safe(name, "after")


@pytest.mark.slow
@pytest.mark.parametrize("name", moves.PROGRAMS)
def test_garbage_in_the_padding_harmed_before(name):
    with pytest.raises(AssertionError, match="nan with garbage"):
        assert_safe(name, "before")


# What a formula makes of nothing: a node without neighbours, a set without points, and speech without frames.
EMPTIED = {"graph attention": ["is edge"], "diffusion over sets": ["is point"], "CTC": ["is frame", "is label"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", EMPTIED)
def test_what_is_empty_was_wrong(name):
    params, batch = case(name)
    batch = batch | {mask: batch[mask].at[0].set(False) for mask in EMPTIED[name]}
    before, after = (program_of(name, side)(params, batch) for side in SIDES)
    assert not before[0] < 1000  # NaN
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert after[0] < 1000


@pytest.mark.slow
def test_a_target_without_a_source_saw_padding():
    """Before, its weights were equal over all keys: next to -1e10 no logit counts."""
    name = "packed encoder and decoder"
    params, batch = case(name)
    batch = batch | {"sources segments": batch["sources segments"].at[0].set(0)}
    other = batch | {"sources": batch["sources"].at[0].add(-1)}
    before, after = ([program_of(name, side)(params, b)[0] for b in (batch, other)] for side in SIDES)
    assert abs(before[1] - before[0]) > 1e-3
    assert after[1] == after[0]


def test_a_mask_that_is_not_passed_is_found():
    """As in maxtext#4016: padding is on the left, and attention is only told that it is causal."""
    x, is_token = jax.random.normal(jax.random.key(0), (1, 6, 2, 8)), jnp.arange(6)[None] >= 2
    segments = {"query_segment_ids": jnp.int32(is_token), "key_value_segment_ids": jnp.int32(is_token)}
    padded = ~is_token[..., None, None]
    check = functools.partial(
        assert_mask_safe, masked={0: padded}, output_mask=padded, order=0, garbage=(1.0,), transforms=("jit",)
    )
    attend = lambda x, **of: masksafe.dot_product_attention(x, x, x, is_causal=True, **of)  # noqa: E731
    with pytest.raises(AssertionError, match="not gone"):
        check(attend, x)
    check(functools.partial(attend, **segments), x)


def test_the_page_has_the_table_and_the_changes():
    page = (results.DOCS / "moves.md").read_text()
    contents = moves.contents()
    assert sorted(results.PLACE.findall(page)) == sorted(contents)
    assert [name for name, text in contents.items() if f"\n{text}\n\n<!-- end -->" not in page] == []


@pytest.mark.parametrize("name", moves.shown())
def test_the_lines_that_are_counted_are_those_of_the_change(name):
    page = (results.DOCS / "moves.md").read_text()
    _, _, rest = page.partition(f"<!-- table: {moves.name_of(moves.PROGRAMS[name])} -->")
    shown = rest.partition("<!-- end -->")[0].splitlines()
    numbers = [sum(line.startswith(sign) for line in shown) for sign in "-+"]
    row = next(line for line in page.splitlines() if line.startswith(f"| {name} "))
    assert row.split("|")[2].split()[:2] == [f"-{numbers[0]}", f"+{numbers[1]}"]
