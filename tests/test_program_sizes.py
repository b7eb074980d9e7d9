"""No program grows unseen: the operations that each op hands to XLA are bounded, for its value and with its gradient.

Nothing is compiled, and the counts are the same on any machine. A bound is 7 % above the larger of the counts with the
oldest and the newest JAX. The table, for this JAX and that of other Pythons, is printed by

    PYTHONPATH=.:examples/benchmarks python tests/test_program_sizes.py [ANOTHER_PYTHON ...]

What it prints takes the place of BOUNDS, and `ruff format` lays it out, when programs have become smaller, or when one
has to be larger.
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

# The most operations of an op, of the value and of the value with its gradient, for each mask
BOUNDS = {
    "integer": {"none": (102, 175), "rows": (128, 206), "classes": (148, 226)},
    "one-hot": {"none": (102, 162), "rows": (127, 192), "classes": (125, 190)},
    "linear": {"none": (142, 281), "60 % of tokens": (196, 361)},
    "log p": {"none": (145, 349), "60 % of tokens": (214, 424)},
    "log p, entropy": {"none": (175, 423), "60 % of tokens": (253, 509)},
    "attention, short": {
        "none": (122, 234),
        "causal": (159, 279),
        "half padding": (187, 332),
        "8 segments": (171, 304),
        "window": (176, 304),
    },
    "attention, long": {
        "none": (238, 650),
        "causal": (265, 705),
        "half padding": (285, 728),
        "8 segments": (292, 751),
        "window": (272, 720),
    },
    "layer norm": {"none": (81, 252), "rows": (91, 242), "elements": (124, 302)},
    "RMS norm": {"none": (49, 150), "rows": (59, 166), "elements": (85, 214)},
    "batch norm": {"none": (58, 131), "rows": (104, 216)},
    "group norm": {"none": (111, 272), "rows": (159, 371)},
    "softmax": {"none": (22, 30), "elements": (28, 43)},
    "log_softmax": {"none": (23, 39), "elements": (29, 54)},
    "logsumexp": {"none": (49, 67), "elements": (53, 78)},
    "mean": {"none": (11, 20), "elements": (32, 42)},
    "sum": {"none": (6, 8), "elements": (10, 17)},
    "var": {"none": (65, 99), "elements": (94, 146)},
    "segment_sum": {"none": (9, 26), "rows": (17, 34)},
    "segment_mean": {"none": (30, 50), "rows": (38, 57)},
    "segment_var": {"none": (101, 155), "rows": (109, 162)},
    "segment_max": {"none": (14, 84), "rows": (22, 91)},
    "segment_min": {"none": (14, 84), "rows": (22, 91)},
    "segment_logsumexp": {"none": (39, 73), "rows": (47, 81)},
    "segment_softmax": {"none": (44, 87), "rows": (52, 95)},
    "segment_log_softmax": {"none": (51, 95), "rows": (58, 102)},
    "segment_standardize": {"none": (145, 244), "rows": (152, 252)},
    "load_balancing_loss": {"none": (69, 81), "60 % of tokens": (79, 95)},
    "router_z_loss": {"none": (58, 89), "60 % of tokens": (85, 126)},
    "info_nce_loss": {"none": (243, 427), "60 % of rows": (278, 478)},
    "sigmoid_contrastive_loss": {"none": (149, 327), "60 % of rows": (183, 377)},
    "mask_where": {"elements": (6, 12)},
    "apply_where": {"elements": (38, 52)},
    "standardize": {"none": (74, 211), "elements": (112, 250)},
    "var_mean": {"none": (78, 100), "elements": (106, 147)},
    "squared_error": {"none": (6, 19), "masked": (14, 35)},
    "l2_loss": {"none": (9, 25), "masked": (18, 41)},
    "huber_loss": {"none": (18, 63), "masked": (28, 81)},
    "log_cosh": {"none": (20, 63), "masked": (28, 79)},
    # With jax 0.10, whose compiler has no library of kernels, in blocks: a sixth of the time of large arrays.
    "cosine_similarity": {"none": (79, 193), "masked": (101, 236)},
    "cosine_distance": {"none": (82, 197), "masked": (104, 240)},
    "sigmoid_binary_cross_entropy": {"none": (49, 76), "masked": (57, 86)},
    "sigmoid_focal_loss": {"none": (146, 301), "masked": (157, 319)},
    "hinge_loss": {"none": (11, 39), "masked": (20, 55)},
    "perceptron_loss": {"none": (9, 37), "masked": (18, 53)},
    "multiclass_hinge_loss": {"none": (107, 159), "masked": (143, 208)},
    "multiclass_perceptron_loss": {"none": (98, 143), "masked": (133, 192)},
    "multiclass_sparsemax_loss": {"none": (202, 281), "masked": (236, 323)},
    "sparsemax_loss": {"none": (40, 86), "masked": (47, 102)},
    # Soft labels have a form of one kernel on a CPU, with its repair: 0.6 of the time of blocks of rows.
    "safe_softmax_cross_entropy": {"none": (136, 362)},
    "poly_loss_cross_entropy": {"none": (166, 417), "masked": (201, 469)},
    "ranking_softmax_loss": {"none": (145, 379)},
    "kl_divergence": {"none": (59, 93), "masked": (72, 124)},
    "generalized_kl_divergence": {"none": (63, 99), "masked": (75, 122)},
    "convex_kl_divergence": {"none": (63, 99), "masked": (75, 122)},
    "kl_divergence_with_log_targets": {"none": (55, 72), "masked": (68, 103)},
    "binary_dice_loss": {"none": (60, 117), "masked": (69, 144)},
    "dice_loss": {"none": (97, 168), "masked": (111, 198)},
    "multiclass_generalized_dice_loss": {"none": (133, 208)},
    "ctc_loss": {"none": (341, 707), "masked": (373, 739)},
    "ctc_loss_with_forward_probs": {"none": (359, 737)},
    "ntxent": {"none": (146, 269)},
    "triplet_margin_loss": {"none": (86, 165), "masked": (110, 211)},
    "smooth_labels": {"none": (14, 18)},
    "make_fenchel_young_loss": {"none": (60, 94), "masked": (89, 142)},
    "linear forward divergence": {"none": (118, 233), "75 % of tokens": (178, 325)},
    "linear reverse divergence": {"none": (118, 240)},
    "linear jensen-shannon divergence": {"none": (170, 318)},
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


@pytest.mark.parametrize("key", CASES, ids=["-".join(key).replace(" ", "_") for key in CASES])
def test_a_program_is_no_larger_than_its_bound(key):
    case = CASES[key]
    for what, bound in zip(PASSES, BOUNDS[key[0]][key[1]], strict=True):
        found = count(case, what)
        about = {"op": key[0], "mask": key[1], "work": case.work, "what": what, "count": found, "bound": bound}
        assert found <= bound, TOO_LARGE.format(**about)


def test_every_op_has_a_bound():
    bounded = {(op, mask) for op, of_masks in BOUNDS.items() for mask in of_masks}
    assert bounded == set(CASES), "print the table anew: the docstring of this file has the command"


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
    bounds = {}
    for (op, mask), *found in zip(CASES, *everywhere, strict=True):
        bounds.setdefault(op, {})[mask] = tuple(bound_of(max(of_pass)) for of_pass in zip(*found, strict=True))
    print("BOUNDS = {", *(f"    {op!r}: {of_masks}," for op, of_masks in bounds.items()), "}", sep="\n")


if __name__ == "__main__":
    if COUNTS in sys.argv:
        print(json.dumps(counts()))
    else:
        print_table(sys.argv[1:])
