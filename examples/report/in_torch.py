"""How torch is called with the cases of `peers.py`."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from verdicts import Result

from masksafe._report._cases import Inputs, Ops


def selected_after(op: Callable[..., Any], select: Callable[..., Any] = jnp.where) -> Callable[..., Any]:
    """An op that takes no mask, with a selection of its output."""

    def call(*, where: Any = None, **inputs: Any) -> Any:
        out = op(**inputs)
        return out if where is None else select(where, out, 0)

    return call


def run_torch(op: Callable[..., Any], inputs: Inputs) -> Result:
    import torch

    tensors = {name: torch.tensor(np.asarray(x)) for name, x in inputs.items()}
    floats = {name: x.requires_grad_(True) for name, x in tensors.items() if x.is_floating_point()}
    output = op(**tensors)
    weights = torch.cos(torch.arange(output.numel(), dtype=output.dtype)).reshape(output.shape)
    gradients = torch.autograd.grad(output, list(floats.values()), weights, allow_unused=True)
    found = zip(floats.items(), gradients, strict=True)
    zeros = {name: np.zeros(x.shape) if g is None else g.double().numpy() for (name, x), g in found}
    return Result(output.detach().double().numpy(), zeros)


def torch_ops() -> Ops:
    import torch
    from torch.nn import functional

    selected = functools.partial(selected_after, select=torch.where)

    def unreduced(loss: Callable[..., Any]) -> Callable[..., Any]:
        """A loss of two arguments, which the inputs of its cases are, in this order."""
        return selected(lambda **inputs: loss(*inputs.values(), reduction="none"))

    def cross_entropy(logits: Any, labels: Any, where: Any = None) -> Any:
        if where is not None and where.ndim == logits.ndim:
            logits, where = logits.masked_fill(~where, -torch.inf), None
        labels = labels if where is None else torch.where(where, labels, -100)  # the index that it ignores
        return functional.cross_entropy(logits, labels, reduction="none")

    def attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        return functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)

    def filled(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, where=None: fn(x if where is None else x.masked_fill(~where, -torch.inf), -1)

    def ctc(logits: Any, logit_paddings: Any, labels: Any, label_paddings: Any) -> Any:
        log_probs = functional.log_softmax(logits, -1).transpose(0, 1)
        lengths = (~logit_paddings).sum(1), (~label_paddings).sum(1)
        return functional.ctc_loss(log_probs, labels, *lengths, reduction="none")

    divergence_terms = unreduced(functional.kl_div)
    return {
        "squared_error": unreduced(functional.mse_loss),
        "huber_loss": unreduced(functional.huber_loss),
        "sigmoid_binary_cross_entropy": unreduced(functional.binary_cross_entropy_with_logits),
        "softmax_cross_entropy_with_integer_labels": cross_entropy,
        "softmax_cross_entropy": cross_entropy,
        "kl_divergence": lambda **inputs: divergence_terms(**inputs).sum(-1),
        "ctc_loss": ctc,
        "dot_product_attention": attention,
        "batch_norm": selected(lambda x: functional.batch_norm(x, None, None, training=True)),
        "group_norm": selected(lambda x: functional.group_norm(x, 1)),
        "l2_normalize": selected(lambda x: functional.normalize(x, dim=-1)),
        "softmax": filled(torch.softmax),
        "log_softmax": filled(torch.log_softmax),
        "logsumexp": filled(torch.logsumexp),
        "layer_norm": selected(lambda x: functional.layer_norm(x, x.shape[-1:], eps=1e-6)),
        "rms_norm": selected(lambda x: functional.rms_norm(x, x.shape[-1:], eps=1e-6)),
    }
