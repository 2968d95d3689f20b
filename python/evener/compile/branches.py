"""Where a TensorFlow graph branches on the values of what it is given.

A function may be computed row by row in one branch and over all rows in another. The check of
`bucketed` runs it on a few batches, and sees the branches that these take. So what is looked for
here is the graph: a branch or loop whose condition follows from values of padded inputs. Shapes do
not count, and neither does whether numbers are finite: padding that repeats a row has neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_SHAPES = ("Shape", "ShapeN", "Size", "Rank", "IsFinite", "IsInf", "IsNan", "ZerosLike", "OnesLike")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_LOOPS = ("While", "StatelessWhile")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def on_values(graph: Any, inputs: Iterable[str]) -> str:
    """The name of a branch or loop that depends on values of `inputs`, or "".

    graph: a GraphDef. inputs: names of its nodes.
    """
    walk = _Walk({each.signature.name: each for each in graph.library.function})
    walk.nodes(graph.node, set(inputs))
    return walk.found


class _Walk:
    def __init__(self, functions: dict[str, Any]) -> None:
        self.found = ""
        self._functions = functions
        self._done: dict[tuple[str, frozenset[int]], set[int]] = {}

    def nodes(self, nodes: Any, whole: set[str]) -> tuple[set[str], set[tuple[str, int]]]:
        """What depends on the nodes `whole`: all outputs of some nodes, single ones of others."""
        single: set[tuple[str, int]] = set()

        def marked(name: str) -> bool:
            node, _, rest = name.partition(":")
            place = rest.rpartition(":")[2]
            return node in whole or (node, int(place or 0)) in single

        before = (-1, -1)
        while before != (len(whole), len(single)):  # nodes come in any order
            before = (len(whole), len(single))
            for node in nodes:
                given = [name for name in node.input if not name.startswith("^")]
                at = {i for i, name in enumerate(given) if marked(name)}
                if not at or node.op in _SHAPES:
                    continue
                outputs = self._outputs(node, at)
                if outputs is None:
                    whole.add(node.name)
                else:
                    single |= {(node.name, i) for i in outputs}
        return whole, single

    def _outputs(self, node: Any, at: set[int]) -> set[int] | None:
        """Which outputs depend on the inputs `at`; None: all."""
        if node.op in _BRANCHES:
            if 0 in at:
                self.found = self.found or node.name
                return None
            inner = {i - 1 for i in at}
            names = [node.attr[key].func.name for key in ("then_branch", "else_branch")
                     if key in node.attr]  # fmt: skip
            names += [each.name for each in node.attr["branches"].list.func]
            return set().union(*(self._call(name, inner) for name in names))
        if node.op in _LOOPS:
            body, cond = node.attr["body"].func.name, node.attr["cond"].func.name
            marks, more = set(at), set(at)
            while more:
                more = self._call(body, marks) - marks
                marks |= more
            if self._call(cond, marks):
                self.found = self.found or node.name
            return marks
        if node.op in _CALLS:
            return self._call(node.attr["f"].func.name, at)
        return None

    def _call(self, name: str, at: set[int]) -> set[int]:
        """Which results of a function depend on its arguments `at`."""
        key = (name, frozenset(at))
        if key not in self._done:
            self._done[key] = set()
            function = self._functions[name]
            arguments = [each.name for each in function.signature.input_arg]
            whole, single = self.nodes(function.node_def, {arguments[i] for i in at})
            found = set()
            for i, result in enumerate(function.signature.output_arg):
                node, _, rest = function.ret[result.name].partition(":")
                place = int(rest.rpartition(":")[2] or 0)
                if node in whole or (node, place) in single:
                    found.add(i)
            self._done[key] = found
        return self._done[key]
