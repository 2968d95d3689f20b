"""The few shapes that the figures are made of. All text is escaped here and nowhere else."""

from __future__ import annotations

from markupsafe import Markup, escape

Attribute = str | float | int


def tag(name: str, content: str = "", **attributes: Attribute) -> Markup:
    """An element: `class_` gives class, `stroke_width` stroke-width. `content` is markup."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value != ""
    )
    # What tag() got as content was made by tag() or text(), which escape.
    return Markup(f"<{name}{text}>{content}</{name}>")


def text(x: float, y: float, words: object, anchor: str = "middle", class_: str = "") -> Markup:
    """Text at a point; `anchor` is start, middle or end."""
    return tag("text", escape(words), x=x, y=y, text_anchor=anchor, class_=class_)


def title(words: object) -> Markup:
    """What a pointer shows and a screen reader says."""
    return tag("title", escape(words))


def line(
    x1: float, y1: float, x2: float, y2: float, class_: str, tip: str = "", **more: Attribute
) -> Markup:
    """A straight line."""
    return tag("line", title(tip) if tip else "", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, **more)


def box(x: float, y: float, width: float, height: float, class_: str, tip: str = "") -> Markup:
    """A rectangle with round corners."""
    return tag(
        "rect", title(tip) if tip else "", x=x, y=y, width=width, height=height, rx=4, class_=class_
    )


def path(d: str, class_: str, tip: str = "", **more: Attribute) -> Markup:
    """A path."""
    return tag("path", title(tip) if tip else "", d=d, class_=class_, **more)


def figure(width: float, height: float, label: str, parts: list[Markup]) -> Markup:
    """A drawing of that many pixels at most, which shrinks with the page."""
    inner = Markup("").join([title(label), *parts])
    return tag(
        "svg",
        inner,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_label=label,
        style=f"max-width:{_number(width)}px",
    )


def _number(value: Attribute) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
