"""Steps of a small model whose kernels overlap, against the same kernels one after another: bit for bit."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import omni_async_kernels as kernels
import pytest
import torch
from omni_async_kernels import launch
from torch import Tensor

from omni_async.backend.ops import HeadNorm, Rotary, StepInputs, StepRows
from omni_async.backend.triton import TritonOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
on_the_device = pytest.mark.skipif(DEVICE == "cpu", reason="nothing overlaps in the interpreter")

# The first run compiles each kernel twice.
pytestmark = pytest.mark.timeout(300)

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER, VOCABULARY = 256, 4, 2, 64, 384, 320
EXPERTS, EXPERT_INNER, TOP_K = 16, 128, 2
SLOTS, LENGTH, BLOCK_SIZE = 8, 640, 16
EPS = 1e-6


def weight(*shape: int, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5
    return values.to(DEVICE, DTYPE)


@dataclass(frozen=True)
class Layer:
    """Random weights and a cache."""

    norm: Tensor
    inner_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    head_norm: HeadNorm
    output: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor | None
    cache: tuple[Tensor, Tensor]

    @classmethod
    def random(cls, experts: bool, seed: int) -> "Layer":
        projected = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
        places = (SLOTS * LENGTH // BLOCK_SIZE + 1, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        many, inner = ((EXPERTS,), EXPERT_INNER) if experts else ((), INNER)
        return cls(
            norm=weight(HIDDEN, seed=seed) + 1,
            inner_norm=weight(HIDDEN, seed=seed + 1) + 1,
            qkv=weight(projected, HIDDEN, seed=seed + 2),
            qkv_bias=weight(projected, seed=seed + 3),
            head_norm=HeadNorm(weight(HEAD_SIZE, seed=seed + 4) + 1, weight(HEAD_SIZE, seed=seed + 5) + 1, EPS),
            output=weight(HIDDEN, HEADS * HEAD_SIZE, seed=seed + 6),
            gate_up=weight(*many, 2 * inner, HIDDEN, seed=seed + 7),
            down=weight(*many, HIDDEN, inner, seed=seed + 8),
            router=weight(EXPERTS, HIDDEN, seed=seed + 9) if experts else None,
            cache=(weight(*places, seed=seed + 10), weight(*places, seed=seed + 11)),
        )

    def __call__(self, ops: TritonOps, x: Tensor, rotary: Rotary, inputs: StepInputs) -> Tensor:
        qkv = ops.norm_linear(x, self.norm, EPS, self.qkv, self.qkv_bias, gated=False)
        attended = ops.attention(
            qkv, inputs.positions, rotary, self.head_norm, self.cache, inputs.attention, HEADS, HEAD_SIZE**-0.5
        )
        x = ops.linear(attended.flatten(1), self.output, residual=x)
        if self.router is None:
            inner = ops.norm_linear(x, self.inner_norm, EPS, self.gate_up, None, gated=True)
            return ops.linear(inner, self.down, residual=x)
        normed = ops.rms_norm(x, self.inner_norm, EPS)
        return ops.moe(normed, ops.linear(normed, self.router), self.gate_up, self.down, TOP_K, True, residual=x)


@dataclass(frozen=True)
class Model:
    """Everything that a step reads and writes, in fixed places."""

    layers: tuple[Layer, ...]
    embedding: Tensor
    norm: Tensor
    rotary: Rotary
    tokens: Tensor
    block_tables: Tensor
    rows: StepRows

    @classmethod
    def random(cls, lengths: list[int], padding_tokens: int) -> "Model":
        """Rows of so many tokens, and one row of padding."""
        ends = torch.tensor([0, *lengths, 0]).cumsum(0).int()
        angles = torch.rand(LENGTH, HEAD_SIZE // 2, generator=torch.Generator().manual_seed(1)) * 6
        num_blocks = SLOTS * LENGTH // BLOCK_SIZE
        padding = torch.full((len(lengths) + 1,), -1, dtype=torch.int32)
        rows = [padding, padding, ends, padding, padding, torch.arange(len(lengths)).int()]
        return cls(
            layers=tuple(Layer.random(experts, seed) for seed, experts in ((10, False), (40, True), (70, False))),
            embedding=weight(VOCABULARY, HIDDEN, seed=2),
            norm=weight(HIDDEN, seed=3) + 1,
            rotary=Rotary(angles.cos().to(DEVICE), angles.sin().to(DEVICE), HEAD_SIZE),
            tokens=torch.zeros(SLOTS, LENGTH, dtype=torch.int32, device=DEVICE),
            block_tables=torch.zeros(SLOTS, num_blocks // SLOTS, dtype=torch.int32, device=DEVICE),
            rows=StepRows(
                *(part.to(DEVICE, copy=True) for part in rows),
                num_tokens=sum(lengths) + padding_tokens,
                single=max(lengths) == 1,
            ),
        )

    def fill(self, lengths: list[int], seed: int) -> None:
        """The state before a step of its own: other tokens, blocks, slots and contexts for each seed."""
        generator = torch.Generator().manual_seed(seed)
        num_blocks = SLOTS * LENGTH // BLOCK_SIZE
        blocks = (torch.randperm(num_blocks, generator=generator) + 1).view(SLOTS, -1)
        slots = torch.randperm(SLOTS, generator=generator)[: len(lengths)]
        starts = torch.randint(LENGTH - max(lengths) - 1, (len(lengths),), generator=generator)
        places = (starts + torch.tensor(lengths) - 1) // BLOCK_SIZE
        # The block of the last token comes with the step.
        new_blocks = blocks[slots, places].clone()
        blocks[slots, places] = 0
        self.tokens.copy_(torch.randint(VOCABULARY, self.tokens.shape, generator=generator))
        self.block_tables.copy_(blocks)
        for static, values, fill in (
            (self.rows.slots, slots, -1),
            (self.rows.starts, starts, 0),
            (self.rows.new_places, places, -1),
            (self.rows.new_blocks, new_blocks, 0),
        ):
            static.copy_(torch.nn.functional.pad(values, (0, 1), value=fill))
        for number, layer in enumerate(self.layers):
            for part, cache in enumerate(layer.cache):
                cache.copy_(weight(*cache.shape, seed=seed + 2 * number + part))

    def step(self) -> tuple[Tensor, Tensor]:
        """Logits and drawn tokens, which are appended to the rows."""
        ops = TritonOps()
        inputs = ops.prepare(self.rows, self.tokens, self.block_tables, BLOCK_SIZE)
        x = ops.embedding(inputs.token_ids, self.embedding)
        for layer in self.layers:
            x = layer(ops, x, self.rotary, inputs)
        x = ops.rms_norm(x, self.norm, EPS)
        logits = ops.linear(x[inputs.sampled_tokens], self.embedding)
        ids, finite = logits.argmax(-1), logits.isfinite().all(-1)
        return logits, kernels.append(ids, finite, inputs.sampled_slots, inputs.sampled_lengths, self.tokens)

    def state(self, results: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Copies of all that a step has written."""
        caches = [part for layer in self.layers for part in layer.cache]
        return [part.clone() for part in (*results, self.tokens, self.block_tables, *caches)]


STEPS = {
    "one row": ([1], 0),
    "rows": ([1] * 5, 3),
    "many rows of tokens": ([1, 3, 1, 2], 1),
    "prompts": ([40, 1, 9], 6),
}


def captured(step: Callable[[], tuple[Tensor, Tensor]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@pytest.mark.parametrize(("lengths", "padding"), STEPS.values(), ids=STEPS)
@on_the_device
def test_overlapping_changes_no_bit(lengths: list[int], padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.random(lengths, padding)
    model.fill(lengths, 0)
    graphs = []
    for overlap in (False, True):
        monkeypatch.setattr(launch, "OVERLAP", overlap)
        graphs.append(captured(model.step))
    for seed in range(1, 6):
        replayed, eager = [], []
        for overlap, (graph, results) in zip((False, True) * 2, graphs * 2, strict=True):
            model.fill(lengths, seed)
            graph.replay()
            replayed.append(model.state(results))
            monkeypatch.setattr(launch, "OVERLAP", overlap)
            model.fill(lengths, seed)
            eager.append(model.state(model.step()))
        for states in (replayed, eager):
            assert states[0][0].isfinite().all()
            for other in states[1:]:
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(states[0], other, strict=True))


@on_the_device
def test_steps_that_follow_each_other_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay reads what the one before wrote; the host waits for none of them."""
    lengths, first, count = [1, 1, 1], 100, 200
    model = Model.random(lengths, 1)
    ends = []
    for overlap in (False, True):
        monkeypatch.setattr(launch, "OVERLAP", overlap)
        model.fill(lengths, 7)
        graph, results = captured(model.step)
        model.fill(lengths, 7)
        model.rows.starts.fill_(first)
        model.rows.new_places.fill_(-1)
        model.block_tables.copy_(torch.arange(1, model.block_tables.numel() + 1).view(SLOTS, -1))
        before = model.tokens.clone()
        for _ in range(count):
            graph.replay()
            model.rows.starts.add_(1)
        ends.append(model.state(results))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*ends, strict=True))
    written = (model.tokens != before)[model.rows.slots[:-1].long(), first + 1 : first + count + 1]
    assert written.float().mean() > 0.5


def test_every_kernel_that_may_overlap_waits_before_it_returns() -> None:
    waiting = 0
    for path in sorted(Path(launch.__file__).parent.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name == "wait_for_predecessor":
                continue
            calls = [node.lineno for node in ast.walk(function) if is_wait(node)]
            if "OVERLAP" not in [argument.arg for argument in function.args.args]:
                assert not calls
                continue
            waiting += 1
            assert calls, function.name
            returns = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Return)]
            assert all(min(calls) < line for line in returns), function.name
    assert waiting > 15


def is_wait(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "wait_for_predecessor"


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter")
def test_nothing_overlaps_in_the_interpreter() -> None:
    assert not launch.can_overlap()
