"""NCCL's log lines in the forms of its versions; the lines here are ours, in those forms."""

from evener.tools.bench.train import nccl

NEW = """\
n0:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.1.0.1<0>
n0:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda12.9
n0:1:2 [0] NCCL INFO Initialized NET plugin Socket
n0:1:2 [0] NCCL INFO Assigned NET plugin Socket to comm
n0:1:2 [0] NCCL INFO Using network Socket
n0:1:2 [0] NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels, 2 p2p channels
n0:1:3 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
n0:1:3 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n0:1:1 [0] NCCL INFO AllReduce: 411041792 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}
n0:1:1 [0] NCCL INFO AllReduce: 411041792 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}
n0:1:1 [0] NCCL INFO AllReduce: 4 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}
n0:1:1 [0] NCCL INFO ReduceScatter: 205520896 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..3}
""".splitlines()

OLD = """\
a:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE ; OOB eth0:10.0.0.1<0>
a:1:2 [0] NCCL INFO Using network IB
a:1:2 [0] NCCL INFO Channel 00 : 1[5000] -> 0[4000] via direct shared memory
a:1:2 [0] NCCL INFO 1048576 Bytes -> Algo 0 proto 2 time 123.4
a:1:2 [0] NCCL INFO 1024 Bytes -> Algo 9 proto 0 time 1.2
""".splitlines()


def test_named_choices() -> None:
    found = nccl.parse(NEW).to_json()
    assert found["version"] == "2.28.9+cuda12.9"
    assert found["network"] == "Socket"
    assert found["interfaces"] == ["eth0"]
    assert found["transports"] == ["NET/Socket", "P2P"]
    assert found["channels"] == 2
    assert found["unread_lines"] == 0
    assert found["tuned"][0] == {
        "collective": "AllReduce",
        "bytes": 411041792,
        "algorithm": "RING",
        "protocol": "SIMPLE",
        "channels": 2,
        "count": 2,
    }
    assert [entry["bytes"] for entry in found["tuned"]] == [411041792, 205520896, 4]


def test_numbered_choices() -> None:
    found = nccl.parse(OLD).to_json()
    assert found["network"] == "IB"
    assert found["interfaces"] == ["mlx5_0", "mlx5_1"]
    assert found["transports"] == ["SHM"]
    assert [(e["bytes"], e["algorithm"], e["protocol"]) for e in found["tuned"]] == [
        (1048576, "TREE", "SIMPLE"),
        (1024, "9", "LL"),
    ]


def test_a_tuning_line_of_another_form_is_counted_not_misread() -> None:
    found = nccl.parse(["x [0] NCCL INFO AllReduce of 12 Bytes -> Algo {RING} by table"])
    assert not found.tuned
    assert found.unread == 1


def test_in_words_only_the_large_buffers() -> None:
    words = nccl.in_words(nccl.parse(NEW).to_json())
    assert words == "AllReduce RING/SIMPLE x2, ReduceScatter RING/LL128 x4 over Socket (eth0)"
    assert nccl.in_words({}) == ""
    assert nccl.in_words(nccl.parse([]).to_json()) == ""
