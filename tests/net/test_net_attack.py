"""A third host sends again what two said to each other over UDP, changed and unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.net import plugin_path
from evener.tools.bench.net.drive import Job, command, merge
from evener.tools.lab import Lab, Spec, unavailable

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

# Every packet of UDP that this host gets from the other one: IPv4 header and all, as one line.
RECORD = """
import socket, sys
heard = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
heard.settimeout(20)
count = 0
while count < 600:
    packet, address = heard.recvfrom(65535)
    if address[2] != socket.PACKET_OUTGOING and packet[9] == 17:
        # The kernel may have put several packets of one flow together: only one is sent again.
        print(packet[:1500].hex(), flush=True)
        count += 1
"""

# Sends each of them on, with the other host's address as its own: as it was, with a byte changed,
# with the right header and any bytes, twice.
REPLAY = """
import os, random, socket, struct, sys
sent = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
choice = random.Random(7)

def again(head, body):
    length = len(head) + len(body)
    head = head[:2] + struct.pack("!H", length) + head[4:10] + b"\\0\\0" + head[12:]
    udp = 20
    head = head[:udp + 4] + struct.pack("!HH", 8 + len(body), 0) + head[udp + 8:]
    try:
        sent.sendto(head + body, (socket.inet_ntoa(head[16:20]), 0))
    except OSError:
        pass  # longer than a packet of this network may be

count = 0
for line in sys.stdin:
    packet = bytes.fromhex(line)
    if packet[0] != 0x45:
        continue
    head, body = packet[:28], packet[28:1500]
    changed = bytearray(body)
    changed[choice.randrange(len(changed))] ^= 1 << choice.randrange(8)
    for bytes_ in (body, bytes(changed), body[:16] + os.urandom(64), body):
        again(head, bytes_)
        count += 1
print(count)
"""


def test_spoofed_and_replayed_packets_change_nothing_and_are_counted() -> None:
    directory = Path(f".evener-attack-{os.getpid()}").resolve()
    env = {"EVENER_NET_ENGINE": "udp", "EVENER_STATS_DIR": str(directory)}
    job = Job(str(plugin_path()), comms=2, depth=4, sizes="262144", seconds=3.0, verify=True)

    def start(lab: Lab, rank: int) -> subprocess.Popen[str]:
        told = {"RANK": str(rank), "MASTER_ADDR": lab.nodes[0].addresses[0], "MASTER_PORT": "29499"}
        return lab.nodes[rank].popen(
            command(job),
            env={**env, **told},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    try:
        with Lab(Spec.parse("3x1@200mbit,queue=20ms")) as lab:
            ears = lab.nodes[1].popen(
                [sys.executable, "-c", RECORD], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            third = lab.nodes[2].popen(
                [sys.executable, "-c", REPLAY],
                stdin=ears.stdout,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ranks = [start(lab, rank) for rank in range(2)]
            answers = [rank.communicate(timeout=60) for rank in ranks]
            assert [rank.returncode for rank in ranks] == [0, 0], answers
            ears.kill()
            said, trouble = third.communicate(timeout=30)
            ears.communicate(timeout=30)
            assert int(said) > 400, (said, trouble)
        # Every byte was compared by the job itself.
        rows = merge([line for out, _ in answers for line in out.splitlines()])
        assert rows[0]["messages"] >= 8
        records = [json.loads(path.read_text()) for path in directory.glob("net-*.json")]
        attacked = [record for record in records if record["host"] == "node1"]
        assert attacked, [record["host"] for record in records]
        packets = attacked[0]["net"]["packets"]
        # How many come before the job ends is a matter of the processors.
        assert packets["replayed"] >= 10, packets
        assert packets["forged"] + packets["strangers"] >= 10, packets
        assert packets["not_posted"] == 0, packets
        assert sum(packets["rtt_us_log2"]) > 0, packets
    finally:
        for path in directory.glob("*"):
            path.unlink()
        if directory.exists():
            directory.rmdir()
