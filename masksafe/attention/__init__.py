"""Dot-product attention whose masked pairs are gone, in blocks of queries and keys."""

from masksafe.attention._api import dot_product_attention

__all__ = ["dot_product_attention"]
