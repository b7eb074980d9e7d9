"""Rule 5. A NaN or an infinity that is not masked shows in every output that depends on it, and in no other row."""

import jax
import jax.numpy as jnp
import numpy as np
from program import assert_same_bits, directions_of, each_kind, each_op, function_of_floats, of_definition, run
from table import OPS
from tiers import parametrize

from masksafe.testing import nonfinite_report


def elements_of_rows(op):
    """Of each float that belongs to rows: its place among the floats, that among the arguments, and an element left."""
    for k, i in enumerate(op.floats):
        if op.kinds[i] in ("row", "of row"):
            yield k, i, tuple(np.argwhere(~op.hides(op.where)[i])[0])


def with_number(arrays, i, at, number):
    """The arrays, in one of which a number stands in another's place."""
    changed = np.array(arrays[i])
    changed[at] = number
    return (*arrays[:i], changed, *arrays[i + 1 :])


@each_op(by_weights=True)
@parametrize("bad", [np.nan], exhaustive=[np.inf, -np.inf])
def test_a_bad_element_shows_in_its_row_and_in_no_other(key, bad):
    """An infinity shows where it does in the definition, not as a softmax's logit of -inf, say; in attention always."""
    op, clean = OPS[key], run(key)
    of_rows = [k for k, *_ in elements_of_rows(op)]
    for _, i, at in elements_of_rows(op):
        args = with_number(op.args, i, at, bad)
        dirty = run(key, args=args)
        rows = (
            [out[at[0]] if op.has_rows else out for out in r] for r in (dirty.outputs, of_definition(key, args=args))
        )
        shows, is_expected = (any(not np.isfinite(out).all() for out in row) for row in rows)
        # A masked class has a kernel of 0, of which an infinite feature makes NaN.
        assert shows == (is_expected or op.name == "dot_product_attention" or key.endswith("a masked class"))
        if op.has_rows:
            assert_same_bits(*([np.delete(out, at[0], 0) for out in r.outputs] for r in (dirty, clean)))
            assert_same_bits(*([np.delete(r.gradients[k], at[0], 0) for k in of_rows] for r in (dirty, clean)))
        # Nor in what is masked in its row, nor there in derivatives by what all rows share.
        masked, of_all = ~op.where[at[0]], [k for k, number in enumerate(op.floats) if op.kinds[number] == "along"]
        elements = ([out[at[0]][masked] for out in r.outputs if out.shape == op.where.shape] for r in (dirty, clean))
        assert_same_bits(*elements)
        for derivatives in ("gradients", "forward_over_reverse"):
            assert_same_bits(*([getattr(r, derivatives)[k][masked] for k in of_all] for r in (dirty, clean)))


@each_op()
def test_a_bad_tangent_shows_in_its_row_and_in_no_other(key):
    """In the tangents of the outputs, unless they do not depend on the element; and in those of the gradients."""
    op, clean = OPS[key], run(key)
    of_rows = [k for k, *_ in elements_of_rows(op)]
    for k, _, at in elements_of_rows(op):
        dirty = run(key, directions=with_number(directions_of(key), k, at, np.nan))
        rows = [out[at[0]] if op.has_rows else out for out in dirty.tangents]
        assert any(np.isnan(out).any() for out in rows) or clean.gradients[k][at] == 0
        if op.has_rows:
            assert_same_bits(*([np.delete(out, at[0], 0) for out in r.tangents] for r in (dirty, clean)))
            slopes = [[np.delete(r.forward_over_reverse[n], at[0], 0) for n in of_rows] for r in (dirty, clean)]
            assert_same_bits(*slopes)


@each_kind()
@parametrize("grad", [False], exhaustive=[True], ids=["value", "gradient"])
def test_a_report_blames_a_nan_in_front_of_an_op_on_its_line(grad, key):
    op, numbers = OPS[key], [*enumerate(OPS[key].floats)]
    for k, number in numbers if op.by_default and not grad else [numbers[-1 if grad else 0]]:
        outputs, floats = function_of_floats(op, op.where, op.args)

        def fn(x, start):
            made = jnp.log(x)
            return outputs(*floats[:k], made + start, *floats[k + 1 :])  # noqa: B023

        x, start = np.exp(floats[k]), np.zeros_like(floats[k])
        made_at, given_at = map(tuple, np.argwhere(~op.hides(op.where)[number])[[0, -1]].tolist())
        is_given = made_at != given_at and op.kinds[number] in ("row", "of row")
        x[made_at], start[given_at] = -1, np.nan if is_given else 0
        report = nonfinite_report(fn, x, start, grad=grad)
        if grad and np.isfinite(jax.grad(lambda x: sum(map(jnp.sum, fn(x, start))))(x)).all():  # noqa: B023
            assert not report
            continue
        assert [(source.primitive, source.index) for source in report.sources] == [("log", made_at)]
        assert report.first.place.startswith(f"{__file__}:{fn.__code__.co_firstlineno + 1}, in ")
        assert [text.split("index ")[1] for text in report.arguments] == [str(given_at)] * is_given
        assert "log" not in [source.primitive for source in report.harmless]
