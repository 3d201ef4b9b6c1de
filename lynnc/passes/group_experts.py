"""In programs for prompts, the rows of each expert are gathered and multiplied tile by tile.

Before::

    gu = ExpertLinear(x, ids); a = SiluMul(gu); y = ExpertLinear(a, ids); s = Combine(y, scores)
    sgu = Linear(x); sa = SiluMul(sgu); sy = Linear(sa); m = SharedAdd(s, sy, gate); h2 = Add(h, m)

After::

    order, tiles = GroupByExpert(ids)
    a, sa = GroupedUp(x, order, tiles) { ... }
    y, sy = GroupedDown(a, order, tiles, sa) { ... }
    h2 = CombineAdd(y, scores, sy, gate, h) { ... }

Why: a program for each row and slot reads an expert's weights for every row; a tile reads them once for all its rows,
which meet them on tensor cores. The shared expert's rows are more tiles of the same launches where its weights are like
a routed expert's. y and sy are rounded to BF16, as in ``transformers``: in FP32 they would be the largest traffic of a
long prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lynnc.ir import Graph, Op
from lynnc.ops import Add, Combine, ExpertLinear, Linear, SharedAdd, SiluMul, TopK
from lynnc.passes.patterns import Group, Uses, fuse, ops_of, replace_ops
from lynnc.programs import expected_rows, is_prefill
from lynnc.promptops import GroupByExpert, GroupedLinear
from lynnc.tensors import DType, Tensor, Weight


@dataclass(frozen=True, slots=True)
class _Shared:
    """A shared expert whose weights are like a routed one's."""

    up: Linear
    act: SiluMul
    down: Linear


@dataclass(frozen=True, slots=True)
class _Block:
    """A layer's experts; ``tail`` is what follows the routed sum up to the residual addition, if that is there."""

    top_k: TopK
    up: ExpertLinear
    act: SiluMul
    down: ExpertLinear
    combine: Combine
    tail: tuple[Op, ...]
    shared: _Shared | None


def group_experts(graph: Graph) -> Graph:
    """Groups the rows of every mixture of experts of a program for prompts."""
    blocks = _blocks(graph) if is_prefill(graph.program) else []
    if not blocks:
        return graph
    tile = tile_rows(graph, max(block.top_k.experts for block in blocks), blocks[0].top_k.k)
    for block in blocks:
        graph = _grouped(graph, block, tile)
    ops = {op.name: op for op in graph.ops}
    return fuse(graph, [group for block in blocks for group in _launches(ops, block)])


def tile_rows(graph: Graph, experts: int, slots: int) -> int:
    """Rows of a tile: few where most experts have one or two, many where they share the work of unpacking weights."""
    rows = expected_rows(graph.program) * slots // experts
    return 16 if rows <= 4 else 32 if rows <= 16 else 64


def _blocks(graph: Graph) -> list[_Block]:
    uses, found = Uses(graph), []
    for top_k in ops_of(graph, TopK):
        up = next((op for op in uses.readers[top_k.ids] if isinstance(op, ExpertLinear)), None)
        act = uses.only_reader(up.out, SiluMul) if up else None
        down = uses.only_reader(act.out, ExpertLinear) if act else None
        combine = uses.only_reader(down.out, Combine) if down else None
        if up and act and down and combine:
            tail = _tail(uses, combine)
            found.append(_Block(top_k, up, act, down, combine, tail, _shared(uses, up, down, tail)))
    return found


def _tail(uses: Uses, combine: Combine) -> tuple[Op, ...]:
    shared_add = uses.only_reader(combine.out, SharedAdd)
    add = uses.only_reader(shared_add.out if shared_add else combine.out, Add)
    return tuple(op for op in (shared_add, add) if op) if add else ()


def _shared(uses: Uses, up: ExpertLinear, down: ExpertLinear, tail: tuple[Op, ...]) -> _Shared | None:
    """The shared expert, if its rows may be tiles of the routed experts' launches."""
    add = next((op for op in tail if isinstance(op, SharedAdd)), None)
    second = uses.writer(add.shared, Linear) if add else None
    act = uses.writer(second.x, SiluMul) if second else None
    first = uses.writer(act.x, Linear) if act else None
    if not (second and act and first and first.x == up.x):
        return None
    weights = uses.graph.weights
    alike = _is_like(weights[first.weight], weights[up.weight]) and _is_like(
        weights[second.weight], weights[down.weight]
    )
    alone = uses.only_reader(first.out, SiluMul) and uses.only_reader(act.out, Linear)
    return _Shared(first, act, second) if alike and alone and first.first_row == second.first_row == 0 else None


def _is_like(shared: Weight, routed: Weight) -> bool:
    """Whether a program for one of the routed matrices can multiply with the shared one."""
    return (shared.format, shared.rows, shared.columns, shared.part_rows, len(shared.parts)) == (
        routed.format,
        routed.rows,
        routed.columns,
        routed.part_rows,
        len(routed.parts),
    )


def _grouped(graph: Graph, block: _Block, tile: int) -> Graph:
    """The projections by tiles, and the op that finds those."""
    ids, experts = graph.tensors[block.top_k.ids], block.top_k.experts
    order = Tensor(f"{ids.name}_order", DType.I32, ids.shape)
    tiles = Tensor(f"{ids.name}_tiles", DType.I32, (ids.shape[0] * ids.width // tile + experts, 3))
    group = GroupByExpert(f"{block.top_k.name}_group", ids.name, order.name, tiles.name, experts, tile)
    up, down = (
        GroupedLinear(linear.name, linear.x, order.name, tiles.name, linear.weight, linear.out)
        for linear in (block.up, block.down)
    )
    outs = [block.down.out, *([block.shared.down.out] if block.shared else [])]
    rounded = [replace(graph.tensors[out], dtype=DType.BF16) for out in outs]
    replacements: dict[str, tuple[Op, ...]] = {
        block.top_k.name: (block.top_k, group),
        up.name: (up,),
        down.name: (down,),
    }
    return replace_ops(graph, replacements, (order, tiles, *rounded))


def _launches(ops: Mapping[str, Op], block: _Block) -> list[Group]:
    """What the ops of a grouped block become."""
    up, down, shared = ops[block.up.name], ops[block.down.name], block.shared
    groups = [
        Group("GroupedUp", (up, block.act, *((shared.up, shared.act) if shared else ())), up),
        Group("GroupedDown", (down, *((shared.down,) if shared else ())), down),
    ]
    return [*groups, Group("CombineAdd", (block.combine, *block.tail), block.combine)] if block.tail else groups
