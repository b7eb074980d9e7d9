"""dot_product_attention with axis_name: time split over devices, against the same call on one device."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, inner_jaxprs, normals, random_inputs, replaced, with_gradients
from comparisons import assert_close, assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe

B, T, N, K = 2, 16, 4, 2
IN_TIME, OF_PAIRS = P(None, "time"), P(None, None, "time")
SPECS = dict.fromkeys(("query", "key", "value", "query_segment_ids", "key_value_segment_ids"), IN_TIME)
SPECS |= dict.fromkeys(("query_positions", "key_positions"), IN_TIME)


def mesh_of(*shape, names=("time",), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, (kind,) * len(shape))


def spec_of(name, x):
    """How an argument is split along time, queries of an array over pairs unless it broadcasts along them."""
    if name in ("mask", "bias"):
        return OF_PAIRS if x.shape[-2] > 1 else P()
    return SPECS.get(name, P())


def attend(arrays, static, **more):
    """The output and the logsumexp; a `score_mod` captures `slopes`, or a `table` of samples and positions."""
    arrays = dict(arrays)
    slopes, table = arrays.pop("slopes", None), arrays.pop("table", None)
    if slopes is not None:
        more["score_mod"] = lambda x, batch, head, query, key: x * slopes[head] - slopes[batch] * (query - key)
    if table is not None:
        more["score_mod"] = lambda x, batch, head, query, key: x + table[batch, query]
    return attention(**arrays, **static, **more, return_residual=True)


def in_ring(arrays, static, mesh, check_vma=True, specs=None, out_specs=IN_TIME, axis_name="time", **more):
    """`attend` with time split over an axis, "time", of whole arrays, by default over no other."""
    local = functools.partial(attend, static=static, axis_name=axis_name)
    specs = {name: spec_of(name, x) if specs is None else specs[name] for name, x in arrays.items()}
    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=check_vma, **more)


def place(mesh, spec, *arrays):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def program_of(fn):
    """The jitted function of arrays: the outputs of `fn(arrays)`, and the gradients of its float arrays."""
    run = with_gradients(lambda floats, **rest: fn(floats | rest))

    def results(arrays, cotangents=None):
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        shape = (*arrays["query"].shape[:3], arrays["value"].shape[3])
        cotangents = cotangents or (normals(*shape, seed=6), normals(*shape[:3], seed=7))
        outputs, (gradients,) = run((floats,), tuple(cotangents), {n: x for n, x in arrays.items() if n not in floats})
        return outputs, gradients

    return results


def results(fn, arrays, cotangents=None):
    return program_of(fn)(arrays, cotangents)


def assert_as_on_one_device(split, arrays, static, placed=None, cotangents=None):
    """For a function of arrays with time split; they may be placed on its mesh."""
    expected = results(lambda arrays: attend(arrays, static), arrays)
    assert_close(results(split, placed or arrays, cotangents), expected)


def inputs(S=T, T=T, N=N, K=K, B=B, **more):
    return dict(zip(("query", "key", "value"), random_inputs(B, T, S, N, K, width=3), strict=True)) | more


INDEX = np.arange(T)
COTANGENTS = normals(B, T, N, 3, seed=6), normals(B, T, N, seed=7)
SINKS, SLOPES = normals(N, seed=5), normals(N, seed=8)
IDS = np.stack([INDEX // 5, np.where(INDEX < 6, 2, 9)])
ALLOWED = np.random.default_rng(0).random((B, N, T, T)) < 0.3
SHUFFLED = np.random.default_rng(1).permutation(2 * T)[:T][None]
SOME_BIAS = np.where(ALLOWED[:1], normals(1, N, T, T, seed=3), -np.inf)


def near(batch, head, query, key):
    return (query - key < 4 + head) & (key < 12 + batch)


# In a ring each case has one form of attention, in turn, and one more thing that differs: a static mask decides which
# devices' keys come round, and the arrays are split, sent on, or neither. The fixture `ring` has each mask as an array.
CASES = {
    "window and causal": ("one block", {}, dict(local_window_size=6, is_causal=True)),
    "no mask": ("many blocks", {}, {}),
    "window to the left": ("blocks of keys", {}, dict(local_window_size=(3, 0))),
    "window elsewhere": ("one block", {}, dict(local_window_size=(9, -7))),
    "window that sees nothing": ("one block", {}, dict(local_window_size=(-17, 20))),
    "causal, before the keys": ("rows", {}, dict(is_causal=True, causal_offset=-6)),
    "causal, after the keys, lengths": (
        "blocks of keys",
        dict(query_seq_lengths=np.array([16, 7]), key_value_seq_lengths=np.array([10, 3])),
        dict(is_causal=True, causal_offset=9),
    ),
    "causal, offsets of samples, segments": (
        "many blocks",
        dict(causal_offset=np.array([-5, 3]), query_segment_ids=IDS[:1], key_value_segment_ids=IDS[:1]),
        dict(is_causal=True),
    ),
    "positions of queries": ("blocks of keys", dict(query_positions=SHUFFLED), dict(local_window_size=(5, 2))),
    "pairs, bias of keys": ("rows", dict(mask=ALLOWED, bias=normals(B, 1, 1, T, seed=4)), {}),
    "mask and bias of queries": (
        "many blocks",
        dict(mask=np.isin(INDEX, (0, 5, 6, 7, 14))[None, None, :, None], bias=normals(B, N, T, 1, seed=4)),
        dict(is_causal=True),
    ),
    "everything": (
        "one block",
        dict(bias=SOME_BIAS, sinks=SINKS, slopes=SLOPES, scale=np.float32(0.7))
        | dict(query_segment_ids=IDS, key_value_segment_ids=IDS, key_value_seq_lengths=np.array([14, 13]))
        | dict(query_positions=SHUFFLED, key_positions=SHUFFLED),
        dict(is_causal=True, logit_soft_cap=3.0, mask_mod=near),
    ),
}
# With the types of `jax.shard_map` checked or not.
IN_RINGS = [(name, form, i % 3 != 0) for i, (name, (form, *_)) in enumerate(CASES.items())]


@parametrize(
    ("name", "form", "check_vma"),
    [("window and causal", "one block", False)],
    exhaustive=IN_RINGS[1:],
    indirect=["form"],
)
def test_equals_one_device(name, form, check_vma):
    _, more, static = CASES[name]
    arrays = inputs(**more)
    assert_as_on_one_device(in_ring(arrays, static, mesh_of(4), check_vma), arrays, static)


# Queries, keys, a mask, devices.
@parametrize(
    ("T", "S", "static", "devices"),
    [(8, 24, dict(is_causal=True), 2)],
    exhaustive=[(24, 8, dict(is_causal=True), 1), (8, 64, dict(is_causal=True), 8)],
    ids=str,
)
def test_sizes(T, S, static, devices):
    arrays = inputs(S=S, T=T)
    assert_as_on_one_device(in_ring(arrays, static, mesh_of(devices)), arrays, static)


# The contract.

WITH_ALL_MASKS = inputs(
    bias=normals(B, N, T, T, seed=3),
    sinks=SINKS,
    mask=np.ones((B, 1, 1, T), bool),
    query_positions=INDEX[None],
    key_positions=INDEX[None],
    query_seq_lengths=np.full(B, T),
    key_value_seq_lengths=np.full(B, T),
    query_segment_ids=np.zeros((B, T), int),
    key_value_segment_ids=np.zeros((B, T), int),
)
STATIC = dict(is_causal=True, mask_mod=near)


@pytest.fixture(scope="module")
def ring():
    """The results in a ring, with other arrays than those above: one program for all."""
    run = program_of(in_ring(WITH_ALL_MASKS, STATIC, mesh_of(4)))
    return lambda cotangents=None, **arrays: run(WITH_ALL_MASKS | arrays, cotangents)


@pytest.fixture(scope="module")
def one_device():
    run = program_of(lambda arrays: attend(arrays, STATIC))
    return lambda **arrays: run(WITH_ALL_MASKS | arrays)


def test_all_masks_together_and_each_alone_are_those_of_one_device(ring, one_device):
    shuffled = dict(query_positions=SHUFFLED, key_positions=SHUFFLED[:, ::-1])
    lengths = dict(query_seq_lengths=np.array([16, 7]), key_value_seq_lengths=np.array([10, 3]))
    segments = dict(query_segment_ids=IDS, key_value_segment_ids=IDS)
    of_shards = dict(key_value_seq_lengths=np.array([4, 0]))
    for arrays in (
        {},
        shuffled,
        lengths,
        of_shards,
        segments,
        dict(bias=np.where(ALLOWED, WITH_ALL_MASKS["bias"], -np.inf)),
    ):
        assert_close(ring(**arrays), one_device(**arrays))


MASKS = {
    "keys": (np.isin(INDEX, (0, 5, 6, 7, 14))[None] & np.ones((B, 1), bool), {}),
    "lengths": (np.array([[6], [0]]) > INDEX, dict(key_value_seq_lengths=np.array([6, 0]))),
    "segments": (IDS == 2, dict(query_segment_ids=np.full((B, T), 2), key_value_segment_ids=IDS)),
}
MASKS["keys"][1]["mask"] = MASKS["keys"][0][:, None, None]


@parametrize("name", ["keys"], exhaustive=["lengths", "segments"])
def test_masked_keys_change_nothing(name, ring):
    """Also where all keys of a device are masked, for some samples or for all."""
    seen, masks = MASKS[name]
    clean = ring(**masks)
    for name in ("key", "value"):
        assert (np.asarray(clean[1][name])[~seen] == 0).all()
    for garbage in np.float32([np.nan, np.inf, 1e38]):
        dirty = {name: np.where(seen[..., None, None], WITH_ALL_MASKS[name], garbage) for name in ("key", "value")}
        dirty["bias"] = np.where(seen[:, None, None], WITH_ALL_MASKS["bias"], garbage)
        dirty["query"] = np.where(seen.any(1)[:, None, None, None], WITH_ALL_MASKS["query"], garbage)
        assert_same_bits(ring(**masks, **dirty), clean)


def test_what_is_bad_shows_where_it_does_on_one_device(ring, one_device):
    for name, value in itertools.product(("query", "key", "value"), (np.nan, 1e30)):
        bad = {name: replaced(WITH_ALL_MASKS[name], (0, 6, 1, 2), value)}
        actual, expected = ring(**bad), one_device(**bad)
        assert np.isnan(expected[0][0]).any()
        assert_close(actual, expected)  # NaN equals NaN


def test_logits_that_overflow_on_some_devices_have_weight_0(ring, one_device):
    """Of all keys of a device: a finite bias does not make an output NaN that sees others, too."""
    query, key, bias = (WITH_ALL_MASKS[name] for name in ("query", "key", "bias"))
    huge = dict(query=replaced(query, (0, 6), 2e18), key=replaced(key, np.s_[:, 4:], -2e18))
    huge["bias"] = replaced(np.zeros_like(bias), np.s_[..., 4:], np.finfo(np.float32).min)
    actual, expected = ring(**huge)[0], one_device(**huge, key_value_seq_lengths=np.array([4, 4]))[0]
    assert np.isfinite(expected[1][0, 6]).all()
    assert_close(*(jax.tree.map(lambda x: x[0, 6], results) for results in (actual, expected)))


def test_padded_queries_without_cotangents_take_no_part(ring):
    real = (INDEX < 9)[:, None, None]
    cotangents = np.where(real, COTANGENTS[0], 0), np.where(real[..., 0], COTANGENTS[1], 0)
    _, clean = ring(cotangents)
    _, dirty = ring(cotangents, query=np.where(real, WITH_ALL_MASKS["query"], np.float32(np.nan)))
    assert_same_bits(dirty, clean)


# The way round.


def operations(jaxpr, times=1, inside=False):
    """Each equation with how often it runs, a `while` counted as once, and whether it is inside of one."""
    for equation in jaxpr.eqns:
        yield equation, times, inside
        runs = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for inner in inner_jaxprs(equation):
            yield from operations(inner, runs, inside or equation.primitive.name == "while")


def permutes(jaxpr):
    """How many arrays a program sends on."""
    return sum(n * len(x.invars) for x, n, _ in operations(jaxpr) if x.primitive.name == "ppermute")


def jaxprs(arrays, static):
    """The programs of a ring of eight devices, without and with gradients."""
    run = in_ring(arrays, static, mesh_of(8))
    ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), jax.eval_shape(run, arrays))
    fns = run, lambda arrays: jax.vjp(run, arrays)[1](ones)
    return [jax.make_jaxpr(fn)(arrays).jaxpr for fn in fns]


@parametrize(
    ("static", "hops", "hops_of_sums"),
    [(dict(local_window_size=(1, 1)), 3, 3)],  # the first hop is to the device before
    exhaustive=[
        (dict(is_causal=True), 7, 9),
        (dict(local_window_size=(2, 0)), 1, 2),  # to the next device, and home
        (dict(local_window_size=(0, 0)), 0, 0),
        (dict(local_window_size=(4, 0), causal_offset=-4), 3, 3),
    ],
    ids=str,
)
def test_keys_are_sent_as_far_as_a_window_reaches(static, hops, hops_of_sums, choose):
    choose(form="cpu")
    forward, both_ways = jaxprs(inputs(), static)
    assert permutes(forward) == 2 * hops
    assert permutes(both_ways) == 2 * (2 * hops + hops_of_sums)


def test_steps_in_which_a_device_sees_nothing_are_skipped():
    """All that is computed is in loops that run once or never, and nothing is sent in there, nor to all devices."""
    program = jaxprs(inputs(), dict(is_causal=True))[1]
    found = {(equation.primitive.name, inside) for equation, _, inside in operations(program)}
    assert not {"all_gather", "all_to_all", "psum", "psum_invariant"} & {name for name, _ in found}
    assert ("ppermute", False) in found
    assert ("ppermute", True) not in found
    assert ("dot_general", True) in found
    assert ("dot_general", False) not in found


# Zigzag.


def test_zigzag_is_balanced_and_undone():
    order = masksafe.zigzag(np.arange(24), 4, axis=0)
    assert isinstance(order, np.ndarray)
    work = (order.reshape(4, 6) + 1).sum(1)  # of causal pairs
    assert len(set(work)) == 1
    np.testing.assert_array_equal(masksafe.undo_zigzag(order, 4, axis=0), np.arange(24))
    x = normals(2, 3, 24, 5)
    turned = masksafe.zigzag(jnp.asarray(x), 4, axis=-2)
    np.testing.assert_array_equal(turned, x[:, :, order])
    np.testing.assert_array_equal(masksafe.undo_zigzag(turned, 4, axis=2), x)
    np.testing.assert_array_equal(masksafe.undo_zigzag(masksafe.zigzag(x, 12, axis=2), 12, axis=2), x)
    labels = np.array([2**40, -1], np.int64)
    assert masksafe.zigzag(labels, 1, axis=0)[0] == 2**40


@pytest.mark.exhaustive
def test_zigzag_of_arrays_on_a_mesh():
    mesh, x = mesh_of(4, kind=AxisType.Explicit), normals(2, 16, 3)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, IN_TIME))
        turned = masksafe.zigzag(placed, 4)
        np.testing.assert_array_equal(turned, masksafe.zigzag(x, 4))
        np.testing.assert_array_equal(masksafe.undo_zigzag(turned, 4), x)


def test_bad_arguments_of_zigzag():
    for arguments, error, text in (
        ((np.ones((2, 10)), 4), ValueError, r"x: got shape \(2, 10\); expected a multiple of 8"),
        ((np.ones(8), 4), ValueError, "axis: got value 1"),
        ((np.ones((2, 8)), 0), ValueError, "shards: got value 0"),
        ((np.ones((2, 8)), 2.0), TypeError, "shards: got type float"),
    ):
        for op in (masksafe.zigzag, masksafe.undo_zigzag):
            with pytest.raises(error, match=f"^{op.__name__}: {text}"):
                op(*arguments)


# Other derivatives, transformations and meshes.


def directions(arrays):
    return {name: jnp.asarray(normals(*np.shape(x), seed=(11, i))) for i, (name, x) in enumerate(arrays.items())}


def loss_of(fn):
    return lambda arrays: sum(jnp.sum(jnp.sin(x)) for x in fn(arrays))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("over", "check_vma"),
    [("forward mode", True), ("forward over reverse", False), ("reverse over reverse", True)],
)
def test_other_derivatives(over, check_vma):
    arrays, static = inputs(bias=normals(1, N, T, T, seed=3), sinks=SINKS), dict(local_window_size=(9, 2))
    arrays |= dict(slopes=SLOPES) if over == "forward mode" else {}  # with which other programs are twice as large
    along = directions(arrays)

    def product(fn):
        slope = jax.grad(loss_of(fn))
        if over == "forward mode":
            return jax.jit(lambda arrays: jax.jvp(fn, (arrays,), (along,)))
        if over == "forward over reverse":
            return jax.jit(lambda arrays: jax.jvp(slope, (arrays,), (along,))[1])
        return jax.jit(lambda arrays: jax.vjp(slope, arrays)[1](along))

    with masksafe.forward_mode() if over == "forward mode" else contextlib.nullcontext():
        actual = product(in_ring(arrays, static, mesh_of(4), check_vma))(arrays)
        assert_close(actual, product(lambda arrays: attend(arrays, static))(arrays), 1e-4)


@pytest.mark.exhaustive
def test_batch_and_heads_split_as_well():
    """A `score_mod` captures a table of the device's own samples."""
    mesh = mesh_of(2, 2, 2, names=("batch", "time", "heads"), kind=AxisType.Explicit)
    arrays = inputs(query_segment_ids=IDS, key_value_segment_ids=IDS, sinks=SINKS, table=normals(B, T, seed=9))
    arrays |= dict(bias=normals(1, N, T, 1, seed=3), scale=np.float32(0.7))
    static, of_time = dict(is_causal=True, local_window_size=6), P("batch", "time", "heads")
    specs = dict.fromkeys(("query", "key", "value"), of_time) | {"sinks": P("heads"), "bias": P(None, "heads", "time")}
    specs |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), P("batch", "time")) | {"scale": P()}
    split = in_ring(arrays, static, mesh, True, specs | {"table": P("batch")}, of_time)
    with jax.set_mesh(mesh):
        placed = {name: place(mesh, specs.get(name, P("batch")), x)[0] for name, x in arrays.items()}
        assert_as_on_one_device(split, arrays, static, placed, place(mesh, of_time, *COTANGENTS))


@pytest.mark.exhaustive
@parametrize("kind", [AxisType.Explicit], exhaustive=[AxisType.Auto])
def test_time_alone_is_manual(kind):
    """`jax.shard_map` over the axis of time, while the compiler or the types split the batch."""
    mesh, in_both = mesh_of(2, 4, names=("batch", "time"), kind=kind), P("batch", "time")
    arrays, static = inputs(), dict(is_causal=True)
    with jax.set_mesh(mesh):
        placed = dict(zip(arrays, place(mesh, in_both, *arrays.values()), strict=True))
        split = in_ring(arrays, static, mesh, axis_names={"time"})
        assert_as_on_one_device(split, arrays, static, placed, place(mesh, in_both, *COTANGENTS))


def test_score_mod_beside_explicit_axes_is_refused():
    with jax.set_mesh(mesh_of(2, 4, names=("batch", "time"), kind=AxisType.Explicit)):
        placed = [jax.device_put(x, P("batch", "time")) for x in random_inputs(B, T, T, N, K)]
        local = lambda *args: attention(*args, score_mod=lambda x, *pair: x, axis_name="time")  # noqa: E731
        split = jax.shard_map(local, in_specs=IN_TIME, out_specs=IN_TIME, axis_names={"time"})
        with pytest.raises(ValueError, match=r"^dot_product_attention: score_mod: got a function"):
            jax.eval_shape(split, *placed)


@pytest.mark.exhaustive
def test_axes_in_another_order_than_the_mesh():
    """The first of the names is the slowest, as in a `PartitionSpec`."""
    arrays, static, names = inputs(T=24, S=8), dict(local_window_size=(3, 4)), ("y", "x")
    mesh, in_time = mesh_of(2, 4, names=("x", "y")), P(None, names)
    split = in_ring(arrays, static, mesh, specs=dict.fromkeys(arrays, in_time), out_specs=in_time, axis_name=names)
    assert_as_on_one_device(split, arrays, static)


# Arguments.

BAD_ARGUMENTS = [
    (dict(axis_name="rows"), ValueError, "axis_name: got value 'rows'; expected an axis of the mesh"),
    (dict(mask=np.ones((1, 1, 4, 4), bool)), ValueError, r"mask: got shape \(1, 1, 4, 4\); .* keys of all devices"),
    (dict(bias=np.ones((16, 16))), ValueError, r"bias: got shape \(16, 16\); expected"),
    (dict(query_positions=np.arange(16)), ValueError, r"query_positions: got shape"),
    (
        dict(query_segment_ids=np.ones((1, 4), int), key_value_segment_ids=np.ones((1, 16), int)),
        ValueError,
        r"key_value_segment_ids: got shape \(1, 16\)",
    ),
]


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(case):
    arguments, error, text = case
    fn = functools.partial(attention, **(dict(axis_name="time") | arguments))
    split = jax.shard_map(fn, mesh=mesh_of(4), in_specs=IN_TIME, out_specs=IN_TIME)
    with pytest.raises(error, match=f"^dot_product_attention: {text}"):
        split(*random_inputs(B, T, T, N, K))


def test_an_axis_outside_of_shard_map_is_refused():
    with pytest.raises(ValueError, match="axis_name: got value 'time'; expected an axis of the mesh"):
        attention(*random_inputs(), axis_name="time")
