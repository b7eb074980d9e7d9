"""Dot-product attention in blocks of queries and keys, in which masked pairs are gone."""

from masksafe.attention._api import dot_product_attention
from masksafe.attention._merge import merge_attention
from masksafe.attention._zigzag import undo_zigzag, zigzag

__all__ = ["dot_product_attention", "merge_attention", "undo_zigzag", "zigzag"]
