"""Double precision all the way: tests of exactness without the rounding that models put in on purpose."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "linear"})
"""Operations that take no mixture of dtypes."""


class NoDowncasts(TorchFunctionMode):
    """Within it float64 tensors stay float64 where a model asks for float32: in norms, softmax, routers.

    Such places are harmless on real models, but in them two computations of the same row, summed in another order, part
    by 1e-7 even in float64, which hides small errors.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Drops conversions of float64 to float32, and float32 as the result type of an operation on float64."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args else kwargs.get("input")
        if name in PRODUCTS and len({arg.dtype for arg in args if isinstance(arg, torch.Tensor)}) > 1:
            args = tuple(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args)
        elif isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if name == "float":
                return first
            if name in ("to", "type"):
                args = tuple(torch.float64 if arg == torch.float32 else arg for arg in args)
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
