"""The gradient of a row of padding that holds a NaN, with optax and with masksafe: the picture of the README.

    python examples/padding_gradient.py

It prints both gradients, and draws them for a light and for a dark page.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import shared

import masksafe

LOGITS = jnp.array([[2.0, 0.0, 1.0], [jnp.nan, 0.0, 1.0]])
LABELS, MASK = jnp.array([0, -100]), jnp.array([True, False])
LIBRARIES = {"optax": optax.losses, "masksafe": masksafe.losses}

THEMES = {  # of text, cells, stripes; then fill and text of a NaN, and of a gradient of 0
    "light": ("#1f2328", "#eaeef2", "#d3dae1", "#ffd1cc", "#a40e26", "#c9eed3", "#0f5323"),
    "dark": ("#e6edf3", "#262d36", "#38424d", "#6e1c1f", "#ffc1ba", "#14532a", "#a5f0bb"),
}
CELL, ROW, GAP, LEFT, TOP = 68, 48, 30, 88, 40  # sizes in pixels


def gradient(losses: ModuleType) -> jax.Array:
    """The gradient of the sum of the losses, in which `jnp.where` replaces the loss of padding."""

    def loss(logits: jax.Array) -> jax.Array:
        return jnp.where(MASK, losses.softmax_cross_entropy_with_integer_labels(logits, LABELS), 0).sum()

    return jax.grad(loss)(LOGITS)


def drawn(theme: str) -> str:
    """The logits and both gradients side by side, as an SVG."""
    text, cell, stripe, *_ = THEMES[theme]
    panels = {"logits": LOGITS} | {f"{name}'s gradient": gradient(losses) for name, losses in LIBRARIES.items()}
    width = LEFT + len(panels) * (LOGITS.shape[1] * CELL + GAP) - GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + 2 * ROW}" width="{width}" role="img"'
        f' font-family="sans-serif" font-size="18" fill="{text}">',
        "<title>A row of padding that holds a NaN: its gradient is NaN with optax, 0 with masksafe</title>",
        '<defs><pattern id="padding" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="8" height="8" fill="{cell}"/><rect width="3" height="8" fill="{stripe}"/></pattern></defs>',
        *(label(0, TOP + (i + 0.5) * ROW, name, "start") for i, name in enumerate(("token", "padding"))),
    ]
    for i, (title, values) in enumerate(panels.items()):
        x = LEFT + i * (LOGITS.shape[1] * CELL + GAP)
        lines += [label(x + LOGITS.shape[1] * CELL / 2, TOP / 2, title), *cells(x, np.asarray(values), i > 0, theme)]
    return "\n".join([*lines, "</svg>", ""])


def cells(left: float, values: np.ndarray, is_gradient: bool, theme: str) -> Iterator[str]:
    """A rectangle with its number for each value; those of padding are striped or, in a gradient, coloured."""
    text, plain, _, *of_padding = THEMES[theme]
    for (row, column), value in np.ndenumerate(values):
        fill, colour = plain, text
        if not MASK[row]:
            fill = "url(#padding)"
            if is_gradient:
                fill, colour = of_padding[:2] if np.isnan(value) else of_padding[2:]
        x, y = left + column * CELL, TOP + row * ROW
        yield f'<rect x="{x + 2}" y="{y + 2}" width="{CELL - 4}" height="{ROW - 4}" rx="5" fill="{fill}"/>'
        yield label(x + CELL / 2, y + ROW / 2, number(value), fill=colour, is_bold=not MASK[row])


def number(value: float) -> str:
    if np.isnan(value):
        return "NaN"
    return "0" if value == 0 else f"{value:.2f}".replace("-", "\N{MINUS SIGN}")


def label(x: float, y: float, text: str, anchor: str = "middle", fill: str = "", is_bold: bool = False) -> str:
    """A text with its middle at that height."""
    style = (f' fill="{fill}"' if fill else "") + (' font-weight="bold"' if is_bold else "")
    return f'<text x="{x:g}" y="{y + 6:g}" text-anchor="{anchor}"{style}>{text}</text>'


def main() -> None:
    arguments = shared.parser_of(__doc__).parse_args()
    for name, losses in LIBRARIES.items():
        print(f"{name}:", *np.asarray(gradient(losses)).round(2))
    arguments.output.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        picture: Path = arguments.output / f"padding_{theme}.svg"
        picture.write_text(drawn(theme), "utf8")
        print(f"The picture is in {picture}.")


if __name__ == "__main__":
    main()
