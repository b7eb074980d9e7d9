"""masksafe's ops as functions of the inputs of their cases."""

import functools
from collections.abc import Callable
from typing import Any

import masksafe
from masksafe._report._cases import SEGMENTS, Ops


def along_rows(reduction: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, where: reduction(x, axis=-1, where=where)


def _named(names: str) -> Ops:
    return {name: getattr(masksafe, name) for name in names.split()}


OPS: Ops = {
    **{name: getattr(masksafe.losses, name) for name in dir(masksafe.losses) if not name.startswith("_")},
    **_named("softmax log_softmax dot_product_attention layer_norm rms_norm standardize l2_normalize"),
    "ragged_dot": lambda where, **inputs: masksafe.ragged_dot(**inputs),  # its sizes are the mask
    "batch_norm": lambda x, where=None: masksafe.batch_norm(x, where=where)[0],
    "group_norm": functools.partial(masksafe.group_norm, num_groups=1),
    **{name: along_rows(op) for name, op in _named("logsumexp sum mean var max min").items()},
    **{
        name: functools.partial(getattr(masksafe, name), num_segments=SEGMENTS)
        for name in dir(masksafe)
        if name.startswith("segment_")
    },
}
