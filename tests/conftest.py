import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter; it must know before anything imports it.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Tests marked `anyio` run on each kind of event loop."""
    return request.param


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    """The test leaves no thread behind that it did not find, but for those that the event loop itself keeps."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("omni-async")]
    assert not left
