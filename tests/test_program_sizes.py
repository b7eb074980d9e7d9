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
import jax
import pytest
from measure import PASSES
from operations import name_of, operations

SLACK = 1.07  # a bound in units of the count
COUNTS = "--counts"  # the option that prints, as JSON, what this Python's JAX counts

# op, mask: the most operations of the value, and of the value with its gradient
BOUNDS = {
    ("integer", "none"): (106, 170),
    ("integer", "rows"): (155, 196),
    ("integer", "classes"): (163, 268),
    ("one-hot", "none"): (89, 183),
    ("one-hot", "rows"): (112, 217),
    ("one-hot", "classes"): (109, 209),
    ("linear", "none"): (141, 259),
    ("linear", "60 % of tokens"): (200, 345),
    ("log p", "none"): (157, 344),
    ("log p", "60 % of tokens"): (221, 416),
    ("log p, entropy", "none"): (257, 521),
    ("log p, entropy", "60 % of tokens"): (328, 594),
    ("attention, short", "none"): (100, 320),
    ("attention, short", "causal"): (116, 347),
    ("attention, short", "half padding"): (128, 361),
    ("attention, short", "8 segments"): (112, 347),
    ("attention, short", "window"): (127, 364),
    ("attention, long", "none"): (238, 642),
    ("attention, long", "causal"): (284, 718),
    ("attention, long", "half padding"): (298, 735),
    ("attention, long", "8 segments"): (286, 727),
    ("attention, long", "window"): (302, 751),
    ("layer norm", "none"): (57, 185),
    ("layer norm", "rows"): (134, 284),
    ("layer norm", "elements"): (132, 281),
    ("RMS norm", "none"): (30, 115),
    ("RMS norm", "rows"): (80, 180),
    ("RMS norm", "elements"): (78, 177),
    ("batch norm", "none"): (115, 204),
    ("batch norm", "rows"): (136, 246),
    ("group norm", "none"): (227, 349),
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
    ("var", "none"): (132, 175),
    ("var", "elements"): (134, 196),
    ("segment_sum", "none"): (9, 26),
    ("segment_sum", "rows"): (17, 34),
    ("segment_mean", "none"): (30, 50),
    ("segment_mean", "rows"): (38, 57),
    ("segment_var", "none"): (97, 152),
    ("segment_var", "rows"): (104, 160),
    ("segment_max", "none"): (14, 74),
    ("segment_max", "rows"): (22, 82),
    ("segment_min", "none"): (14, 74),
    ("segment_min", "rows"): (22, 82),
    ("segment_logsumexp", "none"): (39, 73),
    ("segment_logsumexp", "rows"): (47, 81),
    ("segment_softmax", "none"): (44, 89),
    ("segment_softmax", "rows"): (52, 97),
    ("segment_log_softmax", "none"): (67, 104),
    ("segment_log_softmax", "rows"): (74, 112),
    ("segment_standardize", "none"): (142, 241),
    ("segment_standardize", "rows"): (149, 249),
    ("load_balancing_loss", "none"): (69, 81),
    ("load_balancing_loss", "60 % of tokens"): (79, 95),
    ("router_z_loss", "none"): (58, 80),
    ("router_z_loss", "60 % of tokens"): (96, 139),
    ("info_nce_loss", "none"): (235, 417),
    ("info_nce_loss", "60 % of rows"): (257, 456),
    ("sigmoid_contrastive_loss", "none"): (159, 334),
    ("sigmoid_contrastive_loss", "60 % of rows"): (181, 374),
    ("mask_where", "elements"): (6, 12),
    ("apply_where", "elements"): (38, 52),
    ("standardize", "none"): (51, 154),
    ("standardize", "elements"): (121, 243),
    ("var_mean", "none"): (148, 178),
    ("var_mean", "elements"): (148, 201),
    ("squared_error", "none"): (6, 11),
    ("squared_error", "masked"): (14, 27),
    ("l2_loss", "none"): (9, 18),
    ("l2_loss", "masked"): (18, 34),
    ("huber_loss", "none"): (18, 55),
    ("huber_loss", "masked"): (30, 75),
    ("log_cosh", "none"): (20, 55),
    ("log_cosh", "masked"): (28, 71),
    ("cosine_similarity", "none"): (55, 116),
    ("cosine_similarity", "masked"): (110, 189),
    ("cosine_distance", "none"): (58, 120),
    ("cosine_distance", "masked"): (117, 202),
    ("sigmoid_binary_cross_entropy", "none"): (49, 70),
    ("sigmoid_binary_cross_entropy", "masked"): (57, 86),
    ("sigmoid_focal_loss", "none"): (146, 301),
    ("sigmoid_focal_loss", "masked"): (159, 321),
    ("hinge_loss", "none"): (11, 32),
    ("hinge_loss", "masked"): (20, 48),
    ("perceptron_loss", "none"): (9, 29),
    ("perceptron_loss", "masked"): (18, 45),
    ("multiclass_hinge_loss", "none"): (106, 160),
    ("multiclass_hinge_loss", "masked"): (136, 204),
    ("multiclass_perceptron_loss", "none"): (100, 147),
    ("multiclass_perceptron_loss", "masked"): (132, 193),
    ("multiclass_sparsemax_loss", "none"): (207, 324),
    ("multiclass_sparsemax_loss", "masked"): (237, 368),
    ("sparsemax_loss", "none"): (36, 72),
    ("sparsemax_loss", "masked"): (47, 88),
    ("safe_softmax_cross_entropy", "none"): (89, 189),
    ("poly_loss_cross_entropy", "none"): (107, 231),
    ("poly_loss_cross_entropy", "masked"): (129, 269),
    ("ranking_softmax_loss", "none"): (107, 175),
    ("kl_divergence", "none"): (58, 84),
    ("kl_divergence", "masked"): (70, 110),
    ("generalized_kl_divergence", "none"): (61, 90),
    ("generalized_kl_divergence", "masked"): (73, 120),
    ("convex_kl_divergence", "none"): (61, 90),
    ("convex_kl_divergence", "masked"): (73, 120),
    ("kl_divergence_with_log_targets", "none"): (54, 64),
    ("kl_divergence_with_log_targets", "masked"): (66, 90),
    ("binary_dice_loss", "none"): (60, 100),
    ("binary_dice_loss", "masked"): (72, 120),
    ("dice_loss", "none"): (95, 157),
    ("dice_loss", "masked"): (107, 178),
    ("multiclass_generalized_dice_loss", "none"): (131, 196),
    ("ctc_loss", "none"): (401, 790),
    ("ctc_loss", "masked"): (433, 822),
    ("ctc_loss_with_forward_probs", "none"): (419, 820),
    ("ntxent", "none"): (154, 273),
    ("triplet_margin_loss", "none"): (47, 99),
    ("triplet_margin_loss", "masked"): (106, 189),
    ("smooth_labels", "none"): (14, 18),
    ("smooth_labels", "masked"): (28, 37),
    ("make_fenchel_young_loss", "none"): (26, 43),
    ("make_fenchel_young_loss", "masked"): (41, 70),
    ("linear forward divergence", "none"): (113, 225),
    ("linear forward divergence", "75 % of tokens"): (179, 325),
    ("linear reverse divergence", "none"): (113, 233),
    ("linear jensen-shannon divergence", "none"): (159, 305),
}

TOO_LARGE = """
{op}, mask: {mask}: the {what} has {count} operations, of which {bound} are allowed.
Write a smaller program: `examples/benchmarks/compiled.py --target cpu --only "{work}"` shows it beside its peer.
Or raise the bound in BOUNDS, and say beside it or in the commit what the operations buy."""
CASES = {(name_of(case), case.mask): case for of_name in compiled.on_cpu().values() for case in of_name}


def count(case, what):
    step, args = compiled.step_of(case, "masksafe", what)
    return operations(step, *args)


@pytest.fixture(autouse=True)
def no_platform_of_the_process(monkeypatch):
    """What a program does is decided when it is lowered: no op asks for the platform of the process."""
    for name in ("default_backend", "devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *_, **__: pytest.fail("an op asks for the platform of the process"))


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
