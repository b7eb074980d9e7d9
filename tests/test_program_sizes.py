"""No program grows unseen: the operations that each op hands to XLA are bounded, for its value and with its gradient.

Nothing is compiled, and the counts are the same on any machine. A bound is 10 % above the larger of the counts with the
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
from tiers import parametrize

SLACK = 1.1  # a bound in units of the count
COUNTS = "--counts"  # the option that prints, as JSON, what this Python's JAX counts

# The most operations of an op, of the value and of the value with its gradient, for each mask
BOUNDS = {
    "integer": {"none": (101, 175), "rows": (127, 207), "classes": (148, 225)},
    "one-hot": {"none": (105, 172), "rows": (130, 203), "classes": (128, 201)},
    "linear": {"none": (141, 284), "60 % of tokens": (197, 367)},
    "log p": {"none": (145, 355), "60 % of tokens": (216, 432)},
    "log p, entropy": {"none": (175, 431), "60 % of tokens": (256, 519)},
    "attention, short": {
        "none": (126, 240),
        "causal": (162, 284),
        "half padding": (192, 341),
        "8 segments": (175, 313),
        "window": (179, 308),
    },
    "attention, long": {
        "none": (251, 689),
        "causal": (297, 760),
        "half padding": (311, 776),
        "8 segments": (317, 799),
        "window": (305, 775),
    },
    "layer norm": {"none": (83, 259), "rows": (94, 249), "elements": (125, 308)},
    "RMS norm": {"none": (50, 154), "rows": (61, 171), "elements": (85, 218)},
    "batch norm": {"none": (60, 135), "rows": (105, 219)},
    "group norm": {"none": (114, 383), "rows": (161, 379)},
    "softmax": {"none": (22, 31), "elements": (29, 44)},
    "log_softmax": {"none": (24, 40), "elements": (30, 56)},
    "logsumexp": {"none": (50, 69), "elements": (54, 80)},
    "mean": {"none": (11, 20), "elements": (32, 43)},
    "sum": {"none": (6, 8), "elements": (10, 17)},
    "var": {"none": (66, 102), "elements": (96, 150)},
    "segment_sum": {"none": (9, 27), "rows": (17, 35)},
    "segment_mean": {"none": (31, 51), "rows": (39, 59)},
    "segment_var": {"none": (105, 160), "rows": (113, 168)},
    "segment_max": {"none": (15, 86), "rows": (22, 94)},
    "segment_min": {"none": (15, 86), "rows": (22, 94)},
    "segment_logsumexp": {"none": (40, 75), "rows": (48, 83)},
    "segment_softmax": {"none": (46, 90), "rows": (53, 97)},
    "segment_log_softmax": {"none": (52, 97), "rows": (60, 105)},
    "segment_standardize": {"none": (153, 256), "rows": (161, 263)},
    "load_balancing_loss": {"none": (68, 87), "60 % of tokens": (77, 102)},
    "router_z_loss": {"none": (60, 92), "60 % of tokens": (87, 129)},
    "info_nce_loss": {"none": (250, 425), "60 % of rows": (285, 477)},
    "sigmoid_contrastive_loss": {"none": (153, 327), "60 % of rows": (189, 379)},
    "mask_where": {"elements": (6, 13)},
    "apply_where": {"elements": (39, 53)},
    "standardize": {"none": (76, 217), "elements": (113, 255)},
    "var_mean": {"none": (80, 103), "elements": (109, 151)},
    "squared_error": {"none": (6, 19), "masked": (15, 36)},
    "l2_loss": {"none": (9, 26), "masked": (18, 42)},
    "huber_loss": {"none": (18, 64), "masked": (29, 83)},
    "log_cosh": {"none": (20, 64), "masked": (29, 81)},
    # With jax 0.10, whose compiler has no library of kernels, in blocks: a sixth of the time of large arrays.
    "cosine_similarity": {"none": (86, 199), "masked": (111, 243)},
    "cosine_distance": {"none": (90, 203), "masked": (114, 247)},
    "sigmoid_binary_cross_entropy": {"none": (50, 79), "masked": (59, 95)},
    "sigmoid_focal_loss": {"none": (150, 316), "masked": (161, 335)},
    "hinge_loss": {"none": (11, 40), "masked": (20, 57)},
    "perceptron_loss": {"none": (9, 38), "masked": (18, 54)},
    "multiclass_hinge_loss": {"none": (106, 163), "masked": (142, 214)},
    "multiclass_perceptron_loss": {"none": (96, 147), "masked": (132, 197)},
    "multiclass_sparsemax_loss": {"none": (218, 289), "masked": (250, 332)},
    "sparsemax_loss": {"none": (41, 88), "masked": (50, 105)},
    # Soft labels have a form of one kernel on a CPU, with its repair: 0.6 of the time of blocks of rows.
    "safe_softmax_cross_entropy": {"none": (143, 391)},
    "poly_loss_cross_entropy": {"none": (174, 448), "masked": (210, 502)},
    "ranking_softmax_loss": {"none": (152, 409)},
    "kl_divergence": {"none": (61, 95), "masked": (74, 127)},
    "generalized_kl_divergence": {"none": (64, 102), "masked": (77, 134)},
    "convex_kl_divergence": {"none": (64, 102), "masked": (77, 134)},
    "kl_divergence_with_log_targets": {"none": (57, 74), "masked": (70, 106)},
    "binary_dice_loss": {"none": (61, 120), "masked": (70, 148)},
    "dice_loss": {"none": (98, 173), "masked": (113, 204)},
    "multiclass_generalized_dice_loss": {"none": (138, 214)},
    "ctc_loss": {"none": (346, 731), "masked": (379, 764)},
    "ctc_loss_with_forward_probs": {"none": (365, 762)},
    "ntxent": {"none": (142, 281)},
    "triplet_margin_loss": {"none": (83, 170), "masked": (108, 217)},
    "smooth_labels": {"none": (15, 18)},
    "make_fenchel_young_loss": {"none": (62, 96), "masked": (92, 157)},
    "linear forward divergence": {"none": (122, 239), "75 % of tokens": (183, 334)},
    "linear reverse divergence": {"none": (122, 247)},
    "linear jensen-shannon divergence": {"none": (172, 323)},
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


@parametrize("key", [*CASES][:1], exhaustive=[*CASES][1:], ids=["-".join(key).replace(" ", "_") for key in CASES])
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
