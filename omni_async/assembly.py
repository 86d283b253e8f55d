"""Puts an engine's parts together on the engine's thread: model, cache, runner, scheduler, stage, intake."""

from collections.abc import Callable

import torch

from omni_async.backend.choose import choose_ops
from omni_async.intake import Intake
from omni_async.loading.loaded import Loaded
from omni_async.options import EngineOptions
from omni_async.runner.device_state import DeviceState
from omni_async.runner.lane import ThreadLane
from omni_async.runner.memory import free_memory, plan_cache
from omni_async.runner.runner import Runner
from omni_async.sampling.table import SamplingTable
from omni_async.scheduler.scheduler import Limits, Scheduler
from omni_async.stage import RequestEnded, Stage

STAGE = "text"
"""The one stage of a text model, and the name of its output."""

Load = Callable[[EngineOptions], Loaded]
"""Makes the model; runs on the engine's thread."""


def assemble(load: Load, options: EngineOptions, on_end: RequestEnded) -> tuple[Stage, Intake]:
    """Load a model and build the stage that serves it.

    Raises:
        LoadError: the checkpoint cannot be loaded.
        OptionError: the options do not fit the model or the machine.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load(options)
    spec = loaded.model.spec
    cache = plan_cache(spec, options, loaded.dtype, free_memory(loaded.device))
    state = DeviceState(spec, cache, options.max_slots, options.block_size, loaded.dtype, loaded.device)
    table = SamplingTable(options.max_slots, spec.vocab_size, loaded.device)
    runner = Runner(
        loaded.model, choose_ops(options.backend, loaded.device), state, table, ThreadLane("omni-async-lane")
    )
    scheduler = Scheduler(
        Limits(
            num_slots=options.max_slots,
            num_blocks=cache.num_blocks,
            block_size=options.block_size,
            max_step_tokens=options.max_step_tokens,
            prefix_caching=options.prefix_caching,
        )
    )
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
