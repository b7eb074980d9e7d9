"""Losses of optax, under optax's names and signatures, whose masked elements are gone."""

from masksafe.losses._cross_entropy import safe_softmax_cross_entropy as safe_softmax_cross_entropy
from masksafe.losses._cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from masksafe.losses._cross_entropy import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
from masksafe.losses._linear_cross_entropy import linear_softmax_cross_entropy as linear_softmax_cross_entropy
