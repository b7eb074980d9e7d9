"""No program grows unseen: the operations that each op hands to XLA are bounded, for its value and with its gradient.

Nothing is compiled, and the counts are the same on any machine. A bound is 7 % above the larger of the counts with the
oldest and the newest JAX. The table, for this JAX and that of other Pythons, is printed by

    PYTHONPATH=.:examples/benchmarks python tests/test_program_sizes.py [ANOTHER_PYTHON ...]

What it prints takes the place of BOUNDS when programs have become smaller, or when one has to be larger.
"""

import json
import math
import subprocess
import sys

import compiled
import pytest
from measure import PASSES
from operations import name_of, operations

SLACK = 1.07  # a bound in units of the count
COUNTS = "--counts"  # the option that prints, as JSON, what this Python's JAX counts

# op, mask: the most operations of the value, and of the value with its gradient
BOUNDS = {
    ("integer", "none"): (106, 187),
    ("integer", "rows"): (174, 280),
    ("integer", "classes"): (182, 287),
    ("one-hot", "none"): (103, 197),
    ("one-hot", "rows"): (131, 236),
    ("one-hot", "classes"): (128, 228),
    ("linear", "none"): (266, 481),
    ("linear", "60 % of tokens"): (564, 923),
    ("log p", "none"): (281, 1129),
    ("log p", "60 % of tokens"): (586, 1412),
    ("log p, entropy", "none"): (349, 1378),
    ("log p, entropy", "60 % of tokens"): (683, 1683),
    ("attention, short", "none"): (90, 311),
    ("attention, short", "causal"): (106, 338),
    ("attention, short", "half padding"): (118, 351),
    ("attention, short", "8 segments"): (102, 338),
    ("attention, short", "window"): (117, 355),
    ("attention, long", "none"): (221, 625),
    ("attention, long", "causal"): (267, 701),
    ("attention, long", "half padding"): (281, 717),
    ("attention, long", "8 segments"): (269, 710),
    ("attention, long", "window"): (285, 733),
    ("layer norm", "none"): (67, 248),
    ("layer norm", "rows"): (148, 375),
    ("layer norm", "elements"): (146, 372),
    ("RMS norm", "none"): (32, 155),
    ("RMS norm", "rows"): (94, 248),
    ("RMS norm", "elements"): (91, 244),
    ("batch norm", "none"): (112, 197),
    ("batch norm", "rows"): (136, 246),
    ("group norm", "none"): (229, 351),
    ("group norm", "rows"): (254, 400),
    ("softmax", "none"): (20, 36),
    ("softmax", "elements"): (43, 66),
    ("log_softmax", "none"): (52, 84),
    ("log_softmax", "elements"): (66, 104),
    ("logsumexp", "none"): (38, 48),
    ("logsumexp", "elements"): (57, 82),
    ("mean", "none"): (21, 27),
    ("mean", "elements"): (32, 42),
    ("sum", "none"): (6, 8),
    ("sum", "elements"): (10, 17),
    ("var", "none"): (179, 227),
    ("var", "elements"): (148, 210),
    ("mask_where", "elements"): (6, 12),
    ("apply_where", "elements"): (38, 52),
    ("standardize", "none"): (60, 195),
    ("standardize", "elements"): (135, 290),
    ("var_mean", "none"): (192, 231),
    ("var_mean", "elements"): (162, 214),
    ("squared_error", "none"): (6, 11),
    ("squared_error", "masked"): (14, 27),
    ("l2_loss", "none"): (9, 18),
    ("l2_loss", "masked"): (18, 34),
    ("huber_loss", "none"): (18, 55),
    ("huber_loss", "masked"): (30, 75),
    ("log_cosh", "none"): (33, 112),
    ("log_cosh", "masked"): (41, 128),
    ("cosine_similarity", "none"): (240, 292),
    ("cosine_similarity", "masked"): (327, 392),
    ("cosine_distance", "none"): (243, 296),
    ("cosine_distance", "masked"): (334, 405),
    ("sigmoid_binary_cross_entropy", "none"): (49, 70),
    ("sigmoid_binary_cross_entropy", "masked"): (57, 86),
    ("sigmoid_focal_loss", "none"): (146, 301),
    ("sigmoid_focal_loss", "masked"): (159, 321),
    ("hinge_loss", "none"): (11, 32),
    ("hinge_loss", "masked"): (20, 48),
    ("perceptron_loss", "none"): (9, 29),
    ("perceptron_loss", "masked"): (18, 45),
    ("multiclass_hinge_loss", "none"): (116, 180),
    ("multiclass_hinge_loss", "masked"): (151, 229),
    ("multiclass_perceptron_loss", "none"): (110, 167),
    ("multiclass_perceptron_loss", "masked"): (145, 217),
    ("multiclass_sparsemax_loss", "none"): (244, 438),
    ("multiclass_sparsemax_loss", "masked"): (282, 513),
    ("sparsemax_loss", "none"): (36, 72),
    ("sparsemax_loss", "masked"): (47, 88),
    ("safe_softmax_cross_entropy", "none"): (103, 203),
    ("poly_loss_cross_entropy", "none"): (127, 287),
    ("poly_loss_cross_entropy", "masked"): (149, 331),
    ("ranking_softmax_loss", "none"): (120, 226),
    ("kl_divergence", "none"): (72, 98),
    ("kl_divergence", "masked"): (89, 129),
    ("generalized_kl_divergence", "none"): (75, 104),
    ("generalized_kl_divergence", "masked"): (93, 140),
    ("convex_kl_divergence", "none"): (75, 104),
    ("convex_kl_divergence", "masked"): (93, 140),
    ("kl_divergence_with_log_targets", "none"): (68, 78),
    ("kl_divergence_with_log_targets", "masked"): (85, 110),
    ("binary_dice_loss", "none"): (60, 100),
    ("binary_dice_loss", "masked"): (72, 120),
    ("dice_loss", "none"): (95, 157),
    ("dice_loss", "masked"): (107, 178),
    ("multiclass_generalized_dice_loss", "none"): (131, 196),
    ("ctc_loss", "none"): (401, 790),
    ("ctc_loss", "masked"): (433, 822),
    ("ctc_loss_with_forward_probs", "none"): (419, 820),
    ("ntxent", "none"): (176, 274),
    ("triplet_margin_loss", "none"): (47, 99),
    ("triplet_margin_loss", "masked"): (131, 213),
    ("smooth_labels", "none"): (14, 18),
    ("smooth_labels", "masked"): (28, 37),
    ("make_fenchel_young_loss", "none"): (26, 43),
    ("make_fenchel_young_loss", "masked"): (41, 70),
    ("linear forward divergence", "none"): (409, 624),
    ("linear forward divergence", "75 % of tokens"): (804, 1186),
    ("linear reverse divergence", "none"): (410, 583),
    ("linear jensen-shannon divergence", "none"): (615, 881),
}

TOO_LARGE = """
{op}, mask: {mask}: the {what} has {count} operations, of which {bound} are allowed.
Write a smaller program: `examples/benchmarks/compiled.py --target cpu --only "{work}"` shows it beside its peer.
Or raise the bound in BOUNDS, and say beside it or in the commit what the operations buy."""
CASES = {(name_of(case), case.mask): case for of_name in compiled.on_cpu().values() for case in of_name}


def count(case, what):
    step, args = compiled.step_of(case, "masksafe", what)
    return operations(step, *args)


@pytest.mark.parametrize("key", [pytest.param(key, id="-".join(key).replace(" ", "_")) for key in CASES])
def test_a_program_is_no_larger_than_its_bound(key):
    case = CASES[key]
    for what, bound in zip(PASSES, BOUNDS[key], strict=True):
        found = count(case, what)
        about = {"op": key[0], "mask": key[1], "work": case.work, "what": what, "count": found, "bound": bound}
        assert found <= bound, TOO_LARGE.format(**about)


def test_every_op_has_a_bound():
    assert set(BOUNDS) == set(CASES), "print the table anew: the docstring of this file has the command"


# Printing the table


def counts():
    return [[count(case, what) for what in PASSES] for case in CASES.values()]


def counts_of(python):
    """What another Python, which has another JAX, counts."""
    return json.loads(subprocess.check_output([python, __file__, COUNTS], text=True).splitlines()[-1])


def bound_of(found):
    return max(found + 1, math.ceil(SLACK * found))


def print_table(pythons):
    everywhere = [counts(), *map(counts_of, pythons)]
    print("BOUNDS = {")
    for (op, mask), *found in zip(CASES, *everywhere, strict=True):
        value, gradient = (bound_of(max(of_pass)) for of_pass in zip(*found, strict=True))
        print(f'    ("{op}", "{mask}"): ({value}, {gradient}),')
    print("}")


if __name__ == "__main__":
    if COUNTS in sys.argv:
        print(json.dumps(counts()))
    else:
        print_table(sys.argv[1:])
