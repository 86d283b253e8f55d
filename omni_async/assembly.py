"""Puts an engine's parts together on the engine's thread: model, cache, runner, scheduler, stage, intake."""

from collections.abc import Callable

import torch

from omni_async.backend.choose import choose_ops
from omni_async.backend.ops import Ops
from omni_async.errors import LoadError, OptionError
from omni_async.intake import Intake
from omni_async.loading.loaded import Loaded
from omni_async.options import EngineOptions
from omni_async.runner.device_state import DeviceState
from omni_async.runner.graphs import StepGraphs
from omni_async.runner.lane import Lane, ThreadLane
from omni_async.runner.memory import CachePlan, cache_dtype, free_memory, measure_peak, plan_cache
from omni_async.runner.runner import Runner
from omni_async.runner.step_shape import Buckets
from omni_async.runner.stream_lane import StreamLane
from omni_async.scheduler.scheduler import Limits, Scheduler
from omni_async.stage import RequestEnded, Stage

STAGE = "text"
"""The one stage of a text model, and the name of its output."""

LANE = "omni-async-lane"

WORKSPACE = 2**30
"""Bytes left to the libraries and to what graphs occupy beside their steps' tensors."""

Load = Callable[[EngineOptions], Loaded]
"""Makes the model; runs on the engine's thread."""


def assemble(load: Load, options: EngineOptions, on_end: RequestEnded) -> tuple[Stage, Intake]:
    """Load a model and build the stage that serves it.

    Raises:
        LoadError: the checkpoint cannot be loaded, or does not fit the device.
        OptionError: the options do not fit the model or the machine.
        CaptureError: a step cannot be captured as a CUDA graph.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        loaded = load(options)
    except torch.OutOfMemoryError as error:
        raise LoadError(f"the weights do not fit the device's memory: {error}") from error
    spec = loaded.model.spec
    ops = choose_ops(options.backend, loaded.device)
    try:
        cache = _plan_cache(loaded, ops, options)
    except torch.OutOfMemoryError as error:
        sizes = f"max_step_tokens {options.step_tokens(loaded.device.type)}, max_slots {options.max_slots}"
        raise OptionError(f"beside the weights the largest step ({sizes}) does not fit the memory: {error}") from error
    scheduler = Scheduler(
        Limits(
            num_slots=options.max_slots,
            num_blocks=cache.num_blocks,
            block_size=options.block_size,
            max_step_tokens=options.step_tokens(loaded.device.type),
            prefix_caching=options.prefix_caching,
        )
    )
    runner = _make_runner(loaded, ops, options, cache)
    stage = Stage(scheduler, runner, output=STAGE, pipelined=options.pipelined, on_end=on_end)
    intake = Intake(
        stage=STAGE,
        output=STAGE,
        tokenizer=loaded.tokenizer,
        defaults=loaded.defaults,
        vocab_size=spec.vocab_size,
        max_model_len=cache.max_model_len,
        block_size=options.block_size,
        prefix_caching=options.prefix_caching,
    )
    return stage, intake


def _plan_cache(loaded: Loaded, ops: Ops, options: EngineOptions) -> CachePlan:
    """Size the cache; on cuda from what the largest step leaves, which is found out by running it."""
    spec, device = loaded.model.spec, loaded.device
    dtype = cache_dtype(options, loaded.dtype)
    if device.type != "cuda":
        free = free_memory(device)
        return plan_cache(spec, options, dtype, free, default_memory=free // 4)
    peak = WORKSPACE
    if ops.capturable:  # such a step can be all padding, without a cache
        rows = options.max_slots
        length = min(options.max_model_len or spec.max_positions, spec.max_positions)
        state = DeviceState(spec, CachePlan(1, length), rows, options.block_size, dtype, device)
        rehearsal = Runner(loaded.model, ops, state, ThreadLane(LANE))
        shapes = Buckets(options.step_tokens(device.type), rows).shapes
        rehearsal.compile(shapes)
        # Once for what is launched by the host, once for the graphs.
        peak += 2 * measure_peak(lambda: rehearsal.rehearse(shapes[0]), device)
    left = max(free_memory(device) - peak, 0)
    return plan_cache(spec, options, dtype, left, default_memory=left * 9 // 10)


def _make_runner(loaded: Loaded, ops: Ops, options: EngineOptions, cache: CachePlan) -> Runner:
    spec, device = loaded.model.spec, loaded.device
    dtype = cache_dtype(options, loaded.dtype)
    state = DeviceState(spec, cache, options.max_slots, options.block_size, dtype, device)
    lane: Lane
    graphs = None
    if device.type == "cuda":
        lane = StreamLane(LANE, STAGE, device)
        if options.capture and ops.capturable:
            graphs = StepGraphs(options.step_tokens(device.type), options.max_slots, lane, device)
    else:
        lane = ThreadLane(LANE)
    runner = Runner(loaded.model, ops, state, lane, graphs)
    runner.capture(progress=options.progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what was written so far was written on other streams than the lane's
    return runner
