"""The drawn fabric: switches, cables, hosts with cards and GPUs, and the hops between hosts.

A hop that leaves its switch is red and dashed, one that stays is blue and whole; so the drawing can
be read on paper without colour. Below the hosts each directed pair is an arc, dashed alike.

Each figure is made for one width, so that its words have the size of the page's words: the page
shows the wide one, and on a phone the narrow one, which has fewer hosts. Where many hosts stand
side by side, and on a phone, a host has its GPUs in rows of four.
"""

from __future__ import annotations

from markupsafe import Markup

from evener.tools.analyze.picture import Picture, Route
from evener.tools.analyze.report import svg
from evener.tools.analyze.words import ranges, without_domain
from evener.tools.fabric import Card, FabricMap, HostMap

MOST_HOSTS = 6
MOST_HOSTS_NARROW = 2
_GPU, _GAP, _PAD = 26.0, 8.0, 12.0
_SWITCH_HEIGHT = 34.0
_LETTER = 9.2  # pixels of a letter of a host's name, at most on average


def drawing(
    picture: Picture,
    fabric: FabricMap | None,
    name: str,
    *,
    trees: bool = False,
    narrow: bool = False,
) -> Markup | None:
    """The figure with `fabric`'s cables (None: hosts and pairs only), None without hosts.

    `trees`: with the trees' edges between hosts instead of the rings'.
    `narrow`: for a page of 390 pixels.
    """
    world = picture.world
    if world is None or not world.hosts():
        return None
    hosts = world.hosts()[: MOST_HOSTS_NARROW if narrow else MOST_HOSTS]
    return _Drawing(picture, fabric, hosts, trees, narrow).figure(name)


class _Drawing:
    def __init__(
        self,
        picture: Picture,
        fabric: FabricMap | None,
        hosts: list[str],
        trees: bool,
        narrow: bool,
    ) -> None:
        self.picture, self.fabric, self.hosts, self.trees = picture, fabric, hosts, trees
        self.narrow = narrow
        self.names = without_domain(hosts)
        self.per_row = 4 if narrow or len(hosts) > 3 else 8
        self.space = 14.0 if narrow else 26.0
        self.switch_width = 112.0 if narrow else 150.0
        self.drawn_pairs = picture.tree_pairs if trees else picture.pairs
        self.routes = picture.tree_routes if trees else picture.routes
        self.world = picture.world
        self.parts: list[Markup] = []
        # Where a rank's arcs begin, below its host; and the way from its GPU to there.
        self.gpu_at: dict[int, tuple[float, float]] = {}
        self.way: dict[int, tuple[tuple[float, float], ...]] = {}
        self.card_at: dict[tuple[str, str], tuple[float, float]] = {}
        self.switch_at: dict[str, tuple[float, float]] = {}
        self.top = self.host_height = 0.0

    def figure(self, name: str) -> Markup:
        ranks = {
            host: [r for r, m in sorted(self.world.members.items()) if m.host == host]
            if self.world
            else []
            for host in self.hosts
        }
        columns = {h: min(max(len(r), 4), self.per_row) for h, r in ranks.items()}
        widths = {h: n * (_GPU + _GAP) - _GAP + 2 * _PAD for h, n in columns.items()}
        most = max(len(r) for r in ranks.values())
        rows = max(1, -(-most // self.per_row))
        self.host_height = 66 + rows * (_GPU + _GAP) - _GAP
        width = sum(widths.values()) + self.space * (len(self.hosts) + 1)
        wanted = 0.0
        if self.fabric:
            row = max(len(level) for level in self.levels())
            wanted = row * (self.switch_width + (60 if self.narrow else 90))
        scale = max(width, wanted, 340.0 if self.narrow else 420.0)
        left = (scale - width) / 2 + self.space
        levels = self.switches(scale)
        self.top = 18 + levels * 78 + (70 if levels else 0)
        arcs = self.top + self.host_height + 30
        body: list[Markup] = []
        for host in self.hosts:
            body += self.host(host, ranks[host], left, widths[host])
            left += widths[host] + self.space
        self.cables()
        self.parts += body
        depth = self.pairs(arcs)
        return svg.figure(scale, arcs + depth + 14, name, self.parts)

    def switches(self, width: float) -> int:
        """Put switches with cards on the lowest level, the others above; the number of levels."""
        fabric = self.fabric
        if fabric is None:
            return 0
        rows = self.levels()
        for level, row in enumerate(rows):
            for number, switch in enumerate(row):
                self.switch_at[switch] = (width * (number + 0.5) / len(row), 40 + level * 78)
        load = self.load()
        for group in fabric.links:
            (x1, y1), (x2, y2) = (self.switch_at[end] for end in group.ends)
            shares = [load.get(ends, 0.0) for ends in (group.ends, group.ends[::-1])]
            busy = max(shares) > 0
            shown = min(group.count, 6)
            for number in range(shown):
                shift = (number - (shown - 1) / 2) * 6
                self.parts.append(
                    svg.line(
                        x1,
                        y1 + (shift if y1 == y2 else 0),
                        x2,
                        y2 + (shift if y1 == y2 else 0),
                        "link cross" if busy else "link",
                        f"{group.name}: {group.count} links",
                    )
                    if y1 == y2
                    else svg.line(x1 + shift, y1, x2 + shift, y2, "link cross" if busy else "link")
                )
            words = f"{group.count} x {group.speed * 8 / 1e9:g}G"
            if y1 == y2:
                state = f", {max(shares):.0%} of busbw each way" if busy else ", idle"
                self.parts.append(
                    svg.text(
                        (x1 + x2) / 2,
                        y1 - _SWITCH_HEIGHT / 2 - 8,
                        words + state,
                        class_="small halo",
                    )
                )
            else:
                self.parts.append(
                    svg.text((x1 + x2) / 2, (y1 + y2) / 2 + 4, words, class_="small halo")
                )
        for switch, (x, y) in self.switch_at.items():
            self.parts.append(
                svg.box(
                    x - self.switch_width / 2,
                    y - _SWITCH_HEIGHT / 2,
                    self.switch_width,
                    _SWITCH_HEIGHT,
                    "switch",
                )
            )
            fits = int((self.switch_width - 8) / _LETTER)
            self.parts.append(svg.text(x, y + 5, short(switch, fits), class_="strong"))
        return len(rows)

    def levels(self) -> list[list[str]]:
        """Switches without cards, then those with; empty levels are left out."""
        fabric = self.fabric
        if fabric is None:
            return []
        used = {card.switch for card in self.cards(fabric.hosts)}
        spines = [switch for switch in fabric.switches if switch not in used]
        leaves = [switch for switch in fabric.switches if switch in used]
        return [row for row in (spines, leaves) if row]

    def load(self) -> dict[tuple[str, str], float]:
        if self.trees:
            own = self.picture.tree_load
            return {ends: use.weight for ends, use in own.links.items()} if own else {}
        traffic = self.picture.traffic
        if traffic is None or self.fabric is None:
            return {}
        load = traffic.after if self.fabric is traffic.rewired else traffic.today
        return {ends: use.weight for ends, use in load.links.items()}

    @staticmethod
    def cards(hosts: object) -> list[Card]:
        values = hosts.values() if hasattr(hosts, "values") else []
        return [card for host in values for card in host.cards]

    def host(self, name: str, ranks: list[int], x: float, width: float) -> list[Markup]:
        top, parts = self.top, []
        parts.append(svg.box(x, top, width, self.host_height, "host", name))
        shown = short(self.names[name], int((width - 8) / _LETTER))
        parts.append(svg.text(x + width / 2, top + 44, shown, class_="strong"))
        step = _GPU + _GAP
        last = (len(ranks) - 1) // self.per_row
        for number, rank in enumerate(ranks):
            row, column = divmod(number, self.per_row)
            gx, gy = x + _PAD + column * step, top + 54 + row * step
            parts.append(svg.box(gx, gy, _GPU, _GPU, "gpu", f"rank {rank} on {name}"))
            parts.append(svg.text(gx + _GPU / 2, gy + 17, rank, class_="small"))
            bottom = top + self.host_height
            if row == last:
                self.gpu_at[rank] = (gx + _GPU / 2, bottom)
                self.way[rank] = ((gx + _GPU / 2, gy + _GPU),)
            else:  # out at its side, and down between the columns
                aside = gx + _GPU + _GAP / 2
                self.gpu_at[rank] = (aside, bottom)
                self.way[rank] = ((gx + _GPU, gy + _GPU / 2), (aside, gy + _GPU / 2))
        for number, (card, tip) in enumerate(self.host_cards(name)):
            count = max(len(self.host_cards(name)), 1)
            cx = x + _PAD + (width - 2 * _PAD) * (number + 0.5) / count
            self.card_at[name, card] = (cx, top)
            size = min(60.0, (width - 2 * _PAD) / count - 4)
            parts.append(svg.box(cx - size / 2, top + 6, size, 20, "card", tip))
            # The end of a card's name tells it from the others.
            end = card if len(card) * 6.5 < size else card[-max(int(size / 6.5), 2) :]
            parts.append(svg.text(cx, top + 20, end, class_="small"))
        return parts

    def host_cards(self, name: str) -> list[tuple[str, str]]:
        placed: HostMap | None = self.fabric.find(name) if self.fabric else None
        if placed:
            return [(c.name, f"{c.speed * 8 / 1e9:g}G, rail {c.rail}") for c in placed.cards]
        known = self.picture.run.hosts.get(name)
        if known is None:
            return []
        used = {index for _, index in known.used}
        return [
            (card.name, "used" if index in used else "not used")
            for (_, index), card in sorted(known.cards.items())
        ][:8]

    def cables(self) -> None:
        if self.fabric is None:
            return
        for (host, name), (x, y) in self.card_at.items():
            placed = self.fabric.find(host)
            card = placed.card(name) if placed else None
            if card is None:
                continue
            sx, sy = self.switch_at[card.switch]
            # Ends spread along the switch, so that cables do not meet in one point.
            spread = 300 if self.narrow else 900
            sx += max(-0.42, min(0.42, (x - sx) / spread)) * self.switch_width
            self.parts.append(
                svg.line(
                    x,
                    y + 6,
                    sx,
                    sy + _SWITCH_HEIGHT / 2,
                    f"cable {self.state(host, name)}",
                    f"{host}/{name} to {card.switch}",
                )
            )

    def state(self, host: str, name: str) -> str:
        """`cross`, `stay` or empty: what the hops over a card do."""
        states = {
            self.crosses(route)
            for route in self.routes
            for end in (route.source, route.destination)
            if (end.host, end.name) == (host, name)
        }
        return "cross" if True in states else "stay" if False in states else ""

    def crosses(self, route: Route) -> bool | None:
        """Whether a route leaves its switch with this drawing's cables."""
        if self.fabric is None:
            return None
        cards = []
        for end in (route.source, route.destination):
            placed = self.fabric.find(end.host)
            cards.append(placed.card(end.name) if placed else None)
        return None if None in cards else cards[0].switch != cards[1].switch  # type: ignore[union-attr]

    def pairs(self, top: float) -> float:
        """Arcs under the hosts, one per directed pair. Returns the depth that they need."""
        drawn = [
            (pair, [r for r in self.routes if r.pair is pair])
            for pair in self.drawn_pairs
            if pair.source in self.gpu_at and pair.destination in self.gpu_at
        ][:64]
        depth = 0.0
        for number, (pair, routes) in enumerate(drawn):
            (x1, y1), (x2, y2) = self.gpu_at[pair.source], self.gpu_at[pair.destination]
            down = 30 + 13.0 * (number % 10)
            depth = max(depth, down * 0.75)
            states = {self.crosses(route) for route in routes}
            state = "cross" if True in states else "stay" if False in states else "open"
            tip = f"{pair.source} to {pair.destination}, channels {ranges(pair.channels)}"
            control = top + down
            out = " L".join(f"{x:.1f},{y:.1f}" for x, y in self.way[pair.source])
            back = " L".join(f"{x:.1f},{y:.1f}" for x, y in self.way[pair.destination][::-1])
            self.parts.append(
                svg.path(
                    f"M{out} L{x1:.1f},{y1:.1f} "
                    f"C{x1:.1f},{control:.1f} {x2:.1f},{control:.1f} {x2:.1f},{y2:.1f} L{back}",
                    f"pair {state}",
                    tip,
                    marker_end=f"url(#arrow-{state})",
                )
            )
        return depth


def short(name: str, fits: int) -> str:
    """A name of at most `fits` letters: its start and its end, which tell names apart."""
    if len(name) <= fits:
        return name
    end = min(6, fits // 2)
    return f"{name[: fits - end - 1]}\u2026{name[-end:]}"
