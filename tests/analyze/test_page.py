"""The HTML report: it loads nothing, it holds everything, no log can write into it."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from nccl_logs import VERSIONS, Job, job, published_case
from tests.pages import needs_browser, nothing_is_clipped

from evener.tools.analyze import collect, document, page, picture, run_checks
from evener.tools.analyze.words import without_domain
from evener.tools.fabric import FabricMap, parse_map, read_map

VOID = {"meta", "br", "hr", "img", "input", "link"}
MAP = Path(__file__).parents[2] / "examples" / "asterfusion" / "map.yaml"


class Outline(HTMLParser):
    """Checks that every element is closed in order, and keeps what matters."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.links += [v or "" for k, v in attrs if k in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def render(tmp_path: Path, text: str, fabric: FabricMap | None = None) -> str:
    path = tmp_path / "run.log"
    path.write_text(text)
    result = picture(collect([path]), fabric)
    return page(result, run_checks(result))


def outline(html: str) -> Outline:
    parsed = Outline()
    parsed.feed(html)
    assert parsed.open == []
    return parsed


def published_map(tmp_path: Path) -> FabricMap:
    path = tmp_path / "map.yaml"
    text = MAP.read_text()
    path.write_text(text.replace("bm-2204kzq", "server-one").replace("bm-2204qhn", "server-two"))
    return read_map(path)


def test_the_published_case(tmp_path: Path) -> None:
    html = render(tmp_path, published_case(), published_map(tmp_path))
    found = outline(html)
    assert found.links == []
    assert "http" not in html.replace("http-equiv", "")
    assert found.count["details"] == 16
    for words in ("195 GB/s", "Proposed: one rail, one switch", "Cables to move", "peak 48.23"):
        assert words in html
    # The verdict comes first, drawings before words.
    assert html.index("<h1>") < html.index("Fabric, today") < html.index("What to do")


def test_without_a_map_nothing_is_proposed(tmp_path: Path) -> None:
    html = render(tmp_path, published_case())
    outline(html)
    assert "Switches are not drawn" in html
    assert "Proposed" not in html


@pytest.mark.parametrize("version", VERSIONS)
def test_logs_of_every_version(version: str, tmp_path: Path) -> None:
    outline(render(tmp_path, job(Job(version))))


def test_large_jobs_are_still_drawn(tmp_path: Path) -> None:
    hosts = tuple(f"host{i:03d}" for i in range(40))
    html = render(tmp_path, job(Job("2.28.9", hosts=hosts, gpus=8)))
    outline(html)
    assert "34 more hosts are not drawn" in html


def test_names_in_figures_tell_hosts_apart(tmp_path: Path) -> None:
    hosts = tuple(f"worker-of-a-pool-{i:03d}.a.cluster.local" for i in range(4))
    html = render(tmp_path, job(Job("2.28.9", hosts=hosts, gpus=2)))
    for number in range(4):
        assert re.search(rf">work[^<]*{number:03d}</text>", html)
    assert without_domain(["10.0.0.1", "10.0.0.2"])["10.0.0.2"] == "10.0.0.2"
    assert without_domain(["a.x", "a.y"]) == {"a.x": "a.x", "a.y": "a.y"}


@needs_browser
@pytest.mark.parametrize("name", ["published", "large"])
def test_nothing_is_clipped(name: str, tmp_path: Path) -> None:
    if name == "published":
        html = render(tmp_path, published_case(), published_map(tmp_path))
    else:
        hosts = tuple(f"worker-with-a-long-name-{i:03d}.cluster.local" for i in range(8))
        html = render(tmp_path, job(Job("2.28.9", hosts=hosts, gpus=16)))
    nothing_is_clipped(html, tmp_path)


def test_no_log_writes_into_the_page(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    text = job(Job("2.28.9", cards=("<b>mlx", "mlx5_1")))
    text += f"n:1:2 [0] NCCL INFO Unheard of {bad}\nn:1:2 [0] file.cc:3 NCCL WARN {bad}\n"
    html = render(tmp_path, text)
    assert bad not in html
    assert "<b>mlx" not in html
    assert outline(html).count["script"] == 1


def test_drawings_are_well_formed(tmp_path: Path) -> None:
    html = render(tmp_path, published_case(), published_map(tmp_path))
    for part in html.split("<svg")[2:]:
        ElementTree.fromstring("<svg" + part[: part.index("</svg>")] + "</svg>")


def test_a_bandwidth_that_cannot_be_is_drawn(tmp_path: Path) -> None:
    side = "    100.0   99999999999.0   99999999999.0      0"
    rows = [f"  {4 * n}    {n}     float     sum      -1{side}{side}\n" for n in (1 << 18, 1 << 19)]
    html = render(tmp_path, "".join(rows))
    assert outline(html).count["svg"] > 1


TREE_MAP = """
version: 1
hosts:
  a: {gpus: [mlx5_0, mlx5_0], nics: {mlx5_0: {speed: 100G, switch: leaf0}}}
  b: {gpus: [mlx5_0, mlx5_0], nics: {mlx5_0: {speed: 100G, switch: leaf1}}}
switches: [leaf0, leaf1]
links:
  - {between: [leaf0, leaf1], speed: 100G, count: 2}
"""


def tree_log(*places: str) -> str:
    """Four ranks on two hosts and a line of trees each."""
    lines = []
    for rank, place in enumerate(places):
        at = f"{'ab'[rank // 2]}:{10 + rank}:{20 + rank} [{rank % 2}] NCCL INFO "
        comm = f"comm 0x5{rank} rank {rank} nranks 4 cudaDev {rank % 2} busId {rank + 1}b000"
        lines += [f"{at}{comm} commId 0xab - Init START", f"{at}Trees {place}"]
        lines += [f"{at}{comm} commId 0xab - Init COMPLETE"]
    return "\n".join(lines) + "\n"


def test_trees_are_laid_on_the_fabric(tmp_path: Path) -> None:
    # One chain 0 - 1 - 2 - 3 with its root at 0: one edge between the hosts, used both ways.
    text = tree_log(
        "[0] 1/-1/-1->0->-1", "[0] 2/-1/-1->1->0", "[0] 3/-1/-1->2->1", "[0] -1/-1/-1->3->2"
    )
    path = tmp_path / "run.log"
    path.write_text(text)
    result = picture(collect([path]), parse_map(TREE_MAP))
    assert [(p.source, p.destination, p.channels) for p in result.tree_pairs] == [
        (1, 2, [0]),
        (2, 1, [0]),
    ]
    assert result.tree_load is not None
    assert result.tree_load.crossing_share == 1
    # algbw crosses each way, and busbw is 3/2 of it with four ranks.
    assert result.tree_load.links["leaf0", "leaf1"].weight == pytest.approx(2 / 3)
    html = page(result, run_checks(result))
    outline(html)
    assert "100% of their traffic between hosts leaves its switch" in html
    assert html.count("pair cross") == 4  # twice in each figure, the wide and the narrow
    found = document(result, run_checks(result))["trees"]
    assert [(p["from"], p["to"], p["routes"][0]["crosses"]) for p in found["pairs"]] == [
        (1, 2, True),
        (2, 1, True),
    ]
    assert found["fabric"]["bound"] == pytest.approx(12.5 * 3 / 2)  # the card, 100 Gb/s


@pytest.mark.parametrize(
    ("chosen", "judged"),
    [
        ("", "rings"),
        ("AllReduce: 1024 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}", "trees"),
        ("1024 Bytes -> Algo 0 proto 0 time 9.5", "trees"),
        ("Broadcast: 1024 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}", "rings"),
    ],
)
@pytest.mark.parametrize("large", ["", "RING", "TREE"])
def test_findings_look_at_what_was_used(
    chosen: str, judged: str, large: str, tmp_path: Path
) -> None:
    text = tree_log(
        "[0] 1/-1/-1->0->-1", "[0] 2/-1/-1->1->0", "[0] 3/-1/-1->2->1", "[0] -1/-1/-1->3->2"
    )
    lines = [f"a:10:20 [0] NCCL INFO {chosen}"] if chosen else []
    if large:  # the largest size decides
        line = f"AllReduce: 1048576 Bytes -> Algo {large} proto SIMPLE channel{{Lo..Hi}}={{0..0}}"
        lines.append(f"a:10:20 [0] NCCL INFO {line}")
        judged = "trees" if large == "TREE" else "rings"
    path = tmp_path / "run.log"
    path.write_text(text + "".join(line + "\n" for line in lines))
    slow = TREE_MAP.replace("speed: 100G, count: 2", "speed: 50G, count: 2")
    result = picture(collect([path]), parse_map(slow))
    assert result.run.unknown == 0
    assert result.judged()[0] == judged
    found = {finding.id: finding for finding in run_checks(result)}
    # The log has no rings, so only the trees can cross.
    assert ("fabric.crossings" in found) == (judged == "trees")
    if judged == "trees":
        assert "2 of 2 pairs" in found["fabric.crossings"].title
        assert (
            "100% of the traffic between hosts along the trees" in found["fabric.crossings"].detail
        )
        # Both cards on one switch: the card, not the half as fast link, is the bound.
        assert "100% of the traffic between hosts along the trees" in found["fabric.rewire"].detail


def test_an_edge_that_one_end_tells_is_enough(tmp_path: Path) -> None:
    text = tree_log("[0] 1/2/-1->0->-1", "[0] -1/-1/-1->1->0", "", "[0] -1/-1/-1->3->-1")
    path = tmp_path / "run.log"
    path.write_text(text)
    result = picture(collect([path]))
    assert [(p.source, p.destination) for p in result.tree_pairs] == [(0, 2), (2, 0)]
    assert "The trees on the fabric" in page(result, run_checks(result))


def test_reasons_come_before_drawings_and_the_rest_apart(tmp_path: Path) -> None:
    from tests import incidents as made

    lines = [line for rank in (0, 1, 3) for line in made.watchdog(rank, 7)]
    html = render(tmp_path, job(Job("2.28.9", direct=False)) + "\n".join(lines))
    outline(html)
    assert html.index("What to do") < html.index("Also seen") < html.index("<h2>Fabric")


def test_a_matrix_has_its_facts(tmp_path: Path) -> None:
    text = "\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\t X \tNV4\tSYS\tSYS\nGPU1\tNV4\t X \tSYS\tSYS\n"
    text += "GPU2\tSYS\tSYS\t X \tNV4\nGPU3\tSYS\tSYS\tNV4\t X \n"
    assert "4 GPUs, NVLink in GPU0-GPU1, GPU2-GPU3" in render(tmp_path, text)


def test_another_bridge_of_the_same_cpu_is_not_across_the_interconnect(tmp_path: Path) -> None:
    text = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV4\tNODE\nGPU1\tNV4\t X \t{}\nNIC0\tNODE\t{}\t X \n"
    assert "host.far-card" not in render(tmp_path, text.replace("{}", "NODE"))
    assert "host.far-card" in render(tmp_path, text.replace("{}", "SYS"))
