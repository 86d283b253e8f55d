"""Matrix products with weights."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def _has_onednn_product() -> bool:
    """Whether this torch has oneDNN, and the operator by the name used below, which is not a public one."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.ops.mkldnn._linear_pointwise.default  # noqa: B018 - the attribute is looked up in the operator registry
    except AttributeError:
        return False
    return True


ONEDNN = _has_onednn_product()

FEW_ROWS = 8
"""Up to here oneDNN's product is used: it gains most, and rounding like `transformers` matters for longer prompts."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Ops.linear`."""
    if len(x) <= FEW_ROWS and x.dtype is torch.float32 and x.device.type == "cpu" and ONEDNN:
        # F.linear gives float32 to BLAS, whose products of few rows run far below memory speed; oneDNN's do not.
        # All matrices of a model of 135 M parameters (30 layers, hidden size 576) on two cores of an AMD EPYC:
        # 1 row 27 ms against 45, 8 rows 36 against 59. For the other types F.linear uses oneDNN itself.
        # TorchInductor compiles linear layers to this operator; torch has no public name for it.
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)
