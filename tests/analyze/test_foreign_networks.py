"""Networks, cards and hosts as strangers have them: advice that holds there, and no false alarm."""

from dataclasses import replace
from pathlib import Path

import pytest
from foreign import HEAD, ROWS, TABLE, found, read
from nccl_logs import Job, job

from evener.tools.analyze import collect, picture, run_checks, terminal
from evener.tools.analyze.findings import catalogue
from evener.tools.analyze.report.verdict import verdict

# --- sockets although a card is there ---

SOCKET = Job("2.21.5", network="Socket", cards=("eth0",), direct=False)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE=1"),
        ("NCCL_NET set by environment to Socket.", "NCCL_NET=Socket"),
        ("Failed to open libibverbs.so[.1]", "library"),
        ("NET/IB : No device found.", "found none"),
        ("NET/Plugin: Could not find: libnccl-net.so", "plug-in"),
    ],
)
def test_sockets_although_a_card_is_there(line: str, why: str, tmp_path: Path) -> None:
    text = f"node-a:1000:1500 [0] NCCL INFO {line}\n" + job(SOCKET)
    matrix = (
        "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tNV18\tPIX\t0-31\n"
        "GPU1\tNV18\t X \tPIX\t0-31\nmlx5_0\tPIX\tPIX\t X \n"
    )
    finding = found(read(tmp_path, text, matrix))["network.sockets-despite-card"]
    assert "mlx5_0" in finding.title
    assert why in finding.detail
    assert finding.confidence == "measured"
    # Without a card anywhere nothing is claimed.
    (tmp_path / "1.log").unlink()
    assert "network.sockets-despite-card" not in found(read(tmp_path, text))


def test_libfabric_over_tcp(tmp_path: Path) -> None:
    line = "NCCL INFO NET/OFI Selected Provider is tcp (found 2 nics)\n"
    text = "node-a:1000:1500 [0] " + line + job(Job("2.21.5", network="AWS Libfabric"))
    findings = found(read(tmp_path, text.replace("/GDRDMA", "")))
    assert "FI_PROVIDER" in findings["network.sockets-despite-card"].command
    assert "network.gpudirect-off" not in findings


# --- 4. OFI, Slingshot, cards without names ---


def test_cards_without_names_are_compared_by_number(tmp_path: Path) -> None:
    ofi = Job("2.21.5", network="AWS Libfabric", cards=("x", "y"))
    result = read(tmp_path, job(ofi))
    assert result.rails()[:2] == ("aligned", "inferred")
    assert "names none" in result.rails()[2]
    assert {route.source.name for route in result.routes} == {"#0", "#1"}
    assert read(tmp_path, job(replace(ofi, crossed=True))).rails()[:2] == ("crossed", "inferred")


@pytest.mark.parametrize("network", ["AWS Libfabric", "FasTrak", "Libfabric"])
def test_no_advice_for_infiniband_on_other_networks(network: str, tmp_path: Path) -> None:
    findings = run_checks(read(tmp_path, job(Job("2.21.5", network=network, direct=False))))
    assert findings
    assert not any("NCCL_IB" in f.command or "nvidia-peermem" in f.do for f in findings)
    ids = {finding.id for finding in findings}
    assert ("network.gpudirect-off" in ids) == (network != "FasTrak")


# --- 5. trees over two nodes ---


def with_speed(text: str, mbps: int = 80_000) -> str:
    line = "node-a:1000:1500 [0] NCCL INFO NET/IB: [{0}] mlx5_{0}:uverbs{0}:1/RoCE provider=Mlx5 "
    line += f"speed={mbps} context=0x1\n"
    return line.format(0) + line.format(1) + text


def test_a_tree_over_two_nodes_may_pass_the_line_rate(tmp_path: Path) -> None:
    rows = ROWS.replace("10.75", "38.00")
    log = with_speed(job(Job("2.27.3")))
    result = read(tmp_path, log + HEAD + rows)
    assert result.line_rate == pytest.approx(20)
    assert "bandwidth.above-line-rate" not in found(result)
    ring = log + (
        "node-a:1000:1000 [0] NCCL INFO AllReduce: 4194304 Bytes -> Algo RING proto SIMPLE "
        "channel{Lo..Hi}={0..3}\n"
    )
    assert "bandwidth.above-line-rate" in found(read(tmp_path, ring + HEAD + rows))
    far = log + HEAD + ROWS.replace("10.75", "58.00")
    assert "bandwidth.above-line-rate" in found(read(tmp_path, far))


def test_gigabytes_per_card_against_its_line(tmp_path: Path) -> None:
    result = read(tmp_path, with_speed(job(Job("2.27.3"))) + TABLE)
    finding = found(result)["bandwidth.share-of-line"]
    assert finding.title == "5.375 GB/s per card, 54% of its line of 10 GB/s"
    unknown = found(read(tmp_path, job(Job("2.21.5")) + TABLE))["bandwidth.share-of-line"]
    assert "43 Gb/s" in unknown.detail
    assert "No file says" in unknown.detail


def test_gigabytes_against_nvlink_in_one_host(tmp_path: Path) -> None:
    head = HEAD.replace("node-b", "node-a").replace(
        "device  0 [0000:0f:00] NVIDIA A100-SXM4-80GB\n#\n",
        "device  1 [0000:10:00] NVIDIA A100-SXM4-80GB\n#\n",
    )
    result = read(tmp_path, head + ROWS.replace("10.75", "240.0"))
    assert found(result)["bandwidth.share-of-line"].title.startswith("80% of the NVLink")


# --- 6. false alarms ---


def test_cards_of_the_other_kind_are_not_idle(tmp_path: Path) -> None:
    text = job(Job("2.21.5", cards=("mlx5_0", "mlx5_1")))
    mixed = text.replace("[1]mlx5_1:1/RoCE", "[1]mlx5_1:1/RoCE [2]mlx5_2:1/IB")
    assert "network.cards-idle" not in found(read(tmp_path, mixed))
    same = text.replace("[1]mlx5_1:1/RoCE", "[1]mlx5_1:1/RoCE [2]mlx5_2:1/RoCE")
    finding = found(read(tmp_path, same))["network.cards-idle"]
    assert "node-a and node-b" in finding.title
    assert "NCCL_CROSS_NIC=1" in finding.command
    asked = "node-a:1000:1500 [0] NCCL INFO NCCL_CROSS_NIC set by environment to 0.\n" + same
    assert "CROSS_NIC" not in found(read(tmp_path, asked))["network.cards-idle"].command


def test_a_cut_log_has_no_idle_cards(tmp_path: Path) -> None:
    text = job(Job("2.21.5")).replace("mlx5_1:1/RoCE", "mlx5_1:1/RoCE [2]mlx5_2:1/RoCE")
    lines = [line for line in text.splitlines() if "Channel 03" not in line]
    assert "network.cards-idle" not in found(read(tmp_path, "\n".join(lines)))


def test_a_prefix_that_is_listed_itself_is_meant(tmp_path: Path) -> None:
    cards = ("mlx5_1", "mlx5_10")
    asked = "NCCL_IB_HCA set to mlx5_1:1,mlx5_10:1"
    result = read(tmp_path, job(Job("2.21.5", cards=cards, env=(asked,))))
    assert "settings.hca-prefix" not in found(result)


def test_cross_nic_is_not_proposed_where_it_is_set(tmp_path: Path) -> None:
    crossed = Job("2.21.5", crossed=True)
    assert "CROSS_NIC=0" in found(read(tmp_path, job(crossed)))["rails.crossed"].command
    asked = replace(crossed, env=("NCCL_CROSS_NIC set by environment to 0.",))
    assert "CROSS_NIC" not in found(read(tmp_path, job(asked)))["rails.crossed"].command


# --- 7. rings and trees, one host ---


def test_trees_are_counted_apart_where_nothing_parts_them(tmp_path: Path) -> None:
    # As up to 2.8: no `Connected all rings`, ring edges first, then the tree's.
    old_job = Job("2.7.8", gpus=2, channels=1)
    lines = [line for line in job(old_job).splitlines() if "Connected all" not in line]
    tree = [
        "node-a:1000:1500 [0] NCCL INFO Channel 00 : 0[10000] -> 2[10000] [send] via NET/IB/0",
        "node-b:1002:1502 [0] NCCL INFO Channel 00 : 0[10000] -> 2[10000] [receive] via NET/IB/0",
        "node-b:1002:1502 [0] NCCL INFO Channel 00 : 2[10000] -> 0[10000] [send] via NET/IB/0",
        "node-a:1000:1500 [0] NCCL INFO Channel 00 : 2[10000] -> 0[10000] [receive] via NET/IB/0",
    ]
    ends = [i for i, line in enumerate(lines) if "COMPLETE" in line]
    text = "\n".join([*lines[: ends[0]], *lines[ends[0] : ends[0]]])
    out: list[str] = []
    for line in lines:
        if "threadThresholds" in line and ":1500 " in line:
            out += [tree[0], tree[3]]
        if "threadThresholds" in line and ":1502 " in line:
            out += [tree[1], tree[2]]
        out.append(line)
    text = "\n".join(line for line in out if "Channel 00/01" not in line)
    result = read(tmp_path, text)
    assert result.world is not None
    assert len(result.world.edges) == 4
    assert [(p.source, p.destination) for p in result.pairs] == [(1, 2), (3, 0)]


def test_trees_of_2_4(tmp_path: Path) -> None:
    line = "node-a:1:2 [0] NCCL INFO Trees [0] -1->0->1/32/-1\n"
    comm = (
        "node-a:1:2 [0] NCCL INFO comm 0x7 rank 0 nranks 64 cudaDev 0 nvmlDev 0 - Init COMPLETE\n"
    )
    world = read(tmp_path, line + comm).world
    assert world is not None
    assert (world.size, world.trees[0][0].up, world.trees[0][0].down) == (64, None, (1, 32))


def test_a_net_edge_to_a_rank_without_a_line_is_a_pair(tmp_path: Path) -> None:
    text = (
        "node-a:1:2 [0] NCCL INFO Channel 00 :    0   1   2   3\n"
        "node-a:1:2 [0] NCCL INFO Ring 00 : 3 -> 0 [receive] via NET/AWS Libfabric/0\n"
        "node-a:1:2 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] via P2P/IPC\n"
        "node-b:3:4 [0] NCCL INFO Ring 00 : 1 -> 2 [receive] via NET/AWS Libfabric/0\n"
    )
    result = read(tmp_path, text)
    assert [(p.source, p.destination) for p in result.pairs] == [(1, 2), (3, 0)]


def test_hops_of_processes_without_a_name_are_read(tmp_path: Path) -> None:
    text = "node-a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer\n"
    result = read(tmp_path, text)
    assert result.world is not None
    assert result.world.transports["P2P/direct pointer"] == 1
    assert not verdict(result, run_checks(result)).startswith("Nothing to judge")


def test_a_host_at_the_start_of_a_verdict_keeps_its_name(tmp_path: Path) -> None:
    result = read(tmp_path, job(Job("2.21.5", direct=False)))
    assert verdict(result, run_checks(result)).startswith("node-a and node-b:")


def one_host(*via: str) -> str:
    lines = [
        f"node-a:{1000 + rank}:{1500 + rank} [{rank}] NCCL INFO Channel 00/0 : {edge}"
        for rank, edge in enumerate(via)
    ]
    lines += [
        f"node-a:{1000 + rank}:{1500 + rank} [{rank}] NCCL INFO comm 0x{rank} rank {rank} nranks 2 "
        f"cudaDev {rank} busId {rank + 1}b000 commId 0xab - Init COMPLETE"
        for rank in range(2)
    ]
    return "\n".join(lines) + "\n"


def test_gpus_of_one_host_over_the_network(tmp_path: Path) -> None:
    text = one_host("0[0] -> 1[1] [send] via NET/Socket/0", "1[1] -> 0[0] [send] via NET/Socket/0")
    text = "node-a:1000:1500 [0] NCCL INFO NCCL_SHM_DISABLE set by environment to 1.\n" + text
    findings = found(read(tmp_path, text))
    assert findings["network.inside-host"].severity == "problem"
    assert "NCCL_SHM_DISABLE=1" in findings["network.inside-host"].detail
    # It is no traffic between hosts, and is not judged as such.
    assert read(tmp_path, text).pairs == []
    hops = [line for line in text.splitlines(True) if "via NET" in line]
    assert read(tmp_path, "".join(hops)).pairs == []
    assert not {"network.one-stream", "network.gpudirect-off"} & set(findings)


def test_peers_that_nccl_says_are_off(tmp_path: Path) -> None:
    text = one_host("0[0] -> 1[1] via SHM/direct/direct", "1[1] -> 0[0] via SHM/direct/direct")
    assert "network.shm" in found(read(tmp_path, text))
    said = (
        "node-a:1000:1500 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can "
        "repress this message with NCCL_IGNORE_DISABLED_P2P=1.\n"
    )
    findings = found(read(tmp_path, said + text))
    assert "ACS" in findings["host.p2p-off"].do
    assert "network.shm" not in findings


def test_findings_name_all_hosts(tmp_path: Path) -> None:
    hosts = ("node-a", "node-b", "node-c")
    text = job(Job("2.21.5", hosts=hosts, direct=False))
    title = found(read(tmp_path, text))["network.gpudirect-off"].title
    assert all(host in title for host in hosts)
    socket = replace(SOCKET, hosts=hosts, cards=("docker0",))
    text = job(socket).replace("[0]eth0", "[0]docker0")
    findings = found(read(tmp_path, text))
    assert all(host in findings["network.wrong-interface"].title for host in hosts)
    assert all(host in findings["network.one-stream"].detail for host in hosts)


# --- 8. lines without a source ---


def test_lines_without_a_source_are_read_or_counted(tmp_path: Path) -> None:
    text = (
        "[0] NCCL INFO Channel 00/02 :    0   1\n"
        "NCCL INFO Channel 01/02 :    0   1\n"
        "[1] NCCL INFO Frobnicated\n"
        "NCCL INFO Frobnicated too\n"
        "worker said: NCCL INFO Frobnicated as well\n"
        "Set `NCCL INFO` to see more, or grep 'NCCL INFO' in the log.\n"
    )
    run = read(tmp_path, text).run
    assert run.unknown == 3
    assert {len(c.rings) for c in run.communicators} == {2}


# --- 9. RCCL ---

RCCL = """RCCL version : 2.22.3-HEAD:7d8d67c
HIP version  : 6.4.43484-123eb5128
node-a:10:20 [0] NCCL INFO RCCL version : 2.22.3-HEAD:7d8d67c
node-a:10:10 [0] NCCL INFO Kernel version: 6.8.0-41-generic
node-a:10:10 [0] NCCL INFO Hipruntime version: 60400000, firmware version: 177
node-a:10:10 [0] NCCL INFO ROCr version 1.15
node-a:10:10 [0] NCCL INFO Dmabuf feature disabled without NCCL_DMABUF_ENABLE=1
node-a:10:20 [0] NCCL INFO NET/IB : Using [0]bnxt_re0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
node-a:10:20 [0] NCCL INFO Using network IB
node-a:10:20 [0] NCCL INFO Channel 00/01 :    0   1   2   3
node-a:10:20 [0] NCCL INFO Ring 0 : 3 -> 0 -> 1 comm 0x55 nRanks 04 busId 5000
node-a:10:20 [0] NCCL INFO Trees [0] 1/2/-1->0->-1 comm 0x55 nRanks 04 busId 5000
node-a:10:20 [0] NCCL INFO Channel 00/0 : 0[5000] -> 1[15000] via P2P/IPC comm 0x55 nRanks 04
node-a:10:20 [0] NCCL INFO Channel 00/0 : 3[15000] -> 0[5000] [receive] via NET/IB/0/GDRDMA comm 0x55 nRanks 04
node-a:10:20 [0] NCCL INFO comm 0x55 rank 0 nranks 4 cudaDev 0 busId 5000 commId 0xa localSize 224 used 16777216 bytes on core 5 - Init COMPLETE
node-a:11:21 [1] NCCL INFO Channel 00/0 : 1[15000] -> 2[5000] [send] via NET/IB/0/GDRDMA comm 0x56 nRanks 04
node-a:11:21 [1] NCCL INFO comm 0x56 rank 1 nranks 4 cudaDev 1 busId 15000 commId 0xa localSize 224 used 16777216 bytes on core 5 - Init COMPLETE
node-b:12:22 [0] NCCL INFO Channel 00/0 : 2[5000] -> 3[15000] via P2P/direct pointer comm 0x57 nRanks 04
node-b:12:22 [0] NCCL INFO comm 0x57 rank 2 nranks 4 cudaDev 0 busId 5000 commId 0xa localSize 224 used 16777216 bytes on core 5 - Init COMPLETE
node-b:13:23 [1] NCCL INFO comm 0x58 rank 3 nranks 4 cudaDev 1 busId 15000 commId 0xa localSize 224 used 16777216 bytes on core 5 - Init COMPLETE
node-b:13:23 [1] /src/out/build/rccl/hipify/src/init.cc:140 NCCL WARN NUMA auto balancing enabled
#   Rank  0 Pid     10 on     node-a device  0 [0000:05:00.0] AMD Instinct MI300X
"""  # noqa: E501


def test_rccl(tmp_path: Path) -> None:
    result = read(tmp_path, RCCL)
    world = result.world
    assert world is not None
    assert (world.size, world.hosts()) == (4, ["node-a", "node-b"])
    assert [(p.source, p.destination) for p in result.pairs] == [(1, 2), (3, 0)]
    assert world.transports["P2P/IPC"] == world.transports["P2P/direct pointer"] == 1
    assert list(result.run.versions) == ["RCCL 2.22.3"]
    assert result.run.unknown == 0, result.run.unknown_samples
    assert "host.kernel-settings" in found(result)


@pytest.mark.parametrize(
    "warning",
    [
        'Missing "amd_iommu=on" from kernel command line which can lead to hang!',
        'Missing "iommu=pt" from kernel command line which can lead to hang!',
    ],
)
def test_rccl_asks_for_settings_of_the_kernel(warning: str, tmp_path: Path) -> None:
    log = f"node-a:7:7 [0] /rccl/hipify/src/init.cc:125 NCCL WARN {warning}\n"
    log += "node-a:7:7 [0] NCCL INFO DMA_BUF Support Enabled\n"
    result = read(tmp_path, log)
    assert "host.kernel-settings" in found(result)
    assert "coverage.nccl-warning" not in found(result)
    assert result.run.unknown == 0


# --- PCIe links ---


def test_a_pcie_link_below_its_width(tmp_path: Path) -> None:
    def pci(bus: str, lanes: int, speed: str, inside: str) -> str:
        return (
            f'<pci busid="{bus}" class="0x030200" vendor="0x10de" device="0x20b2" '
            f'link_speed="{speed} GT/s PCIe" link_width="{lanes}">{inside}</pci>'
        )

    def system(*links: str) -> str:
        return '<system version="1"><cpu numaid="0">' + "".join(links) + "</cpu></system>"

    card = '<nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic>'
    good = system(
        pci("0000:0f:00.0", 16, "16.0", '<gpu dev="0"/>'),
        pci("0000:10:00.0", 16, "16.0", '<gpu dev="1"/>'),
        pci("0000:11:00.0", 16, "32.0", card).replace("0x20b2", "0x1021"),
    )
    assert "host.pcie-narrow" not in found(read(tmp_path, good))
    narrow = good.replace('link_width="16"', 'link_width="8"', 1)
    detail = found(read(tmp_path, narrow))["host.pcie-narrow"].detail
    assert "GPU0 (0000:0f:00.0): 8 lanes" in detail
    slow = good.replace("32.0 GT/s", "16.0 GT/s")
    detail = found(read(tmp_path, slow))["host.pcie-narrow"].detail
    assert "31.5 GB/s, less than its line of 50" in detail


# --- the list of findings ---


def test_every_finding_is_in_the_catalogue() -> None:
    import re

    folder = Path(__file__).parents[2] / "python" / "evener" / "tools" / "analyze" / "findings"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    subjects = "cause|run|correctness|fabric|rails|network|rings|settings|host|bandwidth|coverage"
    written = set(re.findall(rf'"((?:{subjects})\.[a-z0-9-]+)"', text))
    assert written == set(catalogue())


def test_machines_of_one_name_are_no_one_host(tmp_path: Path) -> None:
    lines = []
    for node, host in enumerate(("gpu-a", "gpu-a", "gpu-b", "gpu-b")):
        by = f"{host}:{100 + node}:{200 + node} [0] NCCL INFO"
        ends = f"rank {node} nranks 4 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xab"
        lines += [
            f"{by} Bootstrap: Using eth0:10.9.{node}.2<0>",
            f"{by} ncclCommInitRank comm 0x7f{node} {ends} - Init START",
            f"{by} comm 0x7f{node} rank {node} nRanks 4 nNodes 4 localRanks 1 localRank 0 MNNVL 0",
            f"{by} Channel 00/0 : {(node - 1) % 4}[0] -> {node}[0] [receive] via NET/IB/0",
            f"{by} ncclCommInitRank comm 0x7f{node} {ends} - Init COMPLETE",
        ]
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    shown = picture(collect([log]), None)
    ids = {finding.id for finding in run_checks(shown)}
    assert "network.node-count" in ids
    assert "network.inside-host" not in ids
    assert "4 hosts, 4 ranks: gpu-a, gpu-b (several have one name)" in terminal(shown, [])
    log.write_text("\n".join(lines[:10]))
    text = terminal(picture(collect([log]), None), [])
    assert "4 hosts, 4 ranks: gpu-a (no line of 2 ranks)" in text
