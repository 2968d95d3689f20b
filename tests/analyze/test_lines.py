"""One line of each format, as the sources of each version print it, against what it says."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_logs import VERSIONS, Job, job, published_case

from evener.tools.analyze import collect, document, page, picture, run_checks
from evener.tools.analyze.parse import (
    failures,
    hops,
    init,
    network,
    prefix,
    results,
    rings,
    smi,
    table,
    topology,
    tuning,
)
from evener.tools.analyze.parse import trees as tree_lines
from evener.tools.analyze.parse.inputs import UnreadableError


@pytest.mark.parametrize(
    ("before", "host", "pid"),
    [
        (b"node-1:12:34 [0]", "node-1", 12),
        (b"[1,3]<stdout>:node-1:12:34 [0]", "node-1", 12),
        (b"7: node-1:12:34 [3]", "node-1", 12),
        (b"[default2]:node-1.example:12:34 [3]", "node-1.example", 12),
        (b"[2026-01-02 03:04:05] node-1:12:34 [0]", "node-1", 12),
        (b"2026-01-02T03:04:05.123Z node-1:12:34 [0]", "node-1", 12),
        (b":12:34 [0]", "", 12),
        (b"[1,0]<stdout>::12:34 [0]", "", 12),
    ],
)
def test_prefixes(before: bytes, host: str, pid: int) -> None:
    found = prefix.source(before)
    assert found is not None
    assert (found.host, found.pid) == (host, pid)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"Ring 00 : 3[1b000] -> 4[1c000] via P2P/IPC", (0, 0, 3, 4, "", "P2P/IPC")),
        (b"Channel 00 : 3[1b000] -> 4[1c000] via direct shared memory", (0, 0, 3, 4, "", "SHM")),
        (b"Channel 01/1 : 3[3] -> 4[0] via SHM/direct/direct", (1, 1, 3, 4, "", "SHM")),
        (b"Channel 02/0 : 3[3] -> 4[4] via P2P/CUMEM/read", (2, 0, 3, 4, "", "P2P/CUMEM")),
        (
            b"Channel 02/0 : 3[3] -> 4[4] via P2P/direct pointer/read",
            (2, 0, 3, 4, "", "P2P/direct pointer"),
        ),
        (b"Channel 02 : 3[a] -> 4[b] via P2P/indirect/5[c]", (2, 0, 3, 4, "", "P2P/indirect")),
        (
            b"Channel 00 : 3[1b000] -> 4[1c000] [send] via NET/Socket/0",
            (0, 0, 3, 4, "send", "NET", "Socket", 0, -1, False),
        ),
        (
            b"Channel 00/0 : 3[3] -> 8[0] [receive] via NET/IB/2/GDRDMA",
            (0, 0, 3, 8, "receive", "NET", "IB", 2, -1, True),
        ),
        (
            b"Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/2(5)/GDRDMA/Shared",
            (0, 0, 3, 8, "send", "NET", "IB", 2, 5, True),
        ),
        (
            b"Channel 00/0 : 3[3] -> 8[0] [send] via NET/AWS Libfabric/1/GDRDMA(PCI)",
            (0, 0, 3, 8, "send", "NET", "AWS Libfabric", 1, -1, True),
        ),
    ],
)
def test_hops(line: bytes, expected: tuple[object, ...]) -> None:
    found = hops.hop(line)
    assert found is not None
    assert tuple(found)[: len(expected)] == expected


def test_a_hop_of_an_unknown_kind_is_none() -> None:
    assert hops.hop(b"Channel 00/0 : 3[3] -> 8[0] via CARRIER PIGEON") is None


@pytest.mark.parametrize(
    ("line", "comm_id", "done"),
    [
        (b"comm 0x5 rank 3 nranks 8 cudaDev 1 busId 1b000 - Init COMPLETE", "", True),
        (
            b"comm 0x5 rank 3 nranks 8 cudaDev 1 busId 1b000 commId 0xab - Init COMPLETE",
            "0xab",
            True,
        ),
        (
            b"ncclCommInitRank comm 0x5 rank 3 nranks 8 cudaDev 1 nvmlDev 5 busId 1b000 "
            b"commId 0xab - Init START",
            "0xab",
            False,
        ),
        (
            b"[Rank 3] ncclCommInitRankConfig comm 0x5 rank 3 nranks 8 cudaDev 1 nvmlDev 5 "
            b"busId 1b000 commId 0xab - Init START",
            "0xab",
            False,
        ),
        (
            b"ncclCommSplit comm 0x5 rank 3 nranks 8 cudaDev 1 nvmlDev 5 busId 1b000 parent 0x7 "
            b"splitCount 1 color 0 key 3- Init START",
            "",
            False,
        ),
    ],
)
def test_init(line: bytes, comm_id: str, done: bool) -> None:
    found = init.init(line)
    assert isinstance(found, init.CommInit)
    assert (found.rank, found.ranks, found.cuda_device) == (3, 8, 1)
    assert (found.comm_id, found.done, found.bus) == (comm_id, done, "0000:1b:00.0")


def test_trees_old_and_new() -> None:
    new = tree_lines.trees(b"Trees [0] 1/4/-1->0->-1 [1] -1/-1/-1->0->3")
    assert [(t.channel, t.rank, t.up, t.down) for t in new] == [
        (0, 0, None, (1, 4)),
        (1, 0, 3, ()),
    ]
    old = tree_lines.trees(b"Trees [0] 1/-1/-1->0->7|7->0->1/-1/-1")
    assert [(t.channel, t.rank, t.up, t.down) for t in old] == [(0, 0, 7, (1,))]


def test_tuning_old_and_new() -> None:
    old = tuning.choice(b"1048576 Bytes -> Algo 1 proto 2 time 55.25")
    assert old == ("", 1048576, "RING", "SIMPLE", 0)
    new = tuning.choice(
        b"AllReduce: 1048576 Bytes -> Algo TREE proto LL128 channel{Lo..Hi}={0..15}"
    )
    assert new == ("AllReduce", 1048576, "TREE", "LL128", 16)


def test_cards() -> None:
    found = network.network(
        b"NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
    )
    assert isinstance(found, network.Cards)
    assert [(c.index, c.name, c.link) for c in found.cards] == [
        (0, "mlx5_0", "RoCE"),
        (1, "mlx5_1", "IB"),
    ]
    assert found.oob == "eth0"
    socket = network.network(b"NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>")
    assert isinstance(socket, network.Cards)
    assert [card.name for card in socket.cards] == ["eth0", "eth1"]


HEAD = b"# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"


@pytest.mark.parametrize(
    ("head", "line", "out", "inside"),
    [
        (
            HEAD,
            b"   512  128  float  sum  -1  56.12  0.01  0.02  0  54.54  0.01  0.03  0",
            (56.12, 0.02, 0),
            (54.54, 0.03, 0),
        ),
        (
            HEAD,
            b"   512  128  float  sum  -1  56.12  0.01  0.02  N/A  54.54  0.01  0.03  N/A",
            (56.12, 0.02, None),
            (54.54, 0.03, None),
        ),
        (  # 2.11: `error`, and no redop or root for a gather
            b"# size count type time algbw busbw error time algbw busbw error",
            b"  512  128  float  56.12  0.01  0.02  1e-07  54.54  0.01  0.03  0e+00",
            (56.12, 0.02, None),
            (54.54, 0.03, None),
        ),
        (  # 2.19 with -I 1: four more columns a side
            b"# size count type redop root time algbw busbw #wrong i_min i_max i_p99 i_cv "
            b"time algbw busbw #wrong i_min i_max i_p99 i_cv",
            b"  512  128  float  sum  -1  56.12  0.01  0.02  0  1  2  3  4  54.54  0.01  0.03  0  "
            b"1  2  3  4",
            (56.12, 0.02, 0),
            (54.54, 0.03, 0),
        ),
    ],
)
def test_rows(
    head: bytes, line: bytes, out: tuple[object, ...], inside: tuple[object, ...]
) -> None:
    columns = table.comment(head)
    assert isinstance(columns, table.Head)
    for known in (columns, None) if b"i_min" not in head else (columns,):
        row = table.row(line, known)
        assert row is not None
        assert row.size == 512
        for side, expected in ((row.out_of_place, out), (row.in_place, inside)):
            assert side is not None
            assert (side.time_us, side.busbw, side.wrong) == expected


@pytest.mark.parametrize(
    "line",
    [
        b"#  Rank  3 Pid   4711 on     node-1 device  3 [0x0f] NVIDIA A100",
        b"#   Rank  3 Group  0 Pid   4711 on     node-1 device  3 [0x0f] NVIDIA A100",
        b"#  Rank  3 Group  0 Pid   4711 on     node-1 device  3 [0000:0f:00] NVIDIA A100",
    ],
)
def test_devices(line: bytes) -> None:
    device = table.comment(line)
    assert isinstance(device, table.Device)
    assert (device.rank, device.host, device.pid, device.name) == (3, "node-1", 4711, "NVIDIA A100")


def test_json_report() -> None:
    side = {"time": 10.0, "alg_bw": 1.0, "bus_bw": 1.5, "nwrong": None}
    document = {
        "version": 3,
        "args": ["./build/all_reduce_perf", "-b", "8"],
        "config": {"devices": [{"rank": 0, "hostname": "n", "pid": 1, "device": 0}, "junk"]},
        "results": [
            {"size": 8, "count": 2, "type": "float", "out_of_place": side, "in_place": side},
            {"size": "no"},
        ],
        "average_bus_bandwidth": {"bandwidth": 1.5, "okay": "unchecked"},
        "out_of_bounds": {"count": 0, "okay": True},
    }
    records = list(results.report(document))
    kinds = [type(record).__name__ for record in records]
    assert kinds == ["Starting", "Device", "Row", "Summary", "Summary"]
    assert records[0].collective == "all_reduce"


XML = b"""<system version="1">
  <cpu numaid="0"><pci busid="0000:10:00.0"><pci busid="0000:11:00.0"><gpu dev="0" rank="0"/></pci>
    <pci busid="0000:12:00.0"><nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"
      rail="0"/></nic></pci></pci></cpu>
  <cpu numaid="1"><pci busid="0000:90:00.0"><pci busid="0000:91:00.0"><gpu dev="1" rank="1"/></pci>
  </pci></cpu></system>"""


def test_topology_file() -> None:
    found = topology.topology(XML)
    assert isinstance(found, topology.Topology)
    assert [(n.name, n.speed, n.rail, n.direct) for n in found.nets] == [
        ("mlx5_0", 400000, 0, True)
    ]
    assert found.distance == {(0, 0): "PIX", (1, 0): "SYS"}


def test_graph_file() -> None:
    found = topology.topology(
        b'<graphs version="1"><graph id="0" pattern="4" nchannels="1"><channel><net dev="2"/>'
        b'<gpu dev="0" rank="4"/><gpu dev="1" rank="5"/><net dev="2"/></channel></graph></graphs>'
    )
    assert isinstance(found, list)
    assert (found[0].nets, found[0].gpus) == ((2, 2), (4, 5))


def test_topology_matrix(tmp_path: Path) -> None:
    path = tmp_path / "topo.txt"
    path.write_text(
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-47\t0\n"
        "GPU1\tNV18\t X \tSYS\t48-95\t1\n"
        "NIC0\tPIX\tSYS\t X \n\nLegend:\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
    )
    run = collect([path])
    matrix = run.matrices[0][0]
    assert matrix.gpus() == ["GPU0", "GPU1"]
    assert matrix.cells["GPU1", "NIC0"] == "SYS"
    assert matrix.names == {"NIC0": "mlx5_0"}
    assert "host.far-card" in {finding.id for finding in run_checks(picture(run))}


# --- whatever the bytes are, nothing raises ---

PARSERS = [
    hops.hop,
    init.init,
    init.version,
    network.network,
    prefix.source,
    prefix.plain,
    prefix.stream,
    table.find,
    table.parted,
    table.program,
    failures.ended,
    failures.step,
    rings.channel,
    rings.place,
    tree_lines.trees,
    tuning.choice,
    table.comment,
    smi.head,
    topology.topology,
    lambda line: table.row(line, None),
]
SEEDS = [
    *published_case().encode().splitlines()[:40:3],
    *(
        line
        for version in VERSIONS
        for line in job(Job(version, proxy=True)).encode().splitlines()[:40:2]
    ),
    HEAD,
    XML,
    b"GPU0 GPU1 NIC0",
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A real line with bytes cut, doubled, replaced, or another line's put in."""
    line = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(line)))
        match draw(st.integers(0, 3)):
            case 0:
                del line[at : at + draw(st.integers(1, 40))]
            case 1:
                line[at:at] = draw(st.binary(max_size=20))
            case 2:
                line[at:at] = str(draw(st.integers(-(10**30), 10**30))).encode()
            case _:
                line[at:at] = draw(st.sampled_from(SEEDS))[: draw(st.integers(0, 60))]
    return bytes(line)


@settings(deadline=None)  # machines are busy
@given(mutated())
def test_no_line_makes_a_parser_raise(line: bytes) -> None:
    message = line.partition(b"NCCL INFO ")[2] or line
    for parser in PARSERS:
        parser(line)
        parser(message)


@settings(deadline=None)  # machines are busy
@given(st.lists(mutated(), max_size=30), st.booleans())
def test_no_file_makes_the_whole_raise(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], crlf: bool
) -> None:
    import json

    path = tmp_path_factory.mktemp("fuzz") / "log"
    path.write_bytes((b"\r\n" if crlf else b"\n").join(lines))
    try:
        run = collect([path])
    except UnreadableError as refused:  # what was put in made it one
        assert "binary" in str(refused)
        return
    result = picture(run)
    json.dumps(document(result, run_checks(result)), allow_nan=False)


TOPOLOGY = (
    '<system version="1"><cpu numaid="0"><pci busid="0000:1b:00.0" class="0x030200">'
    '<gpu dev="0" rank="0" gdr="1"><nvlink target="0000:1c:00.0" count="18"/></gpu></pci>'
    '<nic><net name="mlx5_0" dev="0" speed="400000" port="1" latency="0.0" guid="0x1" '
    'maxconn="1" gdr="1" rail="0"/></nic></cpu></system>'
)
GRAPH = (
    '<graphs version="1"><graph id="0" pattern="4" nchannels="1" speedintra="20">'
    '<channel><net dev="0"/><gpu dev="0" rank="0"/><gpu dev="1"/><net dev="0"/></channel>'
    "</graph></graphs>"
)
REPORT = (
    '{"version": 3, "args": ["all_reduce_perf"], "config": {"devices": [{"rank": 0, "pid": 1, '
    '"hostname": "a", "device": 0, "device_hex": "0000:1b:00", "device_info": "x"}]}, "results": '
    '[{"size": 8, "count": 2, "type": "float", "redop": "sum", "root": "-1", "out_of_place": '
    '{"time": 1.5, "alg_bw": 1.0, "bus_bw": 2.0, "nwrong": 0}, "in_place": null}], '
    '"out_of_bounds": {"count": 0, "okay": true}, "average_bus_bandwidth": {"bandwidth": 2.0}}'
)
OLD_TABLE = (
    "#  Rank  0 Pid  123 on  node-a device  0 [0x1b] A GPU\n"
    "#       size         count      type   redop     time   algbw   busbw  error     time   "
    "algbw   busbw  error\n"
    "        1024           256     float     sum    12.34    0.08    0.15  0e+00    12.10    "
    "0.08    0.15  0e+00\n# Avg bus bandwidth    : 0.15\n"
)
NEW_TABLE = (
    "#  Rank  0 Group  0 Pid    123 on     node-a device  0 [0000:1b:00] A GPU\n"
    "#       size         count      type   redop    root     time   algbw   busbw  #wrong     "
    "time   algbw   busbw  #wrong\n"
    "        1024           256     float     sum      -1    12.34    0.08    0.15       0    "
    "12.10    0.08    0.15     N/A\n# Out of bounds values : 0 OK\n# Avg bus bandwidth : 0.15\n"
)
MATRIX = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV18\tPIX\t0-31\t0\nGPU1\tNV18\t X \tSYS\t0-31\t0\n"
    "NIC0\tPIX\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
READERS = {
    "topology": TOPOLOGY,
    "graph": GRAPH,
    "json": REPORT,
    "old table": OLD_TABLE,
    "new table": NEW_TABLE,
    "matrix": MATRIX,
}
# What breaks numbers, attributes and types in each of them.
PIECES = (
    "-1", "1e400", "nan", "inf", "-inf", '""', "null", "[]", "{}", "true", "9" * 400, "0x", "<",
    ">", "&", '"', "\n", "\t", "\x00", " ", "/", "\ufffd", "GPU7", "NIC9", "#", "1.5.5",
)  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@settings(deadline=None, max_examples=25)  # machines are busy
@given(data=st.data())
def test_no_file_of_any_format_makes_the_whole_raise(
    tmp_path_factory: pytest.TempPathFactory, reader: str, data: st.DataObject
) -> None:
    import json

    text = READERS[reader]
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 12))
        put = data.draw(st.sampled_from(PIECES) | st.text(max_size=8))
        text = text[:at] + put + text[at + cut :]
    path = tmp_path_factory.mktemp("fuzz") / "file"
    path.write_text(text, encoding="utf-8", errors="replace")
    result = picture(collect([path]))
    findings = run_checks(result)
    json.dumps(document(result, findings), allow_nan=False)
    page(result, findings)


@pytest.mark.parametrize("reader", READERS)
def test_the_unbroken_file_is_read(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(READERS[reader])
    run = collect([path])
    found = (run.topologies, run.graphs, run.tables, run.tables, run.tables, run.matrices)
    assert dict(zip(READERS, found, strict=True))[reader]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_log_cut_anywhere(version: str, tmp_path: Path) -> None:
    text = job(Job(version)).encode()
    path = tmp_path / "log"
    for end in range(0, len(text), len(text) // 40):
        path.write_bytes(text[:end])
        result = picture(collect([path]))
        run_checks(result)
        assert all(pair.source != pair.destination for pair in result.pairs)


def test_lines_that_are_not_understood_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("n:1:2 [0] NCCL INFO Frobnicated the gadget\nn:1:2 [0] NCCL INFO Whatever\n")
    run = collect([path])
    assert (run.unknown, run.nccl_lines, run.lines) == (2, 2, 2)
    assert run.cite(run.unknown_samples[1][1]) == f"{path}:2"


# What the subsystems GRAPH, NET and TUNING say beyond what is used: one line of each form.
DUMPS = (
    "=== System : maxBw 370.8 totalBw 370.8 ===",
    "CPU/0-0 (1/1/2)",
    "+ PCI[48.0] - GPU/0-1b000 (0)",
    "              + NVL[370.8] - NVS/0",
    "+ PCI[12.0] - NIC/0-0",
    "            + NET[3.1] - NET/0-0 (0/0/3.125000)",
    "==========================================",
    "GPU/0-1b000 :GPU/0-1b000 (0/5000.0/LOC) GPU/0-43000 (2/370.8/NVL) NVS/0-0 "
    "(1/370.8/NVL) CPU/0-0 (1/48.0/PHB) NET/0-0 (3/3.1/PHB)",
    "NET/0-0 :GPU/0-1b000 (3/3.1/PHB) NET/0-0 (0/5000.0/LOC)",
    "Pattern 4, crossNic 0, nChannels 2, bw 3.0/3.0, type NVL/PHB, sameChannels 1",
    " 0 : NET/0-0 GPU/0-1b000 GPU/0-43000 NET/0-0",
    "Tree 0 : -1 -> 0 -> 1/-1/-1",
    "  Algorithm   |                            Tree                  |                   "
    "         Ring                  |",
    "  Protocol    |             LL |          LL128 |         Simple |",
    " Max NThreads |            512 |            640 |            512 |",
    "    Broadcast |    0.0/   0.0|    0.0/   0.0|",
    "    AllReduce |  112.0/   1.4|  200.8/   0.0|",
    "GPU Direct RDMA Enabled for GPU 0 / HCA 0 (distance 4 <= 5), read 0 mode Default",
    "Assigned GIN plugin None to comm",
    "NET/Evener : TCP engine over eth0; 2 worker(s) for 32 processor(s)",
    "Bootstrap: Using eth0:10.0.0.1<0>",
    "NCCL_SOCKET_IFNAME set by environment to eth0",
    "ncclCommInitRank comm 0x55 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1b000 commId "
    "0xab - Init COMPLETE",
    "Init timings - ncclCommInitRank: rank 0 nranks 4 total 0.51 (kernels 0.15, alloc 0.1)",
)


@pytest.mark.parametrize("text", DUMPS)
def test_dumps_are_known_lines(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f"n:1:2 [0] NCCL INFO {text}\n")
    run = collect([path])
    assert (run.nccl_lines, run.unknown) == (1, 0)


@pytest.mark.parametrize(
    "text", ["Gadget/0-0 frobnicated", "+frob", "12 : eggs", "All went well", "GPUs are warm | no"]
)
def test_what_only_looks_like_a_dump_is_unknown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f"n:1:2 [0] NCCL INFO {text}\n")
    assert collect([path]).unknown == 1


@pytest.mark.parametrize(
    "line",
    [
        b"n:1:2 [0] NCCL INFO Channel 00/02 : 0 1" + b" " * (1 << 20) + b"x",
        b"a" * (1 << 20) + b" [0] NCCL INFO Whatever",
        b"#  Rank  0 Pid 1 on" + b" " * (1 << 20) + b"x",
        b"1 " * (1 << 19),
        b"n:1:2 [0] NCCL INFO Trees " + b"[0] 1/" * 200_000,
        b"GPU0 " * 200_000,
    ],
)
def test_a_line_made_to_be_slow_is_not(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes((line + b"\n") * 20)
    run = collect([path])  # the test's time limit is the assertion
    assert run.lines == 20


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (5 << 20) + b"\nn:1:2 [0] NCCL INFO Whatever\n")
    assert collect([path]).nccl_lines == 1
